"""Steps of a model with everything that might be kept in a set, and the order of work they make.

Run as a program it is one rank, and prints what it saw: in a process whose hash seed is its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training import make_mesh
from watched_gloo import RestlessGloo

from polyshard import Placements, clip_grad_norm_, full_state_dict, fully_shard


@dataclass(frozen=True)
class Seen:
    """What all ranks have to agree on."""

    labels: dict[str, list[str]]  # of work, in order, by lane
    weights: dict[str, list[float]]
    hashed: int  # differs with the hash seed


class Part(nn.Module):
    """Three dtypes, a frozen weight, one to be ignored, and outputs in a set."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fine = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.turning = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.ignored = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, use: str) -> set[Tensor]:
        x = torch.tanh(self.get_submodule(use)(x)) * self.frozen * self.ignored
        return {x, (x * self.fine).float(), (x * self.turning).abs()}


def take_steps(rank: int) -> Seen:
    torch.manual_seed(0)
    backend, mesh = RestlessGloo(seed=rank), make_mesh()
    parts = nn.ModuleDict({name: Part() for name in ("alpha", "beta", "gamma", "delta")})
    model = nn.Module()
    model.parts, model.head = parts, nn.Linear(4, 2)
    ignored = {part.ignored for part in parts.values()}
    for module in (*parts.values(), model.head):
        fully_shard(module, mesh, Placements.zero3("dp"), backend=backend, ignored_params=ignored)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        x = torch.randn(3, 4, generator=generator)
        for name, part in parts.items():
            # Each rank leaves out another layer, which the others use.
            use = "one" if (len(name) + step + rank) % 2 else "two"
            x = torch.stack([out.sum() for out in part(x, use)]).sum() / 10 + x
        model.head(x).square().mean().backward()
        clip_grad_norm_(set(model.parameters()), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = {}
    for module in (*parts.values(), model.head):
        for name, value in full_state_dict(module).items():
            flat = torch.view_as_real(value) if value.is_complex() else value
            weights[f"{len(weights)} {name}"] = flat.double().flatten().tolist()
    return Seen(dict(backend.labels), weights, hash("a name"))


if __name__ == "__main__":
    store, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=count)
    seen = take_steps(number)
    dist.destroy_process_group()
    print(json.dumps(asdict(seen)))
