"""What the flat layout costs: padding and segments of real models, and the time to lay out.

    python benchmarks/layout.py
    python benchmarks/layout.py --shards 8 64 1024 --tensors 20000

In the tables a cell is padding in per cent of the parameters, then the number of segments. The row
below, `dim 0`, is what padding each tensor's dim 0 to a multiple of the shard count would cost.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from polyshard.layout import GlobalLayout

sys.path.append(str(Path(__file__).parents[1] / "packages" / "core" / "tests"))

from model_shapes import MODELS, Shape

SHARDS = (2, 3, 4, 6, 8, 12, 16, 32, 64, 96, 128, 256, 512, 1024)
TIMED_SHARDS = (8, 1024, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, nargs="+", default=SHARDS)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    for kind in ("block", "whole"):
        print(f"padding in % / segments: {'one block' if kind == 'block' else 'whole model'}")
        show("shards", arguments.shards)
        for name, model in MODELS.items():
            shapes = getattr(model, kind)
            layouts = [GlobalLayout.build(shapes, shards) for shards in arguments.shards]
            show(name, [f"{padding(layout):.2f}/{len(layout.segments)}" for layout in layouts])
            show("  dim 0", [f"{padding_of_dim_0(shapes, n):.2f}" for n in arguments.shards])
        print()
    print(f"CPU seconds to lay out {arguments.tensors} tensors, best of {arguments.repetitions}")
    show("shards", TIMED_SHARDS, width=40)
    for name, shapes in populations(arguments.tensors).items():
        times = [build_seconds(shapes, n, arguments.repetitions) for n in TIMED_SHARDS]
        show(name, [f"{seconds:.2f}" for seconds in times], width=40)


def show(title: str, cells: Sequence[object], width: int = 14) -> None:
    print(f"{title:<{width}}" + "".join(f"{cell!s:>9}" for cell in cells), flush=True)


def padding(layout: GlobalLayout) -> float:
    return 100 * (layout.padded_numel - layout.numel) / layout.numel


def padding_of_dim_0(shapes: Sequence[Shape], num_shards: int) -> float:
    padded = sum(-shape[0] % num_shards * math.prod(shape[1:]) for shape in shapes)
    return 100 * padded / sum(map(math.prod, shapes))


def populations(count: int) -> dict[str, list[Shape]]:
    """Collections of `count` tensors, from the usual to the hostile."""
    source = random.Random(0)
    block = MODELS["GPT-2"].block
    return {
        "blocks of GPT-2": (block * (count // len(block) + 1))[:count],
        "small matrices of any shape": [
            (source.randint(1, 64), source.randint(1, 64)) for _ in range(count)
        ],
        "rows of 1009, 1013 and 1019": [
            (source.randint(1, 3000), source.choice((1009, 1013, 1019))) for _ in range(count)
        ],
        "as many row lengths as tensors": [
            (source.randint(1, 5), row_numel) for row_numel in range(1, count + 1)
        ],
        "the same, dim 0 a multiple of 4096": [
            (4096, row_numel) for row_numel in range(1, count + 1)
        ],
    }


def build_seconds(shapes: Sequence[Shape], num_shards: int, repetitions: int) -> float:
    """CPU time of the fastest of some builds."""
    best = math.inf
    for _ in range(repetitions):
        start = time.process_time()
        GlobalLayout.build(shapes, num_shards)
        best = min(best, time.process_time() - start)
    return best


if __name__ == "__main__":
    main()
