"""tools/gpu_check.sh where there is no GPU: what it says, and that its checks run at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

from gpu_check import packages, report  # noqa: E402
from gpu_check.registry import CHECKS, Check  # noqa: E402
from gpu_check.runner import Runner  # noqa: E402

NAMES = [check.name for check in CHECKS]
# Of a kind that there are several of, the first.
DRY = [name for name in NAMES if "_connected" not in name and name.endswith(("1of2", "1of4"))]
DRY += [name for name in NAMES if "of" not in name.rpartition("_")[2] and name[-2:] != "_4"]


def run_script(
    folder: Path, *options: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run it as people do, all of its temporary files below ``folder``; also what it reported."""
    temporary, out = folder / "temporary", folder / "out"
    temporary.mkdir()
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHON": sys.executable,
        "TMPDIR": str(temporary),
        "OUT": str(out),
        **variables,
    }
    done = subprocess.run(
        [str(TOOLS / "gpu_check.sh"), *options],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert list(temporary.iterdir()) == [], "it left something in the temporary folder"
    assert sorted(each.name for each in folder.iterdir()) in (
        ["out", "temporary"],
        ["temporary"],
    )
    if not out.exists():
        return done, {}
    assert sorted(each.name for each in out.iterdir()) == ["gpu_check.json", "gpu_check.md"]
    content = json.loads((out / "gpu_check.json").read_text())
    text = (out / "gpu_check.md").read_text()
    assert text == report.summary(content)
    assert text in done.stdout
    return done, content


def _version(package: str) -> str:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    version: str = tomllib.loads(text)["project"]["version"]
    return version


# -- without a GPU ------------------------------------------------------------------------------


def test_everything_is_skipped(tmp_path: Path) -> None:
    """Every check says why it was skipped, and that is no failure."""
    done, content = run_script(tmp_path, POLYSHARD_REQUIRE_GPU="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [check["name"] for check in content["checks"]] == NAMES
    for check in content["checks"]:
        assert check["status"] == "skipped"
        assert "GPU" in check["reason"] or "CUDA" in check["reason"]
        assert f"| {check['name']} | skipped |" in done.stdout
    machine = content["machine"]
    assert machine["gpu"] is None
    assert machine["torch"]
    # Found by way of what was written for the run, or of what is installed: versions agree.
    assert machine["packages"]["polyshard-nccl"] == _version("backend_nccl")
    assert content["dry_run_on_cpu"] is False


def test_a_gpu_can_be_demanded(tmp_path: Path) -> None:
    """What is skipped then counts as failed."""
    done, content = run_script(tmp_path, "--only", "kernels", POLYSHARD_REQUIRE_GPU="1")
    assert done.returncode == 1
    (check,) = content["checks"]
    assert check["status"] == "failed"
    assert check["reason"].startswith("skipped: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "nothing"), "no check begins with nothing"),
        (("setup.py",), "is no wheel"),
        (("--dry-run-on-cpu",), "POLYSHARD_REQUIRE_GPU=1 asks for a GPU"),
    ],
)
def test_refusals(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done, content = run_script(tmp_path, *options, POLYSHARD_REQUIRE_GPU="1")
    assert done.returncode == 2
    assert message in done.stderr
    assert content == {}


# -- checks that go wrong -----------------------------------------------------------------------


def test_what_goes_wrong_is_recorded(tmp_path: Path) -> None:
    """A check that raises, dies, hangs or does nothing is told as that, and the next one runs."""
    note = tmp_path / "sleeper"
    checks = [
        Check("raises", "gpu_check_fakes:raises", measures=True),
        Check("passes", "gpu_check_fakes:passes", arguments={"number": 7}),
        Check("dies", "gpu_check_fakes:dies"),
        Check("skips", "gpu_check_fakes:skips"),
        Check("nothing", "gpu_check_fakes:does_nothing"),
        Check("half", "gpu_check_fakes:half"),
        Check("hangs", "gpu_check_fakes:hangs", 8, arguments={"note": str(note)}),
        Check("ends_late", "gpu_check_fakes:ends_late", 8),
        Check("missing", "gpu_check_fakes:missing"),
        Check("last", "gpu_check_fakes:passes", arguments={"number": 8}),
    ]
    seen: list[str] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    runner = Runner(
        scratch,
        [str(ROOT / "tests"), str(TOOLS)],
        jobs=2,
        note=lambda outcome: seen.append(outcome.name),
    )
    found = {outcome.name: outcome for outcome in runner.run(checks)}
    assert list(found) == [check.name for check in checks]
    assert sorted(seen) == sorted(found)
    assert seen[0] == "raises"
    outcomes = {name: (outcome.status, outcome.reason) for name, outcome in found.items()}
    assert outcomes == {
        "raises": ("failed", "RuntimeError: broken on purpose"),
        "passes": ("passed", ""),
        "dies": ("failed", "its process ended with 3"),
        "skips": ("skipped", "nothing to see here"),
        "nothing": ("failed", "CheckFailed: it neither checked nor measured anything"),
        "half": ("failed", "CheckFailed: 1 of 3 steps: second"),
        "hangs": ("failed", "not over after 8 s"),
        "ends_late": (
            "failed",
            "not over after 8 s (it had found all it looked for, and did not end)",
        ),
        "missing": (
            "failed",
            "AttributeError: module 'gpu_check_fakes' has no attribute 'missing'",
        ),
        "last": ("passed", ""),
    }
    assert found["passes"].figures == {"number": 7}
    assert found["passes"].output == []
    assert "printed before" in found["raises"].output
    assert found["half"].steps["third"] == "passed"
    # Where it hung is in what it printed, and what it had started is gone.
    assert any("gpu_check_fakes.py" in line and "hangs" in line for line in found["hangs"].output)
    _require_gone(int(note.read_text()))


def _require_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


def test_time_for_all_checks(tmp_path: Path) -> None:
    """What no time is left for is not begun, and says so."""
    runner = Runner(tmp_path, [str(ROOT / "tests"), str(TOOLS)], seconds=0.0)
    (outcome,) = runner.run([Check("late", "gpu_check_fakes:passes", arguments={"number": 1})])
    assert (outcome.status, outcome.reason) == ("skipped", "the time for all checks was over")


# -- packages -----------------------------------------------------------------------------------

BACKENDS = """
import importlib.metadata as m, polyshard, polyshard_gloo
print(sorted(entry.value for entry in m.entry_points(group="polyshard.backends")))
print(m.version("polyshard"), m.requires("polyshard-gloo")[0], polyshard.__file__)
"""


@pytest.mark.parametrize("source", ["checkout", "wheels"])
def test_packages_are_found_without_being_installed(tmp_path: Path, source: str) -> None:
    """Backends are discovered, with their requirements, from a checkout and from wheels."""
    folder = tmp_path / "packages"
    folder.mkdir()
    if source == "checkout":
        paths = packages.from_checkout(folder)
    else:
        paths = packages.from_wheels(folder, _wheels(tmp_path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", BACKENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found, told = done.stdout.splitlines()
    for value in ("polyshard_gloo:GlooBackend", "polyshard_nccl:NcclBackend"):
        assert value in found
    version, requirement, file = told.split(" ")
    assert version == _version("core")
    assert requirement.startswith("polyshard")
    assert Path(file).is_relative_to(folder if source == "wheels" else ROOT)


def _wheels(folder: Path) -> list[Path]:
    """What a build of the packages would hold of use here."""
    metadata = folder / "metadata"
    metadata.mkdir()
    packages.from_checkout(metadata)
    made = []
    for info in metadata.glob("*.dist-info"):
        name = info.name.split("-")[0]
        (source,) = ROOT.glob(f"packages/*/src/{name}")
        wheel = folder / f"{name}-0.1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for file in info.iterdir():
                archive.write(file, f"{info.name}/{file.name}")
            for file in source.rglob("*.py"):
                archive.write(file, file.relative_to(source.parent))
        made.append(wheel)
    return made


def test_wheels_that_are_missing_are_named(tmp_path: Path) -> None:
    wheels = [each for each in _wheels(tmp_path) if "nccl" not in each.name]
    (tmp_path / "packages").mkdir()
    with pytest.raises(ValueError, match="missing for polyshard_nccl"):
        packages.from_wheels(tmp_path / "packages", wheels)


# -- the checks themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DRY)
def test_dry_run(tmp_path: Path, name: str) -> None:
    """What of a check needs no CUDA runs, on the CPU and over gloo, and the report says which."""
    done, content = run_script(
        tmp_path, "--dry-run-on-cpu", "--only", name, POLYSHARD_REQUIRE_GPU=""
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = content["checks"]
    assert check["status"] == "passed"
    assert "passed" in check["steps"].values()
    assert content["dry_run_on_cpu"] is True
    assert "nothing of a GPU" in done.stdout


def test_every_check_can_be_called() -> None:
    """Functions exist under the names in the list, and names are told apart."""
    assert len(set(NAMES)) == len(NAMES)
    for check in CHECKS:
        module, _, function = check.function.partition(":")
        source = (TOOLS / f"{module.replace('.', '/')}.py").read_text()
        assert f"def {function}(" in source
