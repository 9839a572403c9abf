"""Collectives of the gloo backend against torch.distributed's own on gloo, side by side.

Contenders take turns within one run, so that whatever else the machine does meets them alike.
A time is that of the slowest rank, from a barrier on, and CPU time the mean of the ranks, all
threads together; what is shown are medians.

    python benchmarks/gloo_collectives.py --ranks 2 --repetitions 20
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from polyshard.spi import Communicator, Lane, Op
from polyshard_gloo import GlooBackend

CPU = torch.device("cpu")
SMALL_BYTES = 1024
Contenders = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 64])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        mp.spawn(run_rank, (arguments, store), nprocs=arguments.ranks)


def run_rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """Time everything on this rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks
    )
    backend = GlooBackend()
    communicator = backend.communicator(dist.group.WORLD, CPU, purpose="gather")
    show(rank, f"{arguments.ranks} ranks, {arguments.repetitions} repetitions, medians in ms")
    show(rank, f"{'':<32}{'elapsed':>29}{'CPU':>29}")
    columns = f"{'torch':>10}{'polyshard':>11}{'ratio':>8}"
    show(rank, f"{'collective':<32}{columns}{columns}")
    for megabytes in arguments.megabytes:
        for dtype in (torch.float32, torch.bfloat16):
            numel = megabytes * 2**20 // dtype.itemsize
            for name, contenders in collectives(communicator, numel, dtype).items():
                report(rank, f"{name} {megabytes} MB {dtype}", contenders, arguments.repetitions)
    numel = SMALL_BYTES // 4
    small = collectives(communicator, numel, torch.float32)["all_gather"]
    report(rank, f"all_gather {SMALL_BYTES} bytes", small, 20 * arguments.repetitions)
    lane, compute = backend.lane("gather", CPU), backend.compute_lane(CPU)
    times = timed(lambda: hand_over(lane, compute), 1000)
    show(rank, f"submit, mark and wait for work of a lane: {median(times) * 1e6:.0f} us")
    communicator.close()
    dist.destroy_process_group()


def collectives(
    communicator: Communicator, numel: int, dtype: torch.dtype
) -> dict[str, Contenders]:
    """Contenders by collective, on a full buffer of ``numel`` elements."""
    full = torch.zeros(numel, dtype=dtype)
    shard = torch.zeros(numel // communicator.size, dtype=dtype)
    return {
        "all_gather": {
            "torch": lambda: dist.all_gather_into_tensor(full, shard),
            "polyshard": lambda: communicator.all_gather([full], [shard], label="all_gather"),
        },
        "reduce_scatter": {
            "torch": lambda: dist.reduce_scatter_tensor(shard, full),
            "polyshard": lambda: communicator.reduce_scatter(
                [shard], [full], Op.SUM, label="reduce_scatter"
            ),
        },
        "all_reduce": {
            "torch": lambda: dist.all_reduce(full),
            "polyshard": lambda: communicator.all_reduce([full], Op.SUM, label="all_reduce"),
        },
    }


def report(rank: int, name: str, contenders: Contenders, repetitions: int) -> None:
    """Print medians of both contenders, and by how much the second is ahead."""
    elapsed = torch.zeros(repetitions, len(contenders), dtype=torch.float64)
    busy = torch.zeros_like(elapsed)
    for contender in contenders.values():
        contender()  # Connections, pages and caches are warm from here on.
    for repetition in range(repetitions):
        for position, contender in enumerate(contenders.values()):
            dist.barrier()
            before = time.process_time()
            elapsed[repetition, position] = timed(contender, 1)[0]
            busy[repetition, position] = time.process_time() - before
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    dist.all_reduce(busy, dist.ReduceOp.SUM)
    line = f"{name:<32}"
    for times in (elapsed, busy / dist.get_world_size()):
        theirs, ours = (column.median().item() * 1e3 for column in times.unbind(1))
        line += f"{theirs:>10.3f}{ours:>11.3f}{theirs / ours:>8.2f}"
    show(rank, line)


def hand_over(lane: Lane, compute: Lane) -> None:
    """Work on a lane that compute waits for."""
    lane.submit(lambda: None, label="nothing")
    compute.wait(lane.mark())


def timed(call: Callable[[], object], repetitions: int) -> list[float]:
    """Seconds of each call."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def show(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
