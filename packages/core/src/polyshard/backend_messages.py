"""Words about registered backends: what they are called, which is preferred, how to get one.

Reads metadata of entry points only. Imports no backend and decides nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import metadata

#: Which registered name is tried first on a device type; the others follow in order of name.
PREFERRED = {"cpu": "gloo", "cuda": "nccl"}

# Which extra of this package installs the backend of that name: only for hints in errors.
_EXTRAS = {"gloo": "gloo", "nccl": "nccl", "symm_mem": "symm-mem"}


def distribution_of(entry: metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that registered ``entry``."""
    assert entry.dist is not None
    return entry.dist.name, entry.dist.version


def describe(entries: Sequence[metadata.EntryPoint]) -> str:
    """``'name' (distribution version)`` of one registered name."""
    owners = sorted(" ".join(distribution_of(entry)) for entry in entries)
    return f"{entries[0].name!r} ({', '.join(owners)})"


def missing_message(
    name: str, registered: Mapping[str, Sequence[metadata.EntryPoint]], source: str
) -> str:
    """No backend is registered as ``name``, which ``source`` says who chose."""
    installed = ", ".join(map(describe, registered.values())) or "none"
    message = f"No backend named {name!r} is installed.{source} Installed: {installed}."
    if name in _EXTRAS:
        return f"{message} Install it: {_install_command(name)}"
    # Underscores and hyphens are what people confuse, so both the known and the installed count.
    close = difflib.get_close_matches(name, sorted({*registered, *_EXTRAS}))
    if not close:
        return message
    message += f" Did you mean {' or '.join(map(repr, close))}?"
    if close[0] not in registered:
        message += f" Install it: {_install_command(close[0])}"
    return message


def unsuitable_message(
    device_type: str,
    sentences: Sequence[str],
    registered: Mapping[str, Sequence[metadata.EntryPoint]],
) -> str:
    """No registered backend can serve ``device_type``; ``sentences`` say why each cannot."""
    lines = [f"No installed backend can serve device type {device_type!r}. Installed:"]
    lines += [f"  {sentence}" for sentence in sentences]
    if not sentences:
        lines[0] += " none."
    hint = install_hint(device_type, registered)
    return "\n".join([*lines, hint] if hint else lines)


def install_hint(device_type: str, registered: Mapping[str, Sequence[metadata.EntryPoint]]) -> str:
    """What to install for ``device_type``; empty where what this project offers is installed."""
    preferred = PREFERRED.get(device_type)
    if preferred is None:
        return f"Install a backend that serves {device_type!r}."
    return (
        "" if preferred in registered else f"Install one that does: {_install_command(preferred)}"
    )


def _install_command(name: str) -> str:
    return f'pip install "polyshard[{_EXTRAS[name]}]"'
