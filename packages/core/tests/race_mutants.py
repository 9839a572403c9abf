"""Mutants of the core's scheduling: each is the core without one of its waits or releases.

The list is made from the source, so a wait that is added tomorrow is on it. Run as a script, this
tries every mutant in a process of its own and prints a line of JSON for each; it imports torch once
and forks, and imports the core only in the forks, each with one statement taken out.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "polyshard"
#: What the interface calls waiting and giving back; names in the core are made of these.
VERBS = re.compile(r"(^|_)(await|wait|join|joined|settle|release)(_|s$|$)")
TIMEOUT = 60.0
AT_ONCE = 2


@dataclass(frozen=True)
class Mutant:
    """One statement that is taken out.

    Args:
        module: dotted name.
        line: of the statement.
        before: its source, in one line.
        source: of the whole module without it.
    """

    module: str
    line: int
    before: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} without `{self.before}`"


def mutants() -> Iterator[Mutant]:
    """One for every wait, settle, join and release that the core's own files state."""
    for path in sorted(SOURCE.glob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                kept = _without(node.value, text)
                if kept is not None:
                    yield Mutant(
                        f"polyshard.{path.stem}",
                        node.lineno,
                        " ".join((ast.get_source_segment(text, node) or "").split()),
                        _replaced(text, node, kept),
                    )


def _without(call: ast.Call, text: str) -> str | None:
    """What stays of a statement that waits or releases; None if it does neither."""
    function = call.func
    if isinstance(function, ast.Attribute) and VERBS.search(function.attr):
        return ast.get_source_segment(text, function.value)  # `units.popleft()` of its release
    names = [
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(call)
        if isinstance(node, ast.Attribute | ast.Name)
    ]
    return "pass" if any(map(VERBS.search, names)) else None


def _replaced(text: str, node: ast.Expr, by: str) -> str:
    lines = text.splitlines(keepends=True)
    assert node.end_lineno is not None
    first = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    # As many lines as before, so that tracebacks fit.
    lines[node.lineno - 1 : node.end_lineno] = [
        f"{first}{by}{rest}" + "\n" * (node.end_lineno - node.lineno)
    ]
    return "".join(lines)


class _Mutated(importlib.abc.MetaPathFinder):
    """Imports one module from other source."""

    def __init__(self, mutant: Mutant) -> None:
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


def try_all(chosen: Sequence[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Every mutant with what killed it; an empty string where nothing did."""
    waiting, running = list(chosen)[::-1], {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            mutant = waiting.pop()
            reader, pid = _fork(mutant)
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


def _fork(mutant: Mutant) -> tuple[int, int]:
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
        sys.meta_path.insert(0, _Mutated(mutant))
        told = _check(mutant)
    finally:
        os.write(writer, f"{told}\n".encode())
        os._exit(0)


def _check(mutant: Mutant) -> str:
    """What the first check that fails says; an empty string if all pass."""
    try:
        from race_checks import checks, one_rank, run_on_two_ranks

        with one_rank() as mesh:
            for check in checks(mesh):
                check()
        run_on_two_ranks()
    except BaseException as error:
        last = traceback.format_exception_only(error)[0].strip()
        return " ".join(last.split())[:400] or "an error"
    return ""


def main() -> None:
    """Try all mutants, or those whose line of the list matches the first argument."""
    import torch
    import torch.distributed.tensor

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # makes torch import its compiler
    sys.path.insert(0, str(Path(__file__).parent))
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    chosen = [mutant for mutant in mutants() if wanted.search(str(mutant))]
    for mutant, killer in try_all(chosen):
        print(json.dumps({"mutant": str(mutant), "killer": killer}), flush=True)


if __name__ == "__main__":
    main()
