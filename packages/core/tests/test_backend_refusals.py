"""The four ways in which a backend that is installed can be refused, each with its own message."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from backend_site import Site, isolated_site, register_twice

from polyshard import BackendError, backends
from polyshard.backends import choose_backend
from polyshard.spi import SPI_VERSION
from polyshard.testing.loopback import LoopbackBackend


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with isolated_site(tmp_path, monkeypatch) as site:
        yield site


class TestBroken:
    @pytest.mark.parametrize(
        ("body", "said", "cause"),
        [
            ("import no_such_module_at_all", "importing 'fake_bad:Backend'", ModuleNotFoundError),
            ("del Backend", "importing 'fake_bad:Backend'", AttributeError),
            ("def Backend(): raise OSError('libbad.so')", "raised OSError: libbad.so", OSError),
            ("Backend.__abstractmethods__ = {'lane'}", "constructing", TypeError),
            ("Backend = dict", "made a dict, not a CollectiveBackend", None),
            ("Backend.capabilities = None", "'capabilities' are missing", None),
            ("Backend.name = 'good'", "it calls itself 'good'", None),
            ("Backend.spi = '1.0'", "its 'spi' is '1.0'", None),
            (
                "Backend.unavailable_reason = lambda self, kind: 1 / 0",
                "unavailable_reason('cpu') raised ZeroDivisionError",
                ZeroDivisionError,
            ),
        ],
    )
    def test_a_defect_is_named_and_chained(
        self, site: Site, body: str, said: str, cause: type[Exception] | None
    ) -> None:
        """Whatever fails on the way to a usable instance is named, with the original error."""
        site.add_backend("bad", distribution="bad-backend", version="3.1", body=body)
        with pytest.raises(BackendError) as caught:
            choose_backend("bad", device_type="cpu")
        message = str(caught.value)
        assert message.startswith("Backend 'bad' (bad-backend 3.1) is broken: ")
        assert said in message
        assert type(caught.value.__cause__) is (cause or type(None))

    def test_an_instance_without_a_version(self) -> None:
        """An object given as backend is held to the same declarations."""

        class Unversioned(LoopbackBackend):
            spi = None  # type: ignore[assignment]

        with pytest.raises(BackendError, match=r"'loopback'.* is broken: its 'spi' is None"):
            choose_backend(Unversioned(), device_type="cpu")


class TestIncompatible:
    @pytest.mark.parametrize(
        ("requirement", "upgrade"),
        [
            ("polyshard>=1.5", "polyshard"),
            ("polyshard>1.4", "polyshard"),
            ("polyshard==2.*", "polyshard"),
            ("polyshard~=1.6", "polyshard"),
            ("PolyShard<1.4", "poly-backend"),
            ("polyshard~=1.2.0", "poly-backend"),
            ("polyshard!=1.4.0", "poly-backend"),
            ("polyshard===0.9", "poly-backend"),
        ],
    )
    def test_an_unmet_requirement_is_refused_before_the_import(
        self, site: Site, requirement: str, upgrade: str
    ) -> None:
        """Both versions and the package to upgrade are named, and none of its code has run."""
        site.add_backend("poly", distribution="poly-backend", requires=["torch", requirement])
        with pytest.raises(BackendError) as caught:
            choose_backend("poly", device_type="cpu")
        specifier = requirement[len("polyshard") :]
        assert str(caught.value) == (
            f"Backend 'poly' (poly-backend 1.0) is incompatible: it requires polyshard {specifier}"
            f", but polyshard 1.4.0 is installed. Upgrade {upgrade}."
        )
        assert site.imported == []

    @pytest.mark.parametrize(
        "requirement",
        [
            "polyshard>=1.4,<1.5",
            "polyshard",
            "polyshard-gloo>=7",
            'polyshard>=9; extra == "future"',
            'polyshard<1; python_version < "3"',
        ],
    )
    def test_a_met_requirement_is_accepted(self, site: Site, requirement: str) -> None:
        """Requirements that hold, are another package's or do not apply here change nothing."""
        site.add_backend("poly", requires=[requirement])
        assert choose_backend("poly", device_type="cpu").name == "poly"

    def test_a_development_version_of_the_core_counts(self, site: Site) -> None:
        """A pre-release of the core satisfies the range that it lies in."""
        (site.path / "polyshard-1.4.0.dist-info").rename(site.path / "hidden")
        site.add_distribution("polyshard", "1.4.1.dev3")
        site.add_backend("poly", requires=["polyshard>=1.4,<1.5"])
        assert choose_backend("poly", device_type="cpu").name == "poly"

    def test_an_unreadable_requirement_is_a_defect(self, site: Site) -> None:
        """Metadata that cannot be read is shown, not skipped."""
        site.add_backend("poly", requires=["polyshard >> 1"])
        with pytest.raises(BackendError, match="broken: reading its requirement 'polyshard >> 1'"):
            choose_backend("poly", device_type="cpu")
        assert site.imported == []

    def test_sources_that_were_never_installed_have_no_version(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the core has no metadata its version is unknown and requirements are not held."""

        def version(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", version)
        site.add_backend("poly", requires=["polyshard>=99"])
        assert choose_backend("poly", device_type="cpu").name == "poly"

    @pytest.mark.parametrize(
        ("spi", "upgrade"),
        [
            ((SPI_VERSION[0], SPI_VERSION[1] + 1), "polyshard"),
            ((SPI_VERSION[0] + 1, 0), "polyshard"),
            ((SPI_VERSION[0] - 1, 9), "poly-backend"),
        ],
    )
    @pytest.mark.parametrize("body", ["", "Backend.__abstractmethods__ = {'lane'}"])
    def test_another_interface_version_is_refused(
        self, site: Site, spi: tuple[int, int], upgrade: str, body: str
    ) -> None:
        """Both interface versions are named, even where the class can no longer be made."""
        site.add_backend("poly", distribution="poly-backend", spi=spi, body=body)
        with pytest.raises(BackendError) as caught:
            choose_backend("poly", device_type="cpu")
        assert str(caught.value) == (
            "Backend 'poly' (poly-backend 1.0) is incompatible: it was written for version "
            f"{spi[0]}.{spi[1]} of the collective interface, but this polyshard has "
            f"{SPI_VERSION[0]}.{SPI_VERSION[1]}. Upgrade {upgrade}."
        )

    def test_an_earlier_minor_version_fits(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A backend written for an earlier minor of the same major is served."""
        monkeypatch.setattr(backends, "SPI_VERSION", (SPI_VERSION[0], SPI_VERSION[1] + 1))
        site.add_backend("poly", spi=SPI_VERSION)
        assert choose_backend("poly", device_type="cpu").name == "poly"

    def test_a_version_set_by_the_constructor_counts(self, site: Site) -> None:
        """The interface version of the instance is checked, not only that of its class."""
        body = "class Backend(Backend):\n    def __init__(self): self.spi = (99, 0)"
        site.add_backend("poly", body=body)
        with pytest.raises(BackendError, match=r"incompatible: .* version 99\.0"):
            choose_backend("poly", device_type="cpu")

    def test_an_instance_of_another_interface_version(self) -> None:
        """An object given as backend is held to the interface version as well."""

        class Later(LoopbackBackend):
            spi = (SPI_VERSION[0] + 1, 0)

        with pytest.raises(BackendError, match=r"'loopback'.* is incompatible.*Upgrade polyshard"):
            choose_backend(Later(), device_type="cpu")


class TestUnavailable:
    def test_the_reason_of_the_backend_is_shown(self, site: Site) -> None:
        """A chosen backend that cannot work here says why, in its own words."""
        body = "Backend.unavailable_reason = lambda self, kind: 'no CUDA device is visible.'"
        site.add_backend("gpu", device_types=("cuda",), body=body)
        with pytest.raises(BackendError) as caught:
            choose_backend("gpu", device_type="cuda")
        assert str(caught.value) == (
            "Backend 'gpu' (fake-gpu 1.0) is unavailable for device type 'cuda' here: no CUDA "
            "device is visible."
        )

    def test_another_device_type_is_refused(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A backend chosen for a device it does not serve says which it serves, and who chose."""
        site.add_backend("gpu", device_types=("cuda",))
        monkeypatch.setenv("POLYSHARD_BACKEND", "gpu")
        with pytest.raises(BackendError) as caught:
            choose_backend(None, device_type="cpu")
        assert str(caught.value) == (
            "Backend 'gpu' (fake-gpu 1.0) is unavailable for device type 'cpu': it serves cuda. "
            "The environment variable POLYSHARD_BACKEND chose it."
        )

    def test_an_instance_for_another_device_type(self) -> None:
        """An object given as backend must serve the device as well."""
        with pytest.raises(BackendError, match="unavailable for device type 'cuda': it serves cpu"):
            choose_backend(LoopbackBackend(), device_type="cuda")


class TestDuplicate:
    def test_both_distributions_are_named(self, site: Site) -> None:
        """A name that two distributions register is refused before either is imported."""
        register_twice(site)
        with pytest.raises(BackendError) as caught:
            choose_backend("twin", device_type="cpu")
        assert str(caught.value) == (
            "Backend 'twin' (one-backend 1.0, two-backend 1.0) is registered more than once, by "
            "one-backend and two-backend. Uninstall all but one."
        )
        assert site.imported == []

    def test_other_names_are_not_affected(self, site: Site) -> None:
        """A duplicate of one name does not stand in the way of another."""
        register_twice(site)
        site.add_backend("gloo")
        assert choose_backend(None, device_type="cpu").name == "gloo"
