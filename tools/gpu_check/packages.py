"""Makes the packages importable, and their backends found, without installing anything.

Owns one temporary folder. Needs no torch.
"""

from __future__ import annotations

import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("core", "backend_gloo", "backend_nccl", "backend_symm_mem")


def from_checkout(folder: Path, root: Path = ROOT) -> list[str]:
    """Write what an installer would of the four packages' metadata; returns paths to import from,
    ``folder`` first, so that it goes before packages that are installed."""
    sources = []
    for name in NAMES:
        package = root / "packages" / name
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        write_metadata(folder, project)
        sources.append(str(package / "src"))
    return [str(folder), *sources]


def from_wheels(folder: Path, wheels: Sequence[Path]) -> list[str]:
    """Unzip the wheels, which is all that these need. Raises ValueError for anything else."""
    for wheel in wheels:
        if wheel.suffix != ".whl" or not zipfile.is_zipfile(wheel):
            raise ValueError(f"{wheel} is no wheel.")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    found = {path.name.split("-")[0] for path in folder.glob("*.dist-info")}
    wanted = {"polyshard", "polyshard_gloo", "polyshard_nccl"}
    if missing := sorted(wanted - found):
        raise ValueError(f"wheels are missing for {', '.join(missing)}.")
    return [str(folder)]


def write_metadata(folder: Path, project: dict[str, Any]) -> None:
    """The ``.dist-info`` of one project: name, version, requirements and entry points."""
    name, version = project["name"], project["version"]
    target = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    target.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    (target / "METADATA").write_text("\n".join(lines) + "\n")
    groups = project.get("entry-points", {})
    sections = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    ]
    (target / "entry_points.txt").write_text("\n".join(sections))
