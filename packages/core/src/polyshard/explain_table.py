"""What `explain` found, as text for a terminal: lines of columns, in a monospaced font.

Knows values only. Units that are alike share a line, and long tables end with what they leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .explain_words import (
    alike,
    bytes_in_words,
    counted,
    dtype_in_words,
    joint_name,
    name_runs,
    percent,
    ranks_in_words,
    shortened,
)
from .explained import (
    ExplainedGroup,
    ExplainedOrder,
    ExplainedTensor,
    ExplainedUnit,
    HeldBytes,
)
from .schedule import SchedulePolicy

_MOST_LINES = 60  # of one table
_NAME_LENGTH = 40
_MOST_NAMES = 12  # in one line
_MOST_SHARDS = 4  # of which rows and ranks are listed

Kind = tuple[ExplainedUnit, ...]


def table(
    module_class: str,
    units: Sequence[ExplainedUnit],
    orders: Sequence[ExplainedOrder],
    unmanaged: Sequence[str],
    owned_elsewhere: Sequence[str],
) -> str:
    """Everything, one table after the other."""
    kinds = alike(units)
    blocks = [
        [_summary(module_class, units)],
        _units(kinds),
        _groups(kinds),
        _segments(kinds),
        _bytes(kinds, units),
        _orders(orders),
        _tensors(kinds),
    ]
    outside = []
    if unmanaged:
        outside.append(f"Not managed: {_listed(unmanaged)}")
    if owned_elsewhere:
        outside.append(f"Of a unit outside of this module: {_listed(owned_elsewhere)}")
    blocks.append(outside)
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _summary(module_class: str, units: Sequence[ExplainedUnit]) -> str:
    groups = [group for unit in units for group in unit.groups]
    padding = sum(group.padding for group in groups)
    padded = sum(group.padded_numel for group in groups)
    parameters = sum(len(group.tensors) for group in groups)
    return (
        f"{module_class}: {counted(len(units), 'unit')}, {counted(len(groups), 'group')}, "
        f"{counted(parameters, 'parameter')} of {counted(padded - padding, 'element')}, "
        f"{percent(padding, padded)} padding"
    )


def _units(kinds: Sequence[Kind]) -> list[str]:
    rows = [
        (
            _name(kind),
            f"{len(kind)}",
            unit.module_class,
            "; ".join(dict.fromkeys(group.strategy for group in unit.groups)) or "no parameters",
            ", ".join(f"{name}={ranks}" for name, ranks in unit.axes),
            unit.backend,
            "yes" if unit.reshard_after_forward else "no",
            _ahead(unit.schedule),
        )
        for kind in kinds
        for unit in kind[:1]
    ]
    headings = ("unit", "x", "class", "strategy", "mesh", "backend", "reshard", "gathers ahead")
    return _lines("Units", headings, rows, right={1})


def _ahead(schedule: SchedulePolicy) -> str:
    forward, backward = (
        f"{units}" if elements is None else counted(elements, "element")
        for units, elements in (
            (schedule.forward_units, schedule.forward_elements),
            (schedule.backward_units, schedule.backward_elements),
        )
    )
    return f"{forward} forward, {backward} backward"


def _each_group(kinds: Sequence[Kind]) -> Iterator[tuple[str, ExplainedGroup]]:
    for kind in kinds:
        for group in kind[0].groups:
            yield _name(kind), group


def _groups(kinds: Sequence[Kind]) -> list[str]:
    rows = [
        (
            name,
            f"{group.index}",
            f"{group.trainable:,}",
            f"{group.frozen:,}",
            f"{group.numel:,}",
            f"{group.padding:,} ({percent(group.padding, group.padded_numel)})",
            f"{len(group.segments)}",
            "/".join(
                f"{len(holders)}"
                for holders in (group.parameter_holders, group.gradient_holders, group.main_holders)
            ),
            _holders(group),
        )
        for name, group in _each_group(kinds)
    ]
    headings = (
        "unit",
        "group",
        "trained",
        "frozen",
        "elements",
        "padding",
        "segments",
        "shards",
        "ranks by shard",
    )
    dtypes = [
        (
            name,
            f"{group.index}",
            *map(
                dtype_in_words,
                (
                    group.dtypes.compute,
                    group.dtypes.main,
                    group.dtypes.main_grad,
                    group.dtypes.grad_comm,
                ),
            ),
        )
        for name, group in _each_group(kinds)
    ]
    dtype_headings = ("unit", "group", "computes", "main weight", "main gradient", "travels")
    return [
        *_lines("Groups", headings, rows, right={1, 2, 3, 4, 5, 6, 7}),
        "Shards are of the weights that compute, of gradients and of main weights; ranks hold the",
        "last.",
        "",
        *_lines("Dtypes", dtype_headings, dtypes, right={1}),
    ]


def _holders(group: ExplainedGroup) -> str:
    return _by_shard(group, lambda shard: ranks_in_words(group.main_holders[shard]))


def _segments(kinds: Sequence[Kind]) -> list[str]:
    rows = [
        (
            name,
            f"{group.index}",
            f"{segment.index}",
            f"{segment.offset:,}",
            f"{segment.numel:,}",
            f"{segment.shard_numel:,}",
            f"{segment.padding:,}",
            f"{len(segment.tensors):,}",
        )
        for name, group in _each_group(kinds)
        for segment in group.segments
    ]
    headings = (
        "unit",
        "group",
        "segment",
        "starts at",
        "elements",
        "per shard",
        "padding",
        "tensors",
    )
    return _lines("Segments", headings, rows, right={1, 2, 3, 4, 5, 6, 7})


def _bytes(kinds: Sequence[Kind], units: Sequence[ExplainedUnit]) -> list[str]:
    rows = [
        (name, f"{len(kind)}", f"{group.index}", *_amounts(group.bytes))
        for kind in kinds
        for name in [_name(kind)]
        for group in kind[0].groups
    ]
    total = sum((unit.bytes for unit in units), HeldBytes())
    rows.append(("all together", f"{len(units)}", "", *_amounts(total)))
    headings = (
        "unit",
        "x",
        "group",
        "between steps",
        "gradients",
        "accumulators",
        "copies",
        "gathered",
    )
    return [
        *_lines(
            "Bytes on each rank, of each unit", headings, rows, right={1, 2, 3, 4, 5, 6, 7}, last=1
        ),
        "Between steps there are the main weights"
        + (" and what the backend keeps for life" if total.kept else "")
        + "; the optimizer's state comes on top, laid out alike.",
        "Gradients are added while .grad shows them, accumulators and copies inside a window,",
        "and gathered weights while a unit is in use or was gathered ahead.",
    ]


def _amounts(held: HeldBytes) -> tuple[str, ...]:
    return tuple(
        bytes_in_words(count)
        for count in (
            held.between_steps,
            held.gradients,
            held.accumulators,
            held.copies,
            held.gathered,
        )
    )


def _orders(orders: Sequence[ExplainedOrder]) -> list[str]:
    lines = ["Order in which units are expected, and gathered ahead"]
    for order in orders[:_MOST_LINES]:
        forward_note = "" if order.has_run else "as registered: no forward has run yet"
        backward_note = "" if order.backward is not None else "not known before the first backward"
        expected = order.forward[::-1] if order.backward is None else order.backward
        for direction, names, note, most in (
            ("forward", order.forward, forward_note, order.most_gathered_forward),
            ("backward", expected, backward_note, order.most_gathered_backward),
        ):
            lines.append(f"  {direction + ':':<9} {_listed(name_runs(names), ' > ')}")
            held = "" if most is None else f"at most {bytes_in_words(most)} gathered at one time"
            remarks = [remark for remark in (note, held) if remark]
            if remarks:
                lines.append(f"            ({'; '.join(remarks)})")
    if len(orders) > _MOST_LINES:
        lines.append(f"  ... and those of {len(orders) - _MOST_LINES} more roots")
    return lines


def _tensors(kinds: Sequence[Kind]) -> list[str]:
    rows = [
        (
            name,
            f"{group.index}",
            f"{segment.index}",
            _tensor_name(tensor, kind),
            _shape(tensor),
            f"{tensor.offset:,}" if tensor.numel else "-",
            _rows(tensor, group),
        )
        for kind in kinds
        for name in [_name(kind)]
        for group in kind[0].groups
        for segment in group.segments
        for tensor in segment.tensors
    ]
    headings = ("unit", "group", "segment", "tensor", "shape", "starts at", "rows by shard")
    return _lines("Tensors (rows as start:stop)", headings, rows, right={1, 2, 5})


def _tensor_name(tensor: ExplainedTensor, kind: Kind) -> str:
    """Inside its unit, with all names it is tied to where that unit has no likes."""
    name = shortened(tensor.label, _NAME_LENGTH)
    notes = [] if tensor.trainable else ["frozen"]
    if len(tensor.names) > 1:
        others = ", ".join(tensor.names[1:]) if len(kind) == 1 else f"{len(tensor.names) - 1} more"
        name = f"{name} = {others}"
    return f"{name} ({', '.join(notes)})" if notes else name


def _shape(tensor: ExplainedTensor) -> str:
    whole = "x".join(map(str, tensor.shape)) or "0-D"
    if not tensor.distribution:
        return whole
    return f"{'x'.join(map(str, tensor.local_shape)) or '0-D'} of {whole} ({tensor.distribution})"


def _rows(tensor: ExplainedTensor, group: ExplainedGroup) -> str:
    """Shard by shard, or with many of them the run of shards that have any."""
    if len(group.main_holders) <= _MOST_SHARDS:
        ranges = list(tensor.rows.by_shard)
        return " | ".join(f"{start}:{stop}" if stop > start else "-" for start, stop in ranges)
    if not tensor.numel:
        return "-"
    # A run of the buffer, so also of shards: no boundary cuts a row.
    by_shard = tensor.rows.by_shard
    first = by_shard.offset // by_shard.shard_numel
    last = (by_shard.offset + tensor.numel - 1) // by_shard.shard_numel
    if first == last:
        return f"all on shard {first}"
    most = max(stop - start for start, stop in by_shard[first : min(first + 2, last) + 1])
    return f"up to {most:,} each on shards {first}-{last}"


def _by_shard(group: ExplainedGroup, words: Callable[[int], str]) -> str:
    """Words about every shard of the main weights, or about the first ones and the last."""
    count = len(group.main_holders)
    if count <= _MOST_SHARDS:
        return " | ".join(map(words, range(count)))
    return " | ".join([*map(words, range(_MOST_SHARDS - 1)), "...", words(count - 1)])


def _name(kind: Kind) -> str:
    return shortened(joint_name([unit.name for unit in kind]), _NAME_LENGTH)


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    if len(names) <= _MOST_NAMES:
        return separator.join(names)
    more = f"{len(names) - _MOST_NAMES:,} more"
    return separator.join([*names[:_MOST_NAMES], f"... ({more})"])


def _lines(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: set[int],
    last: int = 0,
) -> list[str]:
    """A title, headings and rows in columns.

    Args:
        right: columns of numbers.
        last: so many rows at the end are shown however many there are.
    """
    if not rows:
        return []
    left_out = len(rows) - last - _MOST_LINES
    if left_out > 0:
        rows = [*rows[:_MOST_LINES], *rows[len(rows) - last :]]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headings, *rows)
    ]
    lines = [title, f"  {lines[0]}", f"  {'-' * len(lines[0])}", *(f"  {x}" for x in lines[1:])]
    if left_out > 0:
        lines.insert(len(lines) - last, f"  ... and {left_out:,} more lines, left out here")
    return lines
