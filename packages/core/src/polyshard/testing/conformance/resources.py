"""What a process holds, and that it does not grow with what is done over and over.

Knows no backend.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from .bench import Bench
from .data import require

#: How often something is done before and while its growth is looked at.
_WARM_UP, _CYCLES, _ROUNDS = 2, 4, 3
#: Bytes that a process may grow by for reasons of its own.
_SLACK_BYTES = 24 * 2**20

_PROCESS = Path("/proc/self")
_SHARED_MEMORY = Path("/dev/shm")


def require_no_growth(bench: Bench, work: Callable[[], None], what: str) -> None:
    """Raise Violation where doing ``work`` over and over takes more and more of what a process
    has: threads, descriptors, children, shared memory, memory. Every rank must call this."""
    for _ in range(_WARM_UP):
        work()
    for _ in range(_ROUNDS):
        before, memory_before = _held(), _bytes_in_use(bench)
        for _ in range(_CYCLES):
            work()
        bench.eventually(partial(_as_before, before), partial(_told, what, before))
        grown = _bytes_in_use(bench) - memory_before
        # What memory an allocator keeps is its own affair; a leak goes on in every round.
        most = max(bench.everyones(grown))
        if most <= _SLACK_BYTES:
            return
    require(
        grown < most,
        f"{what} {_CYCLES} times left {grown >> 20} MiB of memory in use, and again and again",
    )


def _as_before(before: dict[str, int]) -> bool:
    return not _grown(before)


def _told(what: str, before: dict[str, int]) -> str:
    return f"{what} {_CYCLES} times left {', '.join(_grown(before))}"


def _grown(before: dict[str, int]) -> list[str]:
    """What there is more of than before."""
    now = _held()
    return [
        f"{now[kind] - count} {kind}"
        for kind, count in before.items()
        # Names in shared memory may be other programs', which come and go.
        if now[kind] - count >= (_CYCLES if kind == _NAMES else 1)
    ]


_NAMES = "files in /dev/shm"


def _held() -> dict[str, int]:
    """How many of what this process has, where the system tells."""
    gc.collect()
    held: dict[str, int] = {}
    if _PROCESS.is_dir():
        threads = list((_PROCESS / "task").iterdir())
        held["threads"] = len(threads)
        held["open files and sockets"] = len(os.listdir(_PROCESS / "fd"))
        held["child processes"] = sum(
            len((thread / "children").read_text().split())
            for thread in threads
            if (thread / "children").exists()
        )
        mapped = {
            line.split(maxsplit=5)[5].strip()
            for line in (_PROCESS / "maps").read_text().splitlines()
            if "/dev/shm/" in line
        }
        held["mapped shared memory files"] = len(mapped)
    if _SHARED_MEMORY.is_dir():
        held[_NAMES] = len(os.listdir(_SHARED_MEMORY))
    return held


def _bytes_in_use(bench: Bench) -> int:
    """Memory that this process has in use, of the device where that is one of its own."""
    module = torch.get_device_module(bench.device)
    if hasattr(module, "memory_allocated"):
        return int(module.memory_allocated(bench.device))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's: give back to the system what was freed
        trim(0)
    status = _PROCESS / "statm"
    if not status.exists():
        return 0
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
