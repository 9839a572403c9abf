"""The command ``polyshard``: which backends are installed, and which one would be taken.

Owns the command line and how its answers look. Knows of backends what ``available_backends`` and
``explain_choice`` tell, so it imports them only when asked and initialises no device.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import metadata
from itertools import groupby

from .backends import BackendChoice, BackendStatus, available_backends, explain_choice
from .spi import SPI_VERSION

# Asked for even where no installed backend serves them: what nearly everyone has.
_USUAL_DEVICE_TYPES = ("cpu", "cuda")
_HEADINGS = ("name", "package", "interface", "devices", "usable here")
# What a pipe is given, and what the last column gets at least, in characters.
_PIPE_WIDTH, _LEAST_WIDTH = 100, 32


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the words after ``polyshard``; None for those this process was started with.

    Returns:
        The exit code: 0; or 1 where ``--device-type`` asked for a device type that nothing can
        serve here. A command that cannot be understood ends the process with 2, as usual.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    # A backend that prints while it is imported must not get between the rows, or into the JSON.
    with redirect_stdout(sys.stderr):
        statuses = available_backends()
        choices = [explain_choice(kind) for kind in _asked_for(options.device_type, statuses)]
    show = _as_json if options.json else _as_text
    print(show(statuses, choices))
    return 1 if options.device_type is not None and choices[0].name is None else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polyshard", description="Fully-sharded data parallelism for PyTorch."
    )
    spoken = ".".join(map(str, SPI_VERSION))
    version = f"polyshard {_own_version()}, collective interface {spoken}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="")
    backends = commands.add_parser(
        "backends",
        help="list the installed backends, and which one is taken on which devices",
        description="List the installed backends: what they serve, whether they can be used here "
        "or why not, and which one is taken where none is named.",
    )
    backends.add_argument(
        "--device-type",
        metavar="TYPE",
        help="choose for this type of device only, such as cpu; the exit code is 1 if no backend "
        "can serve it here",
    )
    backends.add_argument("--json", action="store_true", help="for programs to read")
    return parser


def _own_version() -> str:
    try:
        return metadata.version("polyshard")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _asked_for(device_type: str | None, statuses: Sequence[BackendStatus]) -> list[str]:
    """The device types to choose for, the usual ones first."""
    if device_type is not None:
        return [device_type]
    served = {kind for status in statuses for kind in status.device_types}
    return [*_USUAL_DEVICE_TYPES, *sorted(served.difference(_USUAL_DEVICE_TYPES))]


def _as_json(statuses: Sequence[BackendStatus], choices: Sequence[BackendChoice]) -> str:
    answer = {
        "polyshard": _own_version(),
        "interface": SPI_VERSION,
        "backends": [
            {
                "name": status.name,
                "package": status.distribution,
                "version": status.version,
                "interface": status.spi,
                "device_types": status.device_types,
                "usable_device_types": status.usable_device_types,
                "reasons": status.reasons,
            }
            for status in statuses
        ],
        "choices": [
            {"device_type": choice.device_type, "backend": choice.name, "reason": choice.reason}
            for choice in choices
        ],
    }
    return json.dumps(answer, indent=2)


def _as_text(statuses: Sequence[BackendStatus], choices: Sequence[BackendChoice]) -> str:
    width = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
    # A name that several packages register is one trouble, so it is one row.
    rows = [_row(list(same)) for _, same in groupby(statuses, key=lambda status: status.name)]
    lines = _table([_HEADINGS, *rows], width) if rows else ["No backend is installed."]
    taken = [(c.device_type, c.name or "none", c.reason) for c in choices]
    lines += ["", "Taken where no backend is named:"]
    lines += _table([("device", "backend", "because"), *taken], width)
    return "\n".join(lines)


def _row(statuses: Sequence[BackendStatus]) -> tuple[str, ...]:
    """The row of one registered name, with all packages that register it."""
    status = statuses[0]
    packages = ", ".join(f"{each.distribution} {each.version}" for each in statuses)
    spoken = ".".join(map(str, status.spi)) if status.spi else "?"
    devices = ", ".join(status.device_types) or "?"
    return (status.name, packages, spoken, devices, _usable(status))


def _usable(status: BackendStatus) -> str:
    """``yes`` or the reason why not; one by one where that differs between device types."""
    reasons = status.reasons
    if reasons is None:
        return "yes"
    if isinstance(reasons, str):
        return f"no, it {reasons}"
    words = {kind: f"no, it {reasons[kind]}" for kind in reasons}
    if len(status.device_types) == 1:
        return words[status.device_types[0]]
    return " ".join(f"{kind}: {words.get(kind, 'yes.')}" for kind in status.device_types)


def _table(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Lines of ``rows`` in columns; the last column is wrapped to end at ``width``."""
    columns = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    start = sum(columns) + 2 * len(columns)
    lines = []
    for *cells, text in rows:
        head = "".join(f"{cell:<{size}}  " for cell, size in zip(cells, columns, strict=True))
        # Names of packages and paths stay whole, so that they can be copied.
        first, *more = textwrap.wrap(
            text,
            max(_LEAST_WIDTH, width - start),
            break_on_hyphens=False,
            break_long_words=False,
        ) or [""]
        lines += [(head + first).rstrip(), *(" " * start + line for line in more)]
    return lines
