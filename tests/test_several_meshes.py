"""Units of one model on different meshes: experts on a subgroup, dense layers on all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import Placements, clip_grad_norm_, full_state_dict, fully_shard
from polyshard.testing import run_ranks

RANKS, EXPERTS, WIDTH, STEPS = 4, 2, 6, 10


class Mixture(nn.Module):
    """Dense layers around experts, of which a process may hold some only."""

    def __init__(self, experts: Iterable[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(3, WIDTH)
        made = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({str(index): made[index] for index in experts})
        self.after = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        x = torch.tanh(self.before(x))
        return self.after(x + self.experts[str(expert)](x))


def batches() -> Tensor:
    return torch.randn(STEPS, RANKS, 5, 3, generator=torch.Generator().manual_seed(2))


def train(
    rank: int, dense: str, sparse: str, max_norm: float
) -> tuple[int, list[float], dict[str, Tensor]]:
    """Each group of ranks holds one expert, sharded inside the group."""
    everyone = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    groups = init_device_mesh("cpu", (EXPERTS, RANKS // EXPERTS), mesh_dim_names=("ep", "edp"))
    mine = groups.get_local_rank("ep")
    model = Mixture([mine])
    # Averaged over the ranks of the group only: the others' zeros are not counted in.
    placements = getattr(Placements, sparse)("edp")
    fully_shard(model.experts[str(mine)], groups, placements, grad_divisor=EXPERTS)
    fully_shard(model, everyone, getattr(Placements, dense)("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in batches():
        model(step[rank], mine).square().mean().backward()
        norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return mine, norms, full_state_dict(model)


def train_plain(max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    model = Mixture(range(EXPERTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in batches():
        losses = [
            model(part, rank * EXPERTS // RANKS).square().mean() for rank, part in enumerate(step)
        ]
        torch.stack(losses).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


@pytest.mark.parametrize(
    ("dense", "sparse"), [("zero3", "zero3"), ("zero1", "zero3"), ("zero3", "ddp")]
)
def test_experts_on_a_subgroup(dense: str, sparse: str) -> None:
    """Ten clipped AdamW steps: the norm that one process finds, and its weights."""
    expected_norms, expected = train_plain(0.1)
    for mine, norms, weights in run_ranks(RANKS, train, dense, sparse, 0.1):
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        assert any(name.startswith(f"experts.{mine}") for name in weights)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=0, msg=name)


def own_towers(rank: int) -> list[Tensor]:
    """Neither mesh holds the other: columns and rows of a square of ranks."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    fully_shard(model[0], square, Placements.zero3("rows"))
    fully_shard(model[2], square, Placements.zero3("columns"))
    fully_shard(model, square, Placements.zero3("rows"))
    for _ in range(2):
        # The same data along the axis that a unit is not sharded over, for each of the two.
        model(batches()[0, 0]).square().mean().backward()
    dist.barrier()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_meshes_that_cross() -> None:
    """Units on meshes of which neither holds the other keep one order of reductions."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    for _ in range(2):
        plain(batches()[0, 0]).square().mean().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    for found in run_ranks(RANKS, own_towers):
        torch.testing.assert_close(found, expected)
