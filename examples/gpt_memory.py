"""What a strategy costs a rank in memory and traffic: measured, each in a fresh process per rank.

Run as a script it is what those processes are forked from. Knows no terminal and no picture.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from gpt_data import Corpus, load_corpus
from gpt_model import GPTConfig
from gpt_training import Recipe, Trainer
from torch.distributed import PrefixStore, TCPStore

# Enough that optimizer state exists and DDP has rebuilt its buckets, which it does in step two.
MEASURED_STEPS = 3
# Where glibc keeps freed tensors for later, peaks differ by a fifth from run to run. Larger blocks
# than this many bytes it then takes from the system and gives back, one by one.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
TIMEOUT = datetime.timedelta(seconds=60)

CAPTION = (
    f"Measured over {MEASURED_STEPS} steps in a fresh process per rank and strategy; the largest "
    "of the ranks. Memory: resident memory above what torch, its process group and a tiny warm-up "
    "model took already; pages that ranks share count on each. Freed memory goes back to the "
    "system at once. Between steps: gradients dropped. Sent: the least that the collectives have "
    "to send, counted from their buffers."
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


class Measuring:
    """Measures strategies beside this rank, each in a process that did nothing before.

    A context manager; all ranks enter it and ask for the same strategies. Behind it is a process
    that has only imported torch and read the text: it is forked for every strategy, which takes
    milliseconds where a new interpreter takes seconds. All are gone when the scope is left, also
    by KeyboardInterrupt, and when this rank dies.
    """

    def __init__(self, recipe: Recipe) -> None:
        store = self._store = _shared_store()  # kept: rank 0 serves the others from it
        order = {"host": store.host, "port": store.port, "recipe": asdict(recipe)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the scope
        self._process = subprocess.Popen(
            (sys.executable, str(Path(__file__).resolve()), json.dumps(order)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **FREED_AT_ONCE},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()  # waits, and closes the pipes
        self._log.close()

    def cost_of(self, strategy: str) -> Cost:
        """Train a few steps of the recipe by ``strategy`` in a fresh process per rank.

        Raises MeasurementError with the last line that the process wrote.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # what ended it is in its log
            self._process.stdin.write(f"{strategy}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            raise MeasurementError(f"measuring {strategy} failed: {(lines or ['no output'])[-1]}")
        costs: list[Cost | None] = [None] * dist.get_world_size()
        dist.all_gather_object(costs, Cost(**json.loads(answer)))
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


def _answer(strategy: str, order: dict[str, Any], corpus: Corpus) -> None:
    """Measure as one rank of a process group of its own, and print the cost as JSON."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = TCPStore(order["host"], order["port"], is_master=False, timeout=TIMEOUT)
    store = PrefixStore(strategy, server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    known = order["recipe"]
    model, mesh = GPTConfig(**known["model"]), tuple(known["mesh"])
    recipe = Recipe(**{**known, "strategy": strategy, "model": model, "mesh": mesh})
    print(json.dumps(asdict(_measure(recipe, corpus))), flush=True)
    dist.destroy_process_group()


def _die_with_parent() -> None:
    """Nothing outlives what it works for, whatever ended that."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def main() -> None:
    """Fork for every strategy that comes as a line, until there are no more or one fails."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank ends this process
    order = json.loads(sys.argv[1])
    corpus = load_corpus()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _die_with_parent()
            _answer(line.strip(), order, corpus)
            return
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(1)


if __name__ == "__main__":
    main()
