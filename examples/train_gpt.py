"""Train a small GPT on the Python standard library, sharded over the ranks by polyshard.

    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy zero3 --backend gloo

It measures what the strategies cost, trains, then shows tables, a sample of generated code and a
picture. ``distribute`` in ``gpt_training.py`` is all that a training script of your own needs.

Owns the command line, its errors and Ctrl-C. Torch is imported once the options are found good.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from gpt_errors import UsageError

STRATEGIES = ("zero3", "zero2", "zero1", "ddp", "hsdp", "hfsdp", "torch-ddp")


class OptionParser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print and exit, on every rank."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.")


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """The options as given or by default. Raises UsageError for what can be told from words."""
    parser = OptionParser(description="Train a small GPT, sharded over the ranks by polyshard.")
    known = ", ".join(STRATEGIES)
    parser.add_argument("--strategy", default="zero3", help=f"one of {known} (default: zero3)")
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
    if options.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {options.steps}.")
    if options.png.suffix != ".png":
        raise UsageError(f"--png must end in .png, got {str(options.png)!r}.")
    return options


def main() -> None:
    """Parse the options and run the demo."""
    options = parse_options(sys.argv[1:])

    # Not at the top: it takes seconds, and a mistyped option or Ctrl-C should not wait for it.
    from gpt_demo import run
    from gpt_training import Recipe

    recipe = Recipe(options.strategy, options.backend, options.steps)
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
