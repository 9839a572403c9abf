"""Explained units made from shapes alone, and what a picture of them shows, read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import torch

from polyshard import MixedPrecisionPolicy, Placements, SchedulePolicy
from polyshard.explain_picture import BAR_HEIGHT
from polyshard.explained import (
    ExplainedGroup,
    ExplainedSegment,
    ExplainedTensor,
    ExplainedUnit,
    HeldBytes,
    RowsByRank,
)
from polyshard.layout import GlobalLayout

SVG = "{http://www.w3.org/2000/svg}"


def explained_unit(
    shapes: Sequence[tuple[int, ...]], shards: int, *, name: str = "", index: int = 0
) -> ExplainedUnit:
    """A unit of fp32 tensors in zero3, as that many ranks would have it."""
    layout = GlobalLayout.build(shapes, shards)
    holders = tuple((rank,) for rank in range(shards))
    shard_of = {rank: rank for rank in range(shards)}
    segments = tuple(
        ExplainedSegment(
            segment.index,
            segment.offset,
            segment.numel,
            segment.shard_numel,
            tuple(
                ExplainedTensor(
                    label=f"p{i}",
                    names=(f"{name}.p{i}" if name else f"p{i}",),
                    shape=shapes[i],
                    local_shape=shapes[i],
                    distribution="",
                    trainable=True,
                    offset=layout.offset(i),
                    rows=RowsByRank(layout.row_ranges(i), shard_of),
                )
                for i in segment.tensors
            ),
        )
        for segment in layout.segments
    )
    group = ExplainedGroup(
        index=0,
        placements=Placements.zero3("dp"),
        dtypes=MixedPrecisionPolicy().resolve(torch.float32),
        parameter_holders=holders,
        gradient_holders=holders,
        main_holders=holders,
        segments=segments,
        bytes=HeldBytes(main=4 * layout.local_numel(), gathered=4 * layout.padded_numel),
    )
    return ExplainedUnit(
        index, name, "Module", "loopback", (("dp", shards),), True, SchedulePolicy(), (group,)
    )


@dataclass(frozen=True)
class Box:
    """One rectangle of a bar."""

    x: float
    y: float
    width: float
    fill: str
    title: str


def bars(svg: str) -> list[list[Box]]:
    """The boxes of each bar, from left to right; bars from the top down."""
    found: dict[float, list[Box]] = {}
    for rectangle in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if rectangle.get("height") == str(BAR_HEIGHT):
            box = Box(
                *(float(rectangle.get(name, "nan")) for name in ("x", "y", "width")),
                rectangle.get("fill", ""),
                rectangle.findtext(f"{SVG}title", ""),
            )
            found.setdefault(box.y, []).append(box)
    return [sorted(found[y], key=lambda box: box.x) for y in sorted(found)]


def ticks(svg: str) -> list[float]:
    """Where shards end, over all bars."""
    lines = ElementTree.fromstring(svg).iter(f"{SVG}line")
    return [float(line.get("x1", "nan")) for line in lines if line.get("x1") == line.get("x2")]


def texts(svg: str) -> list[str]:
    """All that is written, tips left out."""
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
