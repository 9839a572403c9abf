"""How wrapping and stepping grow with the number of units and parameters, on one process.

Times are per unit and relative to the smallest model: 1.0 is linear. Host work only: tensors are
tiny, and a backend of one rank copies instead of communicating.

    python benchmarks/growth.py --units 1000 --parameters 20
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import Placements, fully_shard
from polyshard.testing.loopback import LoopbackBackend

STRATEGIES = ("zero3", "zero1", "ddp")


class Unit(nn.Module):
    """Many small parameters, all used."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(4, 4) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x @ factor
        return torch.tanh(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=1000, help="of the largest model")
    parser.add_argument("--parameters", type=int, default=20, help="of each unit")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    sizes = [arguments.units // 8, arguments.units // 4, arguments.units // 2, arguments.units]
    phases = ("wrap", "first step", "later step")
    heads = "".join(f"{phase:>24}" for phase in phases)
    print(f"ms per unit of {arguments.parameters} parameters, and against the smallest model")
    print(f"{'strategy':<10}{'units':>8}{heads}")
    for strategy in STRATEGIES:
        smallest: list[float] = []
        for units in sizes:
            runs = [
                run(strategy, units, arguments.parameters, mesh)
                for _ in range(arguments.repetitions)
            ]
            times = [1e3 * median(each) / units for each in zip(*runs, strict=True)]
            smallest = smallest or times
            cells = "".join(
                f"{each:>16.3f}{each / first:>8.2f}"
                for each, first in zip(times, smallest, strict=True)
            )
            print(f"{strategy:<10}{units:>8}{cells}", flush=True)
    dist.destroy_process_group()


def run(strategy: str, units: int, parameters: int, mesh: object) -> tuple[float, float, float]:
    """Seconds to make all units, for the first step, and for the third."""
    model = nn.Sequential(*(Unit(parameters) for _ in range(units)))
    placements, backend = getattr(Placements, strategy)("dp"), LoopbackBackend()
    moments = [time.perf_counter()]
    for module in (*model, model):
        fully_shard(module, mesh, placements, backend=backend)  # type: ignore[arg-type]
    moments.append(time.perf_counter())
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()
        moments.append(time.perf_counter())
    return moments[1] - moments[0], moments[2] - moments[1], moments[4] - moments[3]


if __name__ == "__main__":
    main()
