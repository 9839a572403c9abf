"""Mutants of the core's scheduling: each is the core without one of its waits or releases.

The list is made from the source, so a wait that is added tomorrow is on it. Run as a script, this
tries every mutant in a process of its own and prints a line of JSON for each.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mutated_core
from mutated_core import SOURCE as SOURCE

#: What the interface calls waiting and giving back; names in the core are made of these.
VERBS = re.compile(r"(^|_)(await|wait|join|joined|settle|release)(_|s$|$)")


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


def sources() -> list[Path]:
    """The core's own files, without those that only tell of it or run for debugging only."""
    aside = ("explain", "debug")
    return sorted(path for path in SOURCE.glob("*.py") if not path.stem.startswith(aside))


def mutants() -> Iterator[Mutant]:
    """One for every wait, settle, join and release that the core's own files state."""
    for path in sources():
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


def try_all(chosen: Sequence[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Every mutant with what killed it; an empty string where nothing did."""
    return mutated_core.try_all(chosen, _check)


def _check(mutant: Mutant) -> None:
    from race_checks import checks, one_rank, run_on_two_ranks

    with one_rank() as mesh:
        for check in checks(mesh):
            check()
    run_on_two_ranks()


def main() -> None:
    """Try all mutants, or those whose line of the list matches the first argument."""
    mutated_core.prepare()
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    chosen = [mutant for mutant in mutants() if wanted.search(str(mutant))]
    for mutant, killer in try_all(chosen):
        print(json.dumps({"mutant": str(mutant), "killer": killer}), flush=True)


if __name__ == "__main__":
    main()
