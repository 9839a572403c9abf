"""Wheels of small backends, written to disk for pip to install: no network, nothing to build."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_WHEEL = (
    "Wheel-Version: 1.0\nGenerator: polyshard tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
)


def write_wheel(
    directory: Path,
    distribution: str,
    version: str = "1.0",
    *,
    requires: Sequence[str] = (),
    backends: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
) -> Path:
    """A wheel of a distribution.

    Args:
        directory: where it goes.
        distribution: its name for pip, with hyphens.
        version: its version.
        requires: what it depends on.
        backends: what it registers: names of backends, and where their classes are.
        modules: its modules by name, with their source.
    """
    stem = f"{distribution.replace('-', '_')}-{version}"
    information = f"{stem}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    files = {f"{name}.py": source for name, source in (modules or {}).items()}
    files[f"{information}/METADATA"] = "\n".join(metadata) + "\n"
    files[f"{information}/WHEEL"] = _WHEEL
    if backends:
        entries = [f"{name} = {place}" for name, place in backends.items()]
        text = "\n".join(["[polyshard.backends]", *entries]) + "\n"
        files[f"{information}/entry_points.txt"] = text
    record = [f"{name},{_digest(text)},{len(text.encode())}" for name, text in files.items()]
    files[f"{information}/RECORD"] = "\n".join([*record, f"{information}/RECORD,,"]) + "\n"
    path = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def install(wheels: Sequence[Path], site: Path) -> None:
    """Have pip install ``wheels`` into the directory ``site``; what they require is not looked
    for. Raises CalledProcessError with pip's words in ``stderr`` if it cannot."""
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(site)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *map(str, wheels)],
        check=True,
        capture_output=True,
        text=True,
    )


def _digest(text: str) -> str:
    """As in a wheel's RECORD."""
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
