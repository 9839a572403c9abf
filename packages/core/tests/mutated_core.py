"""Puts checks to a core of which one file has other source, each in a process of its own.

Whoever runs this imports torch once and forks; only the forks import the core. Knows no checks and
makes no mutants.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

SOURCE = Path(__file__).parents[1] / "src" / "polyshard"
TIMEOUT = 60.0
AT_ONCE = 2


class Mutated(Protocol):
    """A core of which one module has other source."""

    @property
    def module(self) -> str:
        """Dotted name."""

    @property
    def source(self) -> str:
        """Of the whole module."""


M = TypeVar("M", bound=Mutated)


class _Finder(importlib.abc.MetaPathFinder):
    """Imports one module from other source."""

    def __init__(self, mutant: Mutated) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self._mutant.module:
            return None
        file = SOURCE / f"{name.rpartition('.')[2]}.py"
        return importlib.util.spec_from_file_location(
            name, file, loader=_Loader(name, str(file), self._mutant.source)
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> object:
        return compile(self._source, self.path, "exec")


def prepare() -> None:
    """Import, before forking, what all checks need and what does not import the core."""
    import torch
    import torch.distributed.tensor

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # makes torch import its compiler
    sys.path.insert(0, str(Path(__file__).parent))


def try_all(chosen: Sequence[M], check: Callable[[M], object]) -> Iterator[tuple[M, str]]:
    """Every mutant with what killed it; an empty string where nothing did.

    Args:
        check: raises where a mutant shows; runs in the mutant's process.
    """
    waiting, running = list(chosen)[::-1], {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            mutant = waiting.pop()
            reader, pid = _fork(mutant, check)
            running[reader] = (mutant, pid, time.monotonic() + TIMEOUT)
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for reader, (mutant, pid, deadline) in list(running.items()):
            if reader not in ready and time.monotonic() < deadline:
                continue
            late = reader not in ready
            if late:
                os.kill(pid, signal.SIGKILL)
            with os.fdopen(reader) as stream:
                told = stream.read()
            _, status = os.waitpid(pid, 0)
            del running[reader]
            died = f"the process ended with {os.waitstatus_to_exitcode(status)}"
            yield mutant, "no end in time" if late else told.removesuffix("\n") if told else died


def _fork(mutant: M, check: Callable[[M], object]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, pid
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    told = "the checks did not run"
    try:
        sys.meta_path.insert(0, _Finder(mutant))
        told = _said(mutant, check)
    finally:
        os.write(writer, f"{told}\n".encode())
        os._exit(0)


def _said(mutant: M, check: Callable[[M], object]) -> str:
    """What the check raised, in one line; an empty string if it did not."""
    try:
        check(mutant)
    except BaseException as error:
        last = traceback.format_exception_only(error)[0].strip()
        return " ".join(last.split())[:400] or "an error"
    return ""
