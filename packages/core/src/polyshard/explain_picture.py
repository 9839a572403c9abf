"""What `explain` found, as a picture in SVG: flat buffers coloured by tensor and rank.

Knows values only; needs no library. Its size is bounded, however many tensors, units and ranks
there are: units that are alike are drawn once, boxes too narrow to see are drawn as one, and what
is left out is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .explain_colours import MERGED, Colours
from .explain_svg import FAINT, HATCHED, LINE, Drawing
from .explain_words import (
    alike,
    bytes_in_words,
    counted,
    dtype_in_words,
    joint_name,
    ranks_in_words,
    shortened,
)
from .explained import ExplainedGroup, ExplainedSegment, ExplainedTensor, ExplainedUnit

WIDTH = 960
MARGIN = 16
BAR_LEFT, BAR_RIGHT = 190, WIDTH - MARGIN
BAR_HEIGHT = 30
LEGEND_COLUMNS = 4
LEGEND_LENGTH = 28  # characters of a name
SIZE_LENGTH = 150  # of the line that compares the sizes of segments
MOST_SEGMENTS = 60
MOST_LEGEND_ENTRIES = 40
MOST_NAMES = 8  # of tensors in one box
NARROWEST_BOX = 1.0
NARROWEST_BAND = 4.0  # narrower shards are not told apart
CHARACTER_WIDTH = 0.6  # of the font size, on the safe side

Kind = tuple[ExplainedUnit, ...]


@dataclass(frozen=True)
class _Piece:
    """A run [start, stop) of a segment: of one tensor or of none, in one shard if these are told
    apart."""

    start: int
    stop: int
    tensor: ExplainedTensor | None
    shard: int | None

    @property
    def label(self) -> str:
        """The tensor's, or "" for padding."""
        return self.tensor.label if self.tensor else ""


def picture(module_class: str, units: Sequence[ExplainedUnit]) -> str:
    """An SVG document: one bar for each segment of each group."""
    kinds = [kind for kind in alike(units) if any(group.padded_numel for group in kind[0].groups)]
    sizes = [
        segment.numel * group.dtypes.main.itemsize
        for kind in kinds
        for group in kind[0].groups
        for segment in group.segments
        if segment.numel
    ]
    largest = max(sizes, default=0)
    bars, colours = Drawing(), Colours()
    drawn, has_merged = 0, False
    for kind in kinds:
        if drawn >= MOST_SEGMENTS:
            break
        _heading(bars, kind)
        for group in kind[0].groups:
            for segment in group.segments:
                if segment.numel and drawn < MOST_SEGMENTS:
                    has_merged |= _bar(bars, colours, kind, group, segment, largest=largest)
                    drawn += 1
    title = f"Flat buffers of {module_class}"
    drawing = Drawing()
    drawing.text(MARGIN, 28, title, size=16, bold=True)
    drawing.y = 44
    _legend(drawing, colours, has_merged=has_merged)
    drawing.append(bars)
    notes = [
        "Each bar is one segment, to its own scale; the line under its size compares sizes. "
        "Colours tell tensors apart, and are lighter in",
        "every other shard. Ranks hold what is under them of the main weights and of the "
        "optimizer's state; the rest lies as the strategy says.",
    ]
    if len(sizes) > drawn:
        notes.append(f"{counted(len(sizes) - drawn, 'further segment')} not drawn.")
    drawing.y += 10
    for note in notes:
        drawing.y += 15
        drawing.text(MARGIN, drawing.y, note, size=11, colour=FAINT)
    title += ", coloured by tensor and rank"
    return drawing.document(title, width=WIDTH, margin=MARGIN)


def _legend(drawing: Drawing, colours: Colours, *, has_merged: bool) -> None:
    """Of what was drawn: the tensors that have a box of their own."""
    width = (WIDTH - 2 * MARGIN) / LEGEND_COLUMNS
    labels = colours.labels[:MOST_LEGEND_ENTRIES]
    entries = [(colours.fill(label, 0), shortened(label, LEGEND_LENGTH), label) for label in labels]
    entries.append((HATCHED, "padding", "elements that belong to no tensor"))
    if has_merged:
        entries.append((MERGED, "several, too narrow to tell", "boxes have tips that name them"))
    left_out = len(colours.labels) - len(labels)
    if left_out:
        entries.append(("none", f"and {left_out:,} more", "boxes have tips that name them"))
    for place, (fill, name, title) in enumerate(entries):
        x = MARGIN + place % LEGEND_COLUMNS * width
        y = drawing.y + place // LEGEND_COLUMNS * 18
        drawing.box(x, y, 12, 12, fill, title, stroke="none" if fill == "none" else LINE)
        drawing.text(x + 18, y + 10, name, size=11)
    drawing.y += -(-len(entries) // LEGEND_COLUMNS) * 18
    if colours.repeat:
        drawing.text(MARGIN, drawing.y + 11, "Colours repeat.", size=11, colour=FAINT)
        drawing.y += 16


def _heading(drawing: Drawing, kind: Kind) -> None:
    unit = kind[0]
    drawing.y += 30
    name = shortened(joint_name([each.name for each in kind]), 40)
    strategies = "; ".join(dict.fromkeys(group.strategy for group in unit.groups))
    count = f", {len(kind)} units alike" if len(kind) > 1 else ""
    drawing.rule(MARGIN, drawing.y - 17, BAR_RIGHT - MARGIN)
    drawing.text(MARGIN, drawing.y, name, size=13, bold=True)
    drawing.text(
        BAR_RIGHT, drawing.y, f"{unit.module_class}{count}: {strategies}", size=11, anchor="end"
    )
    drawing.y += 4


def _bar(
    drawing: Drawing,
    colours: Colours,
    kind: Kind,
    group: ExplainedGroup,
    segment: ExplainedSegment,
    *,
    largest: int,
) -> bool:
    """Draw one segment; True if boxes of several tensors are in it."""
    drawing.y += 18
    top, itemsize = drawing.y, group.dtypes.main.itemsize
    nbytes = segment.numel * itemsize
    scale = (BAR_RIGHT - BAR_LEFT) / segment.numel
    shards = len(group.main_holders)
    are_told_apart = segment.shard_numel * scale >= NARROWEST_BAND
    dtype = dtype_in_words(group.dtypes.main)
    drawing.text(MARGIN, top + 10, f"group {group.index}, segment {segment.index}", size=11)
    drawing.text(MARGIN, top + 24, f"{bytes_in_words(nbytes)} of {dtype}", size=11, colour=FAINT)
    drawing.box(
        MARGIN,
        top + 29,
        max(1.0, SIZE_LENGTH * nbytes / largest),
        2.5,
        FAINT,
        f"{counted(segment.numel, 'element')}, {nbytes:,} bytes; the longest such line has "
        f"{largest:,} bytes",
    )
    _ranks(drawing, group, segment, scale)
    has_merged = False
    drawn: dict[str, list[tuple[float, float, int]]] = {}  # the boxes of each tensor, by label
    for run in _drawable(_pieces(segment, shards if are_told_apart else 1), scale):
        x = BAR_LEFT + run[0].start * scale
        width = (run[-1].stop - run[0].start) * scale
        label, shard = run[0].label, run[0].shard or 0
        if len({piece.label for piece in run}) > 1:
            fill, has_merged = MERGED, True
        elif not label:
            fill = HATCHED
        else:
            fill = colours.fill(label, shard)
            drawn.setdefault(label, []).append((x, width, shard))
        stroke = "white" if width > 3 else "none"
        drawing.box(x, top, width, BAR_HEIGHT, fill, _title(run, kind, group), stroke=stroke)
    if are_told_apart:
        over = 4 if segment.shard_numel * scale >= 20 else 1
        for shard in range(1, shards):
            x = BAR_LEFT + shard * segment.shard_numel * scale
            drawing.tick(x, top - over, BAR_HEIGHT + 2 * over)
    for label, boxes in drawn.items():
        _label(drawing, colours, label, boxes, top + 19)
    drawing.y += BAR_HEIGHT + 4
    return has_merged


def _label(
    drawing: Drawing,
    colours: Colours,
    label: str,
    boxes: Sequence[tuple[float, float, int]],
    y: float,
) -> None:
    """A tensor's name in its widest box, or over all of them, if there is room."""
    needed = len(label) * 10 * CHARACTER_WIDTH + 6
    x, width, shard = max(boxes, key=lambda box: box[1])
    start, end = boxes[0][0], boxes[-1][0] + boxes[-1][1]
    if needed < width:
        ink = colours.ink(label, shard)
        drawing.text(x + width / 2, y, label, size=10, anchor="middle", colour=ink)
    elif needed < end - start:
        drawing.text((start + end) / 2, y, label, size=10, anchor="middle", halo="white")


def _ranks(
    drawing: Drawing, group: ExplainedGroup, segment: ExplainedSegment, scale: float
) -> None:
    """Over the bar, which ranks hold which part; every few of them where they stand close."""
    holders, y = group.main_holders, drawing.y - 5
    band = segment.shard_numel * scale
    words = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_in_words(ranks)}" for ranks in holders
    ]
    if len(holders) == 1 and len(holders[0]) > 1:
        words[0] += ", each the whole"
    needed = 10 * CHARACTER_WIDTH * max(map(len, words))
    every = 1
    if needed > band:
        words = [ranks_in_words(ranks) for ranks in holders]
        needed = 10 * CHARACTER_WIDTH * (max(map(len, words)) + 1)
        while every * band < needed:
            every *= 2
        drawing.text(BAR_LEFT - 8, y, "rank", size=10, anchor="end", colour=FAINT)
    for shard in range(0, len(holders), every):
        x = BAR_LEFT + (shard + 0.5) * band
        drawing.text(x, y, words[shard], size=10, anchor="middle", colour=FAINT)


def _pieces(segment: ExplainedSegment, shards: int) -> Iterator[_Piece]:
    """The segment from its first to its last element, cut at tensors and at shards."""
    length = segment.numel // shards
    position = 0

    def cut(stop: int, tensor: ExplainedTensor | None) -> Iterator[_Piece]:
        nonlocal position
        while position < stop:
            shard = position // length
            end = min(stop, (shard + 1) * length)
            yield _Piece(position, end, tensor, shard if shards > 1 else None)
            position = end

    for tensor in segment.tensors:
        if tensor.numel:
            start = tensor.offset - segment.offset
            yield from cut(start, None)
            yield from cut(start + tensor.numel, tensor)
    yield from cut(segment.numel, None)


def _drawable(pieces: Iterator[_Piece], scale: float) -> Iterator[list[_Piece]]:
    """Runs that are wide enough to be a box each; a piece that stands alone is one anyway."""
    narrow: list[_Piece] = []
    for piece in pieces:
        is_narrow = (piece.stop - piece.start) * scale < NARROWEST_BOX
        is_full = narrow and (narrow[-1].stop - narrow[0].start) * scale >= 3 * NARROWEST_BOX
        if narrow and (not is_narrow or is_full):
            yield narrow
            narrow = []
        if is_narrow:
            narrow.append(piece)
        else:
            yield [piece]
    if narrow:
        yield narrow


def _title(run: Sequence[_Piece], kind: Kind, group: ExplainedGroup) -> str:
    """The tip of a box: what it is, whose it is, how large it is."""
    numel = run[-1].stop - run[0].start
    size = f"{counted(numel, 'element')}, {numel * group.dtypes.main.itemsize:,} bytes"
    shard = run[0].shard if run[0].shard == run[-1].shard else None
    if len(group.main_holders) == 1:
        shard = 0
    holders = "of several ranks"
    if shard is not None:
        ranks = group.main_holders[shard]
        holders = f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_in_words(ranks)}"
    labels = list(dict.fromkeys(piece.label for piece in run))
    if len(labels) > 1:
        names = ", ".join(label or "padding" for label in labels[:MOST_NAMES])
        more = f" and {len(labels) - MOST_NAMES:,} more" if len(labels) > MOST_NAMES else ""
        return f"{names}{more}\n{holders}\n{size}, too narrow to draw apart"
    tensor = run[0].tensor
    if tensor is None:
        return f"padding\n{holders}\n{size}"
    name = " = ".join(tensor.names)
    if len(kind) > 1:
        name = f"{tensor.label} of {joint_name([unit.name for unit in kind])}"
    rows = "rows on several ranks"
    if shard is not None:
        start, stop = tensor.rows.by_shard[shard]
        rows = f"rows {start}:{stop}"
    shape = "x".join(map(str, tensor.local_shape)) or "0-D"
    frozen = "" if tensor.trainable else ", frozen"
    return f"{name}\n{rows} of {shape}{frozen}\n{holders}\n{size}"
