"""What a strategy costs a rank in memory and traffic: measured, each in a fresh process per rank.

Run as a script it is such a process. Knows no terminal and no picture.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist
from gpt_data import Corpus, load_corpus
from gpt_model import GPTConfig
from gpt_training import Recipe, Trainer
from torch.distributed import PrefixStore, TCPStore

# Enough that optimizer state exists and DDP has rebuilt its buckets, which it does in step two.
MEASURED_STEPS = 4
TIMEOUT = datetime.timedelta(seconds=60)

CAPTION = (
    f"Measured over {MEASURED_STEPS} steps in a fresh process per rank and strategy; the largest "
    "of the ranks. Memory: resident memory above what torch, its process group and a tiny warm-up "
    "model took already; pages that ranks share count on each. Between steps: gradients dropped, "
    "freed memory returned to the system. Sent: the least that the collectives have to send, "
    "counted from their buffers."
)


@dataclass(frozen=True)
class Cost:
    """What one strategy took, of the rank that took most; ``sent_bytes`` are per step."""

    strategy: str
    between_steps_bytes: int
    peak_bytes: int
    sent_bytes: int


class MeasurementError(RuntimeError):
    """A measuring process failed; says which and why."""


def can_measure() -> bool:
    """Whether this system tells a process its resident memory and the peak of it (Linux does)."""
    return "VmHWM" in _process_status()


def measure_in_fresh_process(recipe: Recipe) -> Cost:
    """Train a few steps of ``recipe`` in a new process beside every rank. All ranks call it.

    Raises MeasurementError with the last line that the process wrote. The process is gone when
    this returns or raises, also by KeyboardInterrupt.
    """
    store = _shared_store()
    with tempfile.TemporaryDirectory() as directory:
        result, log = Path(directory, "result.json"), Path(directory, "log.txt")
        order = {
            "strategy": recipe.strategy,
            "backend": recipe.backend,
            "host": store.host,
            "port": store.port,
            "result": str(result),
        }
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(order)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                exit_code = process.wait()
            finally:
                process.kill()
                process.wait()
        if exit_code != 0:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise MeasurementError(
                f"measuring {recipe.strategy} ended with exit code {exit_code}: {lines[-1]}"
            )
        costs: list[Cost | None] = [None] * dist.get_world_size()
        dist.all_gather_object(costs, Cost(**json.loads(result.read_text())))
    return _largest([cost for cost in costs if cost is not None])


def _largest(costs: list[Cost]) -> Cost:
    return Cost(
        costs[0].strategy,
        max(cost.between_steps_bytes for cost in costs),
        max(cost.peak_bytes for cost in costs),
        max(cost.sent_bytes for cost in costs),
    )


def _shared_store() -> TCPStore:
    """A store on a free port of rank 0, through which the measuring processes meet."""
    host, rank = os.environ["MASTER_ADDR"], dist.get_rank()
    address: list[int] = [0]
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, timeout=TIMEOUT)
        address = [store.port]
    dist.broadcast_object_list(address)
    if rank != 0:
        store = TCPStore(host, address[0], is_master=False, timeout=TIMEOUT)
    return store


class MemoryMeter:
    """Growth of this process's resident memory since the meter was made."""

    def __init__(self) -> None:
        _return_freed_memory()
        # 5 sets the peak back to the present (proc_pid_clear_refs(5)).
        Path("/proc/self/clear_refs").write_text("5")
        self._start = _process_status()["VmRSS"]

    def peak_bytes(self) -> int:
        """The largest growth so far, as the kernel recorded it."""
        return _process_status()["VmHWM"] - self._start

    def present_bytes(self) -> int:
        """The growth that is left once all freed memory is back at the system."""
        _return_freed_memory()
        return _process_status()["VmRSS"] - self._start


def _process_status() -> dict[str, int]:
    """The sizes in ``/proc/self/status`` in bytes, by name; empty where there is no such file."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}


def _return_freed_memory() -> None:
    gc.collect()
    # glibc keeps freed memory for later requests; without this it would count as still in use.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _measure(recipe: Recipe, corpus: Corpus) -> Cost:
    # Code that is paged in and threads that start with the first step are no cost of the model.
    _train(replace(recipe, model=GPTConfig(num_blocks=1, width=32, context=16)), corpus)
    meter = MemoryMeter()
    trainer = _train(recipe, corpus)
    peak = meter.peak_bytes()
    return Cost(
        recipe.strategy, meter.present_bytes(), peak, trainer.sent_bytes() // MEASURED_STEPS
    )


def _train(recipe: Recipe, corpus: Corpus) -> Trainer:
    trainer = Trainer(recipe, corpus)
    for _ in range(MEASURED_STEPS):
        trainer.step()
    return trainer


def main() -> None:
    """Measure what the order on the command line asks for, as one rank of its own group."""
    order = json.loads(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = TCPStore(order["host"], order["port"], is_master=False, timeout=TIMEOUT)
    store = PrefixStore(order["strategy"], server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    cost = _measure(Recipe(order["strategy"], order["backend"]), load_corpus())
    Path(order["result"]).write_text(json.dumps(asdict(cost)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
