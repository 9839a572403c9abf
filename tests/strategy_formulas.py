"""The formulas of docs/strategies.md, read from the document so that tests cannot drift from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "strategies.md"


@dataclass(frozen=True)
class Group:
    """What the formulas count by: the elements, with padding, and the parameters of one group."""

    numel: int
    count: int
    trainable: bool = True


def tables() -> list[list[dict[str, str]]]:
    """The tables of the document, each a list of rows by column."""
    found: list[list[dict[str, str]]] = []
    for block in re.findall(r"(?:^\|.*\|\n)+", DOCUMENT.read_text(), re.MULTILINE):
        header, _, *rows = [
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()
        ]
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


@lru_cache
def formulas(strategy: str) -> dict[str, str]:
    """Every formula of a strategy, by the title of its column."""
    rows = [row for table in tables() for row in table if row.get("strategy") == strategy]
    return {
        title: cell.strip("`")
        for row in rows
        for title, cell in row.items()
        if cell.startswith("`") and cell.endswith("`")
    }


@dataclass(frozen=True)
class Book:
    """The document's formulas for one strategy, its letters given values."""

    strategy: str
    letters: dict[str, int]

    def __call__(self, quantity: str, group: Group | None = None) -> int:
        """The formula in the column ``quantity``, for one group where it has its letters."""
        values = dict(self.letters)
        if group is not None:
            values |= {"P": group.numel, "K": group.count}
        names = {letter: Fraction(value) for letter, value in values.items()}
        value = Fraction(eval(formulas(self.strategy)[quantity], {"__builtins__": {}}, names))
        assert value.denominator == 1, f"{quantity} of {self.strategy} is {value}"
        return int(value)

    def total(self, quantity: str, groups: Iterable[Group]) -> int:
        """The formula's sum over groups."""
        return sum(self(quantity, group) for group in groups)
