"""Train a small GPT on the Python standard library, sharded over the ranks by polyshard.

    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy zero3 --backend gloo
    torchrun --nproc-per-node 4 examples/train_gpt.py --strategy hfsdp --mesh 2x2

It measures what the strategies cost, trains, then shows tables, a sample of generated code and a
picture. ``distribute`` in ``gpt_training.py`` is all that a training script of your own needs.

Owns the command line, its errors and Ctrl-C. Torch is imported once the options are found good.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from gpt_errors import UsageError

STRATEGIES = ("zero3", "zero2", "zero1", "ddp", "hsdp", "hfsdp", "torch-ddp")
TWO_AXES = ("hsdp", "hfsdp")


class OptionParser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print and exit, on every rank."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.")


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """The options as given or by default. Raises UsageError for what can be told from words."""
    parser = OptionParser(description="Train a small GPT, sharded over the ranks by polyshard.")
    known = ", ".join(STRATEGIES)
    parser.add_argument("--strategy", default="zero3", help=f"one of {known} (default: zero3)")
    parser.add_argument(
        "--mesh",
        help="ranks along the outer and the inner axis, such as 2x2; hsdp and hfsdp use both axes "
        "(default for these: near to square; for the others one axis)",
    )
    parser.add_argument("--backend", help="such as gloo (default: the best that is installed)")
    parser.add_argument(
        "--steps", type=int, default=160, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--png",
        type=Path,
        default=Path("demo-output", "train_gpt.png"),
        help="where the picture goes (default: demo-output/train_gpt.png)",
    )
    parser.add_argument(
        "--no-compare", action="store_true", help="do not measure the cost of the strategies"
    )
    options = parser.parse_args(words)
    if options.strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {options.strategy!r}; the known ones are {known}.")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options.mesh = mesh_shape(options.mesh, strategy=options.strategy, ranks=ranks)
    if options.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {options.steps}.")
    if options.png.suffix != ".png":
        raise UsageError(f"--png must end in .png, got {str(options.png)!r}.")
    return options


def mesh_shape(words: str | None, *, strategy: str, ranks: int) -> tuple[int, ...]:
    """The sizes of one axis or two; ``words`` is what was given for them.

    Raises UsageError if they do not suit the strategy and the number of ranks.
    """
    if words is None:
        if strategy not in TWO_AXES:
            return (ranks,)
        # Near to square, and rather a large group than many: 1x2, 2x2, 2x3, 2x4, 3x3.
        outer = max(size for size in range(1, math.isqrt(ranks) + 1) if ranks % size == 0)
        return (outer, ranks // outer)
    if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*)?", words):
        raise UsageError(f"--mesh must be one or two sizes, such as 4 or 2x2, got {words!r}.")
    shape = tuple(map(int, words.split("x")))
    if strategy in TWO_AXES and len(shape) < 2:
        raise UsageError(f"{strategy} needs a mesh of two axes, such as 2x2, got --mesh {words}.")
    if math.prod(shape) != ranks:
        raise UsageError(
            f"--mesh {words} is for {math.prod(shape)} ranks, but this run has {ranks}; give sizes "
            "whose product is that, or start as many ranks with torchrun --nproc-per-node."
        )
    return shape


def main() -> None:
    """Parse the options and run the demo."""
    options = parse_options(sys.argv[1:])

    # Not at the top: it takes seconds, and a mistyped option or Ctrl-C should not wait for it.
    from gpt_demo import run
    from gpt_training import Recipe

    recipe = Recipe(options.strategy, options.mesh, options.steps, options.backend)
    run(recipe, picture=options.png, with_comparison=not options.no_compare)


def exit_code(main: Callable[[], None]) -> int:
    """Of ``main``: 2 after a UsageError, which is said once; 130 after Ctrl-C, without a word."""
    interrupted = False

    def interrupt(signal_number: int, frame: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            main()
        except UsageError as error:
            if os.environ.get("RANK", "0") == "0":
                print(f"train_gpt.py: {error}", file=sys.stderr)
            else:
                # The launcher ends all ranks as soon as one is gone: let rank 0 speak first.
                time.sleep(10)
            return 2
        except Exception:
            # Another rank may have left first; its absence then reaches this one as an error.
            if not interrupted:
                raise
            return 130
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
