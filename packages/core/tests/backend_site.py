"""Small backend distributions, written to disk, for the tests of discovery to really find."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from polyshard import backends
from polyshard.spi import SPI_VERSION

MODULE = """
import pathlib
with open({log!r}, "a") as log:
    log.write({name!r} + "\\n")

from polyshard.spi import Capabilities
from polyshard.testing.loopback import LoopbackBackend

class Backend(LoopbackBackend):
    name = {name!r}
    spi = {spi!r}
    capabilities = Capabilities(frozenset({device_types!r}), frozenset(), True)

    def unavailable_reason(self, device_type):
        return None

{body}
"""


class Site:
    """A directory on ``sys.path`` in which small backend distributions are installed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = path / "imports.log"

    @property
    def imported(self) -> list[str]:
        """Backend names whose module was executed, in order."""
        return self._log.read_text().split() if self._log.exists() else []

    def add_distribution(
        self,
        distribution: str,
        version: str = "1.0",
        *,
        requires: Sequence[str] = (),
        entries: Sequence[str] = (),
    ) -> None:
        """Write the metadata of a distribution; one of the same name further on is hidden."""
        folder = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        if entries:
            lines = ["[polyshard.backends]", *entries]
            (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
        importlib.invalidate_caches()

    def add_backend(
        self,
        name: str,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (),
        spi: object = SPI_VERSION,
        device_types: Sequence[str] = ("cpu",),
        body: str = "",
    ) -> None:
        """Install a backend whose module is ``body`` after a working class ``Backend``."""
        module = f"fake_{name}"
        source = MODULE.format(
            log=str(self._log), name=name, spi=spi, device_types=tuple(device_types), body=body
        )
        (self.path / f"{module}.py").write_text(source)
        self.add_distribution(
            distribution or f"fake-{name}",
            version,
            requires=requires,
            entries=[f"{name} = {module}:Backend"],
        )


@contextmanager
def isolated_site(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An environment with polyshard 1.4.0 and no backend, whatever is really installed."""
    really_installed = {
        entry.dist.name
        for entry in metadata.entry_points(group="polyshard.backends")
        if entry.dist is not None
    }
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("POLYSHARD_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_instances", {})
    monkeypatch.setattr(backends, "_choices", {})
    site = Site(path)
    site.add_distribution("polyshard", "1.4.0")
    for distribution in really_installed:
        site.add_distribution(distribution, "0.0")
    yield site
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]


def register_twice(site: Site) -> None:
    """Install two distributions that both register the name ``twin``."""
    site.add_backend("twin", distribution="one-backend")
    site.add_distribution("two-backend", entries=["twin = fake_twin:Backend"])
