"""Discovery and choice of backends, and the table of what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from backend_site import Site, isolated_site, register_twice

import polyshard
from polyshard import BackendError
from polyshard.backends import BackendStatus, available_backends, choose_backend
from polyshard.spi import SPI_VERSION, CollectiveBackend
from polyshard.testing.loopback import LoopbackBackend


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with isolated_site(tmp_path, monkeypatch) as site:
        yield site


class TestChoice:
    def test_only_the_chosen_package_is_imported(self, site: Site) -> None:
        """Choosing by name runs the code of that backend and of no other."""
        for name in ("first", "second", "third"):
            site.add_backend(name)
        assert choose_backend("second", device_type="cpu").name == "second"
        assert site.imported == ["second"]

    @pytest.mark.parametrize(
        ("device_type", "chosen"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "another")]
    )
    def test_each_device_type_has_its_preference(
        self, site: Site, device_type: str, chosen: str
    ) -> None:
        """Without a name cpu takes gloo and cuda nccl, before others that would serve as well."""
        for name in ("another", "gloo", "nccl", "zebra"):
            site.add_backend(name, device_types=("cpu", "cuda", "xpu"))
        assert choose_backend(None, device_type=device_type).name == chosen
        assert site.imported == [chosen]

    def test_others_follow_in_order_of_name(self, site: Site) -> None:
        """Where the preferred backend is absent, the first by name that serves the device is it."""
        for name, served in [("b", "cuda"), ("c", "cpu"), ("d", "cpu")]:
            site.add_backend(name, device_types=(served,))
        assert choose_backend(None, device_type="cpu").name == "c"
        assert site.imported == ["b", "c"]

    def test_a_preferred_backend_without_its_device_is_passed_over_silently(
        self, site: Site, recwarn: pytest.WarningsRecorder
    ) -> None:
        """A backend that says it is unavailable here gives way to the next without a warning."""
        site.add_backend(
            "gloo", body="Backend.unavailable_reason = lambda self, kind: 'no network'"
        )
        site.add_backend("other")
        assert choose_backend(None, device_type="cpu").name == "other"
        assert not recwarn.list

    def test_a_defective_preferred_backend_is_passed_over_with_a_warning(self, site: Site) -> None:
        """Falling back from a backend that is broken tells the user which one and why."""
        site.add_backend("gloo", body="raise ImportError('libgloo.so is gone')")
        site.add_backend("other")
        with pytest.warns(RuntimeWarning, match=r"'other', because backend 'gloo'.*libgloo.so"):
            assert choose_backend(None, device_type="cpu").name == "other"

    def test_the_environment_names_the_backend(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """POLYSHARD_BACKEND decides where no backend is given, and only there; empty is unset."""
        site.add_backend("gloo")
        site.add_backend("other")
        monkeypatch.setenv("POLYSHARD_BACKEND", "other")
        assert choose_backend(None, device_type="cpu").name == "other"
        assert choose_backend("gloo", device_type="cpu").name == "gloo"
        monkeypatch.setenv("POLYSHARD_BACKEND", "")
        assert choose_backend(None, device_type="cpu").name == "gloo"

    def test_an_instance_is_made_once(self, site: Site) -> None:
        """However a backend is asked for, the process has one instance of it."""
        site.add_backend("gloo", device_types=("cpu", "cuda"))
        instance = choose_backend("gloo", device_type="cpu")
        assert choose_backend(None, device_type="cpu") is instance
        assert choose_backend("gloo", device_type="cuda") is instance
        assert available_backends()[0].spi == instance.spi
        assert site.imported == ["gloo"]

    @pytest.mark.parametrize("backend", [None, "gloo"])
    def test_a_choice_is_remembered(
        self, site: Site, monkeypatch: pytest.MonkeyPatch, backend: str | None
    ) -> None:
        """The installed metadata, slow to read, is read for the first of many equal requests."""
        site.add_backend("gloo")
        instance = choose_backend(backend, device_type="cpu")
        monkeypatch.delattr(metadata, "entry_points")
        assert choose_backend(backend, device_type="cpu") is instance

    def test_a_backend_installed_after_an_error_is_found(self, site: Site) -> None:
        """Failures are not remembered."""
        with pytest.raises(BackendError):
            choose_backend(None, device_type="cpu")
        site.add_backend("gloo")
        assert choose_backend(None, device_type="cpu").name == "gloo"

    def test_use_symm_mem_is_a_name(self, site: Site) -> None:
        """use_symm_mem=True chooses symm_mem, also next to that name or an instance of it."""
        site.add_backend("gloo")
        site.add_backend("symm_mem")
        instance = choose_backend(None, device_type="cpu", use_symm_mem=True)
        assert instance.name == "symm_mem"
        for same in ("symm_mem", instance):
            assert choose_backend(same, device_type="cpu", use_symm_mem=True) is instance

    @pytest.mark.parametrize("other", ["gloo", LoopbackBackend()])
    def test_use_symm_mem_contradicts_another_backend(self, other: str | CollectiveBackend) -> None:
        """use_symm_mem=True with another backend is refused and both are named."""
        name = other if isinstance(other, str) else other.name
        with pytest.raises(ValueError, match=f"backend='symm_mem', but backend='{name}'"):
            choose_backend(other, device_type="cpu", use_symm_mem=True)

    def test_an_instance_is_used_as_it_is(self) -> None:
        """A backend object needs no registration."""
        instance = LoopbackBackend()
        assert choose_backend(instance, device_type="cpu") is instance

    @pytest.mark.parametrize("wrong", [3, LoopbackBackend])
    def test_anything_else_is_refused(self, wrong: object) -> None:
        """Neither a class nor a number is a backend; the error shows what came."""
        with pytest.raises(ValueError, match="must be a name, a CollectiveBackend or None, got"):
            choose_backend(wrong, device_type="cpu")  # type: ignore[arg-type]


class TestMissing:
    def test_an_unknown_name_lists_what_there_is(self, site: Site) -> None:
        """The error names the installed backends with their distributions, and a close match."""
        site.add_backend("gloomy", distribution="gloomy-backend", version="2.5")
        with pytest.raises(BackendError) as caught:
            choose_backend("glomy", device_type="cpu")
        message = str(caught.value)
        assert "No backend named 'glomy' is installed." in message
        assert "Installed: 'gloomy' (gloomy-backend 2.5)." in message
        assert "Did you mean 'gloomy'" in message

    def test_a_known_name_comes_with_its_extra(self, site: Site) -> None:
        """A backend of this project that is not installed comes with the command to install it."""
        with pytest.raises(BackendError, match="Installed: none") as caught:
            choose_backend(None, device_type="cuda", use_symm_mem=True)
        assert 'pip install "polyshard[symm-mem]"' in str(caught.value)

    def test_a_misspelt_known_name_comes_with_its_extra(self, site: Site) -> None:
        """The close match may be one that has yet to be installed."""
        with pytest.raises(BackendError, match="Did you mean 'symm_mem'") as caught:
            choose_backend("symm-mem", device_type="cuda")
        assert 'pip install "polyshard[symm-mem]"' in str(caught.value)

    def test_the_environment_variable_is_blamed(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A bad name from POLYSHARD_BACKEND says where it came from."""
        monkeypatch.setenv("POLYSHARD_BACKEND", "pigeons")
        with pytest.raises(BackendError, match=r"'pigeons'.*variable POLYSHARD_BACKEND chose it"):
            choose_backend(None, device_type="cpu")

    @pytest.mark.parametrize(("device_type", "extra"), [("cpu", "gloo"), ("cuda", "nccl")])
    def test_nothing_installed_names_the_extra(
        self, site: Site, device_type: str, extra: str
    ) -> None:
        """With no backend at all, the error is the command that installs the fitting one."""
        with pytest.raises(BackendError) as caught:
            choose_backend(None, device_type=device_type)
        message = str(caught.value)
        assert f"can serve device type '{device_type}'. Installed: none." in message
        assert f'pip install "polyshard[{extra}]"' in message

    def test_nothing_suitable_says_why_each_was_not_chosen(self, site: Site) -> None:
        """With none that fits, each installed backend is listed with its own reason."""
        site.add_backend("nccl", device_types=("cuda",))
        site.add_backend("broken", body="raise ImportError('no libbroken')")
        with pytest.raises(BackendError) as caught:
            choose_backend(None, device_type="cpu")
        message = str(caught.value)
        assert "'nccl' (fake-nccl 1.0) is unavailable for device type 'cpu'" in message
        assert "'broken' (fake-broken 1.0) is broken" in message
        assert 'pip install "polyshard[gloo]"' in message
        assert isinstance(caught.value.__cause__, ImportError)

    def test_a_device_type_nobody_prefers(self, site: Site) -> None:
        """A device that this project has no backend for gets no wrong hint."""
        with pytest.raises(BackendError, match="Install a backend that serves 'xpu'"):
            choose_backend(None, device_type="xpu")


class TestTable:
    def test_every_registration_has_a_row(self, site: Site) -> None:
        """The table has versions, devices and the reasons of all that is registered, by name."""
        register_twice(site)
        site.add_backend("bad", version="0.3", body="raise ImportError('no libbad')")
        site.add_backend("good", version="2.1", device_types=("cuda", "cpu"))
        body = "Backend.unavailable_reason = lambda self, kind: {'cuda': 'no device'}.get(kind)"
        site.add_backend("half", device_types=("cuda", "cpu"), body=body)
        site.add_backend("sick", body="Backend.unavailable_reason = lambda self, kind: 1 / 0")
        bad, good, half, sick, *twins = available_backends()
        assert (bad.name, bad.version, bad.spi, bad.device_types) == ("bad", "0.3", None, ())
        assert isinstance(bad.reasons, str)
        assert "no libbad" in bad.reasons
        assert bad.usable_device_types == ()
        assert good == BackendStatus("good", "fake-good", "2.1", SPI_VERSION, ("cpu", "cuda"), None)
        assert good.usable_device_types == ("cpu", "cuda")
        assert isinstance(half.reasons, dict)
        assert half.reasons == {"cuda": "is unavailable for device type 'cuda' here: no device."}
        assert half.usable_device_types == ("cpu",)
        assert isinstance(sick.reasons, dict)
        assert "ZeroDivisionError" in sick.reasons["cpu"]
        assert [twin.distribution for twin in twins] == ["one-backend", "two-backend"]
        assert all("registered more than once" in str(twin.reasons) for twin in twins)

    def test_nothing_installed_is_an_empty_table(self, site: Site) -> None:
        """Without backends there are no rows and no error."""
        assert available_backends() == ()


def test_importing_polyshard_imports_no_backend(site: Site) -> None:
    """In a process that only imports the core, no backend package and no CuPy was loaded."""
    packages = ["polyshard_gloo", "polyshard_nccl", "polyshard_symm_mem"]
    for name in [*packages, "cupy"]:
        (site.path / f"{name}.py").write_text("")
    entries = [f"{name.removeprefix('polyshard_')} = {name}:Backend" for name in packages]
    site.add_distribution("stand-ins", entries=entries)
    script = (
        "import sys, polyshard, polyshard.backends\n"
        "print([m for m in sys.modules if m.startswith(('polyshard_', 'cupy'))])\n"
        "print(polyshard.backends.metadata.entry_points(group='polyshard.backends').names)"
    )
    source = str(Path(polyshard.__file__).parents[1])
    path = os.pathsep.join([str(site.path), source, os.environ.get("PYTHONPATH", "")])
    loaded, registered = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert loaded == "[]"
    assert "'symm_mem'" in registered
