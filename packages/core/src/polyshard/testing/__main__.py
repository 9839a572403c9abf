"""``python -m polyshard.testing``: hold a backend to the contract, from a shell.

Owns the arguments. The tests and the report are those of ``conformance``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import BackendError
from .conformance.subject import Subject
from .zygote import MAX_WORLD_SIZE

_CANNOT_START = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite. Returns 0 where a test ran and none failed, 2 where it could not begin."""
    given = _parser().parse_args(arguments)
    try:
        from .conformance.report import run_suite
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        print("error: this needs pytest: install the extra, polyshard[testing].", file=sys.stderr)
        return _CANNOT_START
    subject = Subject(
        backend=given.backend,
        device_type=given.device_type,
        world_size=given.world_size,
        largest_numel=given.largest_numel,
        timeout=given.timeout,
    )
    try:
        subject.make_backend()
    except BackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return _CANNOT_START
    except Exception as error:
        made = f"{type(error).__name__}: {error}"
        print(f"error: {given.backend!r} cannot be made: {made}", file=sys.stderr)
        return _CANNOT_START
    try:
        return run_suite(
            subject,
            expression=given.expression,
            expected_failures=dict(given.expect_failure),
            stream=sys.stdout,
        )
    except TypeError as error:
        print(f"error: {error}", file=sys.stderr)
        return _CANNOT_START


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m polyshard.testing",
        description="Hold a backend to the contract (docs/contract.md): every clause, on several "
        "processes of this machine. The exit code is 0 only if a test ran and none failed.",
    )
    parser.add_argument(
        "--backend", required=True, help="the name it is registered by, or module:Class"
    )
    parser.add_argument("--device-type", default="cpu", help="cpu, cuda, ... (default: cpu)")
    parser.add_argument(
        "--world-size",
        type=_world_size,
        default=4,
        metavar="N",
        help="ranks, one process each (default: 4, which has a mesh of two axes)",
    )
    parser.add_argument(
        "-k", dest="expression", default="", help="only tests whose name matches, as in pytest"
    )
    parser.add_argument(
        "--expect-failure",
        type=_expected_failure,
        action="append",
        default=[],
        metavar="TEST=REASON",
        help="a test that must fail, and why; can be given again",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=Subject.timeout,
        metavar="SECONDS",
        help="in which any test must end (default: %(default)g)",
    )
    parser.add_argument(
        "--largest-numel",
        type=_numel,
        default=Subject.largest_numel,
        metavar="N",
        help="more elements than the backend moves at a time (default: %(default)s)",
    )
    return parser


def _world_size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_WORLD_SIZE:
        raise argparse.ArgumentTypeError(f"from 1 to {MAX_WORLD_SIZE} ranks, not {text!r}")
    return int(text)


def _expected_failure(text: str) -> tuple[str, str]:
    name, marker, reason = text.partition("=")
    if not marker:
        raise argparse.ArgumentTypeError(f"like test_name=reason, not {text!r}")
    return name, reason


def _numel(text: str) -> int:
    if not text.isdecimal() or int(text) < 1000:
        raise argparse.ArgumentTypeError(f"a number of elements from 1000 on, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0, not {text!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
