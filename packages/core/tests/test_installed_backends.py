"""Backends that pip really installed: the five ways to fail, and how the command shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from small_wheels import install, write_wheel

import polyshard
from polyshard.spi import SPI_VERSION

HERE = Path(__file__).parent
CORE = metadata.version("polyshard")
ASKED = (
    "missing:cpu",
    "broken:cpu",
    "behind:cpu",
    "ahead:cpu",
    "remote:cuda",
    "twin:cpu",
    "good:cpu",
)

MODULE = """
from polyshard.spi import Capabilities
from polyshard.testing import LoopbackBackend

class Backend(LoopbackBackend):
    name = {name!r}
    capabilities = Capabilities(frozenset({{{device_type!r}}}), frozenset(), True)

    def unavailable_reason(self, device_type):
        return {reason!r}

{body}
"""


def module(
    name: str, *, device_type: str = "cpu", reason: str | None = None, body: str = ""
) -> dict[str, str]:
    """The module of a small backend, by its name."""
    source = MODULE.format(name=name, device_type=device_type, reason=reason, body=body)
    return {f"small_{name}": source}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip installed six distributions, one for each kind of trouble and
    one that works."""
    wheels = tmp_path_factory.mktemp("wheels")
    site = tmp_path_factory.mktemp("site")
    broken = "raise ImportError('libbroken.so: cannot open shared object file')"
    ahead = f"Backend.spi = ({SPI_VERSION[0] + 1}, 0)"
    sources = {
        "broken": module("broken", body=broken),
        "behind": module("behind"),
        "ahead": module("ahead", body=ahead),
        "remote": module("remote", device_type="cuda", reason="no such device is visible"),
        "twin": module("twin"),
        "good": module("good"),
    }
    written = [
        write_wheel(
            wheels,
            f"polyshard-{name}",
            "0.7",
            requires=["polyshard<0.0.1"] if name == "behind" else ["polyshard"],
            backends={name: f"small_{name}:Backend"},
            modules=modules,
        )
        for name, modules in sources.items()
    ]
    written.append(write_wheel(wheels, "evil-twin", "6.6", backends={"twin": "small_twin:Backend"}))
    # What is installed where the tests run must not be seen: the first of a name hides the others.
    present = {
        entry.dist.name for entry in metadata.entry_points(group="polyshard.backends") if entry.dist
    }
    written += [write_wheel(wheels, name, "0.0") for name in sorted(present)]
    install(written, site)
    return site


def run(site: Path, *words: str) -> str:
    """What Python prints for ``words``, with ``site`` and the polyshard under test."""
    source = str(Path(polyshard.__file__).parents[1])
    path = os.pathsep.join([str(site), source, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    environment.pop("POLYSHARD_BACKEND", None)
    ended = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def answers(site: Path) -> Any:
    """What ``installed_backends.py`` found, by name of the backend."""
    return json.loads(run(site, str(HERE / "installed_backends.py"), *ASKED))


@pytest.fixture(scope="module")
def table(site: Path) -> str:
    """What ``polyshard backends`` prints."""
    return run(site, "-m", "polyshard", "backends")


INTERFACE = ".".join(map(str, SPI_VERSION))
MESSAGES = {
    "missing": (
        "No backend named 'missing' is installed. Installed: 'ahead' (polyshard-ahead 0.7), "
        "'behind' (polyshard-behind 0.7), 'broken' (polyshard-broken 0.7), 'good' (polyshard-good "
        "0.7), 'remote' (polyshard-remote 0.7), 'twin' (evil-twin 6.6, polyshard-twin 0.7)."
    ),
    "broken": (
        "Backend 'broken' (polyshard-broken 0.7) is broken: importing 'small_broken:Backend' "
        "raised ImportError: libbroken.so: cannot open shared object file. Repair or reinstall "
        "polyshard-broken."
    ),
    "behind": (
        f"Backend 'behind' (polyshard-behind 0.7) is incompatible: it requires polyshard <0.0.1, "
        f"but polyshard {CORE} is installed. Upgrade polyshard-behind."
    ),
    "ahead": (
        "Backend 'ahead' (polyshard-ahead 0.7) is incompatible: it was written for version "
        f"{SPI_VERSION[0] + 1}.0 of the collective interface, but this polyshard has {INTERFACE}. "
        "Upgrade polyshard."
    ),
    "remote": (
        "Backend 'remote' (polyshard-remote 0.7) is unavailable for device type 'cuda' here: no "
        "such device is visible."
    ),
    "twin": (
        "Backend 'twin' (evil-twin 6.6, polyshard-twin 0.7) is registered more than once, by "
        "evil-twin and polyshard-twin. Uninstall all but one."
    ),
}


class TestMessages:
    @pytest.mark.parametrize("name", MESSAGES)
    def test_the_choice_fails_with_its_message(self, answers: Any, name: str) -> None:
        """Missing, broken, incompatible in two ways, unavailable and registered twice: each has
        its own words, with package and version; a broken one is chained to what broke it."""
        cause = "ImportError" if name == "broken" else None
        assert answers[name]["choose_backend"] == {"message": MESSAGES[name], "cause": cause}

    @pytest.mark.parametrize("name", MESSAGES)
    def test_sharding_fails_with_it_too(self, answers: Any, name: str) -> None:
        """fully_shard says the same and leaves the module as it was."""
        said = answers[name]["fully_shard"]["message"]
        if name == "remote":
            assert "is unavailable for device type 'cpu': it serves cuda." in said
        else:
            assert said == MESSAGES[name]
        assert answers[name]["unchanged"]

    def test_one_that_works(self, answers: Any) -> None:
        """The backend that has nothing wrong with it is installed beside them, and shards."""
        assert answers["good"]["choose_backend"]["message"] is None
        assert answers["good"]["fully_shard"]["message"] is None
        assert not answers["good"]["unchanged"]

    def test_what_need_not_be_imported_is_not(self, answers: Any) -> None:
        """Requirements and duplicates are found in the metadata, before anything is imported."""
        assert answers["good"]["imported"] == ["small_ahead", "small_good", "small_remote"]


class TestTable:
    def test_every_name_has_one_row(self, table: str) -> None:
        """Each backend is one row, with its package, version, and yes or the reason why not."""
        rows, _, choices = table.partition("\n\n")
        # A line that begins with a space continues the one above.
        starts = [line.split()[0] for line in rows.splitlines() if not line.startswith(" ")]
        assert starts == ["name", "ahead", "behind", "broken", "good", "remote", "twin"]
        words = " ".join(rows.split())
        assert f"good polyshard-good 0.7 {INTERFACE} cpu yes" in words
        for name in set(MESSAGES) - {"missing"}:
            reason = MESSAGES[name].partition(") ")[2]
            assert f"no, it {reason}" in words
        assert "cpu good the first in order of name that can serve cpu" in " ".join(choices.split())

    def test_the_lines_fit_the_terminal(self, table: str) -> None:
        """No line is longer than the terminal is wide."""
        assert max(map(len, table.splitlines())) <= 100
