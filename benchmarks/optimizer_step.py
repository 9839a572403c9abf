"""An AdamW step over sharded tensors against plain tensors and PyTorch's DTensor, side by side.

One rank, so that all of them compute the same: what differs is the cost of getting to the rows.
Contenders take turns within one run; what is shown is the median in milliseconds.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_step.py --parameters 200 --size 64
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from polyshard.row_split import RowSplit
from polyshard.sharded_tensor import ShardedTensor

WAYS: dict[str, dict[str, bool]] = {
    "default": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = DeviceMesh("cpu", [0])
    split = RowSplit([(0, arguments.size)], (0,))

    def sharded(local: Tensor) -> Tensor:
        return ShardedTensor.wrap(
            local, shape=local.shape, mesh=mesh, placements=[split], name="weight"
        )

    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda local: local,
        "sharded": sharded,
        "DTensor": lambda local: DTensor.from_local(local, mesh, [Shard(0)]),
    }
    print(f"{'':10}" + "".join(f"{name:>10}" for name in contenders))
    for way, options in WAYS.items():
        optimizers = {}
        for name, place in contenders.items():
            weights = []
            for _ in range(arguments.parameters):
                weights.append(nn.Parameter(place(torch.randn(arguments.size, arguments.size))))
                weights[-1].grad = place(torch.randn(arguments.size, arguments.size))
            optimizers[name] = torch.optim.AdamW(weights, **options)
            optimizers[name].step()
        times = measure({name: o.step for name, o in optimizers.items()}, arguments.repetitions)
        print(f"{way:10}" + "".join(f"{1e3 * seconds:10.2f}" for seconds in times.values()))
    dist.destroy_process_group()


def measure(steps: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median seconds of each step, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for _ in range(repetitions):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    gc.enable()
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
