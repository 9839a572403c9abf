"""How `explain` says things in few words: units that are alike, runs of names, ranks, sizes.

Pure. Knows neither tables nor pictures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from .explained import ExplainedGroup, ExplainedUnit

_NUMBER = re.compile(r"\d+")
_MOST_LISTED_RANKS = 3


def alike(units: Sequence[ExplainedUnit]) -> list[tuple[ExplainedUnit, ...]]:
    """The units, those together that differ in names alone, in the order of the first of each."""
    kinds: dict[object, list[ExplainedUnit]] = {}
    for unit in units:
        groups = tuple(_group_kind(group) for group in unit.groups)
        kind = (
            unit.module_class,
            unit.backend,
            unit.axes,
            unit.reshard_after_forward,
            unit.schedule,
            groups,
        )
        kinds.setdefault(kind, []).append(unit)
    return [tuple(same) for same in kinds.values()]


def _group_kind(group: ExplainedGroup) -> object:
    tensors = tuple(
        (each.label, each.shape, each.local_shape, each.trainable, each.offset)
        for each in group.tensors
    )
    return (group.placements, group.dtypes, group.main_holders, group.bytes, tensors)


def joint_name(names: Sequence[str]) -> str:
    """One name for all: ``blocks.{0..3}`` where they count, else the first and the last."""
    runs = name_runs(names)
    return runs[0] if len(runs) == 1 else f"{runs[0]} ... {shown(names[-1])}"


def name_runs(names: Sequence[str]) -> list[str]:
    """Names in their order, each run that counts up or down as one: ``blocks.{3..0}``."""
    runs: list[list[str]] = []
    place, step = -1, 0
    for name in names:
        if runs:
            counted = _counted(runs[-1][-1], name)
            if counted is not None and (len(runs[-1]) == 1 or counted == (place, step)):
                place, step = counted
                runs[-1].append(name)
                continue
        runs.append([name])
    return [_run(run) for run in runs]


def _counted(name: str, following: str) -> tuple[int, int] | None:
    """(which number in it, 1 or -1) if that is all that makes ``following`` of ``name``."""
    if _NUMBER.split(name) != _NUMBER.split(following):
        return None
    pairs = zip(_NUMBER.findall(name), _NUMBER.findall(following), strict=True)
    steps = [(place, int(after) - int(before)) for place, (before, after) in enumerate(pairs)]
    changed = [(place, step) for place, step in steps if step]
    return changed[0] if len(changed) == 1 and abs(changed[0][1]) == 1 else None


def _run(names: Sequence[str]) -> str:
    first, last = names[0], names[-1]
    if len(names) == 1:
        return shown(first)
    places = zip(_NUMBER.finditer(first), _NUMBER.findall(last), strict=True)
    number, end = next((match, end) for match, end in places if match.group() != end)
    return f"{first[: number.start()]}{{{number.group()}..{end}}}{first[number.end() :]}"


def shown(name: str) -> str:
    """A unit's name; the explained module itself has none."""
    return name or "(root)"


def shortened(name: str, length: int) -> str:
    """The name, its middle left out where it is longer than ``length``."""
    if len(name) <= length:
        return name
    kept = length - 3
    return f"{name[: kept - kept // 2]}...{name[len(name) - kept // 2 :]}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``3``, ``0-7`` or ``0, 4, 8``; with many of them the first and the last."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return str(first)
    if list(ranks) == list(range(first, last + 1)):
        return f"{first}-{last}"
    if len(ranks) <= _MOST_LISTED_RANKS:
        return ", ".join(map(str, ranks))
    return f"{first}, {ranks[1]}, ..., {last}"


def bytes_in_words(count: int) -> str:
    """Bytes up to 1023, then three digits and KiB, MiB, GiB or TiB."""
    if count < 1024:
        return f"{count} B"
    units = ["TiB", "GiB", "MiB", "KiB"]
    value, unit = count / 1024, units.pop()
    while value >= 999.5 and units:
        value, unit = value / 1024, units.pop()
    decimals = 2 - (value >= 9.995) - (value >= 99.95)
    return f"{value:.{decimals}f} {unit}"


def dtype_in_words(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def percent(part: int, whole: int) -> str:
    """``1.2 %``."""
    return f"{100 * part / whole if whole else 0:.1f} %"


def counted(number: int, noun: str) -> str:
    """``1 unit``, ``2 units``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
