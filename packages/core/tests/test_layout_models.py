"""The flat layout of real models: padding by the rules, and few segments."""

from __future__ import annotations

import math

import pytest
from model_shapes import MODELS, Shapes

from polyshard.layout import GlobalLayout

SHARD_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)

#: Most segments that a block, a whole model on up to 16 shards, and one on more of them take.
MOST_SEGMENTS = {
    "Llama-3-8B": (3, 2, 2),
    "Qwen2-7B": (3, 2, 3),
    "GPT-2": (3, 1, 2),
    "ResNet-50": (3, 3, 7),
    "ConvNeXt-T": (3, 1, 3),
    "Whisper-small": (2, 1, 3),
    "Mamba-2.8B": (3, 1, 1),
    "MoE-128": (4, 1, 2),
}


def check_padding(layout: GlobalLayout) -> None:
    """Rule 4 as it stands: no more than dim 0 costs, and 1 % for shards of 100 rows or more."""
    numel = sum(map(math.prod, layout.shapes))
    padding = sum(segment.numel for segment in layout.segments) - numel
    assert padding <= sum(
        -shape[0] % layout.num_shards * math.prod(shape[1:]) for shape in layout.shapes
    )
    longest_row = max(math.prod(shape[1:]) for shape in layout.shapes)
    if numel >= 100 * longest_row * layout.num_shards:
        assert 100 * padding <= numel


def check_rows(layout: GlobalLayout) -> None:
    """Every shard boundary inside a tensor lies on one of its rows' edges."""
    for segment in layout.segments:
        for i in segment.tensors:
            shape = layout.shapes[i]
            start = layout.offset(i) - segment.offset
            first = (start // segment.shard_numel + 1) * segment.shard_numel
            for boundary in range(first, start + math.prod(shape), segment.shard_numel):
                assert (boundary - start) % math.prod(shape[1:]) == 0


@pytest.mark.parametrize("num_shards", SHARD_COUNTS)
@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str, num_shards: int) -> None:
    """A block and the whole of every model keep the padding rules with few segments."""
    block_segments, *whole_segments = MOST_SEGMENTS[name]
    limits: list[tuple[Shapes, int]] = [
        (MODELS[name].block, block_segments),
        (MODELS[name].whole, whole_segments[num_shards > 16]),
    ]
    for shapes, most_segments in limits:
        layout = GlobalLayout.build(shapes, num_shards)
        check_padding(layout)
        check_rows(layout)
        assert len(layout.segments) <= most_segments


@pytest.mark.parametrize(
    ("shapes", "num_shards", "dim_0_costs"),
    [(MODELS["Whisper-small"].block, 512, 0.25), (MODELS["ConvNeXt-T"].whole, 1024, 0.63)],
)
def test_families_that_pad_much_alone_save_it_together(
    shapes: Shapes, num_shards: int, dim_0_costs: float
) -> None:
    """Rows that do not fill the shards one length by one do so with others, within 1 %."""
    numel = sum(map(math.prod, shapes))
    by_dim_0 = sum(-shape[0] % num_shards * math.prod(shape[1:]) for shape in shapes)
    assert by_dim_0 > dim_0_costs * numel
    assert 100 * (GlobalLayout.build(shapes, num_shards).padded_numel - numel) <= numel


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("Llama-3-8B", 8030.3),
        ("Qwen2-7B", 7615.6),
        ("GPT-2", 124.4),
        ("ResNet-50", 25.6),
        ("ConvNeXt-T", 28.6),
        ("Whisper-small", 241.7),
        ("Mamba-2.8B", 2768.3),
    ],
)
def test_model_shapes_are_those_of_the_models(name: str, millions: float) -> None:
    """The shapes add up to the models' known numbers of parameters."""
    assert round(sum(map(math.prod, MODELS[name].whole)) / 1e6, 1) == millions
