"""Every check and demonstration of the repository, each in an environment of its own.

torch takes a gigabyte, so it is installed once, in the environment of the session `third_party`.
The others are layers on that one: they see its packages through a .pth file and hold nothing but
those of ours that the session is about. So the core's own tests run where no backend is
installed, and making such an environment takes seconds.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
CORE = "packages/core"
GLOO = "packages/backend_gloo"
NCCL = "packages/backend_nccl"
SYMM_MEM = "packages/backend_symm_mem"
PACKAGES = (CORE, GLOO, NCCL, SYMM_MEM)
SOCKETS = "examples/third_party_backend"  # no part of the product: what a stranger would write
MOST_RANKS_OF_BEHAVIOURS = 4
RUN_2_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

THIRD_PARTY = (
    "torch",
    "numpy",
    "packaging",
    "matplotlib",
    "rich",
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "mypy",
    "setuptools",
    "wheel",
    "build",
)

# Nothing comes from outside the environments that nox makes.
os.environ["PYTHONNOUSERSITE"] = "1"
for variable in ("PYTHONPATH", "PYTHONHOME"):
    os.environ.pop(variable, None)

# A layer is made without pip: it uses the one of third_party, for itself.
layer = nox.session(requires=["third_party"], venv_params=["--without-pip"])


@nox.session(default=False)
def third_party(session: nox.Session) -> None:
    """What others made, at the versions of constraints.txt; filled once."""
    install_once(session, "-c", CONSTRAINTS.name, *THIRD_PARTY)


@layer
def demo(session: nox.Session) -> None:
    """Train the example on two processes of this machine's CPU."""
    prepare(session, CORE, GLOO)
    session.run("python", *RUN_2_RANKS, "examples/train_gpt.py", *session.posargs)


@layer
def core(session: nox.Session) -> None:
    """The core's own tests, with no backend package installed."""
    prepare(session, CORE)
    test(session, f"{CORE}/tests")


@nox.session(requires=["third_party", "core"], venv_params=["--without-pip"])
def tests(session: nox.Session) -> None:
    """All tests: the core's alone first, then those of the backends and of all together."""
    prepare(session, *PACKAGES)
    test(session, f"{GLOO}/tests", f"{NCCL}/tests", f"{SYMM_MEM}/tests", "tests")


@layer
def gloo(session: nox.Session) -> None:
    """The gloo backend's own tests, with the core and no other backend."""
    prepare(session, CORE, GLOO)
    test(session, f"{GLOO}/tests")


@layer
def nccl(session: nox.Session) -> None:
    """The NCCL backend's own tests, with the core and no other backend."""
    prepare(session, CORE, NCCL)
    test(session, f"{NCCL}/tests")


@layer
def symm_mem(session: nox.Session) -> None:
    """The symmetric-memory backend's own tests, with the core and no other backend."""
    prepare(session, CORE, SYMM_MEM)
    test(session, f"{SYMM_MEM}/tests")


@layer
def conformance(session: nox.Session) -> None:
    """Hold the backends that communicate to the contract, each; or, with arguments, run
    `python -m polyshard.testing` with them, such as `--backend gloo --world-size 3`."""
    prepare(session, CORE, GLOO)
    if session.posargs:
        session.run("python", "-m", "polyshard.testing", *session.posargs)
        return
    suites = (
        f"{CORE}/tests/test_conformance_loopback.py",
        f"{GLOO}/tests/test_gloo_conformance.py",
    )
    session.run("python", "-m", "pytest", *suites)


@layer
def gpu(session: nox.Session) -> None:
    """What needs GPUs, on all that there are: the tests of the CUDA backends, the contract among
    them, and the behaviours on CUDA tensors. Skips fail, unless POLYSHARD_REQUIRE_GPU=0."""
    prepare(session, *PACKAGES)
    session.env.setdefault("POLYSHARD_REQUIRE_GPU", os.environ.get("POLYSHARD_REQUIRE_GPU", "1"))
    said = session.run(
        "python", "-c", "import torch; print(torch.cuda.device_count())", silent=True
    )
    gpus = int(str(said).strip() or 0)
    if not gpus:
        why = "torch finds no GPU here; nvidia-smi lists those that the driver knows"
        session.skip(why) if session.env["POLYSHARD_REQUIRE_GPU"] == "0" else session.error(why)
    test(session, f"{NCCL}/tests", f"{SYMM_MEM}/tests")
    session.env["POLYSHARD_TEST_DEVICE"] = "cuda"
    if gpus < MOST_RANKS_OF_BEHAVIOURS:
        # NCCL takes one rank for each GPU; through the host, several can share one. Else every
        # mesh gets what its devices prefer: some tests stay on CPUs.
        session.env.update(POLYSHARD_BACKEND="gloo", POLYSHARD_GLOO_STAGING="1")
    test(session, *sorted(str(path) for path in Path("tests").glob("test_behaves_*.py")))


@layer
def bench(session: nox.Session) -> None:
    """Run benchmarks/*.py, or those named, with whatever arguments follow their names."""
    named = [argument for argument in session.posargs if argument.endswith(".py")]
    options = [argument for argument in session.posargs if not argument.endswith(".py")]
    scripts = named or sorted(str(path) for path in Path("benchmarks").glob("*.py"))
    prepare(session, CORE, GLOO)
    for script in scripts:
        session.run("python", script, *options)


@layer
def nightly(session: nox.Session) -> None:
    """Thousands of random models, sharded and plain, compared after every operation; scripts of
    those that differ are left in random-models/. Arguments go to tests/random_models.py."""
    prepare(session, CORE, GLOO)
    options = session.posargs or ("--cases", "5000")
    session.run("python", "tests/random_models.py", *options)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and likely bugs, with ruff; needs no torch."""
    install_once(session, "-c", CONSTRAINTS.name, "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@layer
def types(session: nox.Session) -> None:
    """Types, with mypy: strict where pyproject.toml says so."""
    prepare(session, *PACKAGES)
    session.run("python", "-m", "mypy", *session.posargs)


@nox.session(requires=["third_party"], venv_params=["--without-pip"], reuse_venv=False)
def build(session: nox.Session) -> None:
    """Build the four wheels, install them as a user would, and train from what was installed."""
    prepare(session)
    shutil.rmtree("dist", ignore_errors=True)
    for package in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", package)
    smoke = ROOT / ".ci" / "smoke.py"
    session.chdir(session.create_tmp())  # So that nothing is imported from the sources.
    for requirement, backends in (
        ("polyshard", ()),
        ("polyshard[gloo]", ("gloo",)),
        ("polyshard[nccl,symm-mem]", ("gloo", "nccl", "symm_mem")),
    ):
        # No index: our packages come from dist, and theirs are there already.
        session.install("--no-index", "--find-links", f"{ROOT}/dist", requirement)
        session.run("python", "-I", str(smoke), "imports", *backends)
    session.run("python", "-m", "pip", "check")
    session.run("python", *RUN_2_RANKS, str(smoke), "train")


@nox.session(requires=["third_party"], venv_params=["--without-pip"], reuse_venv=False)
def plugin(session: nox.Session) -> None:
    """Install the wheels of the core and of the example of a backend from outside; then hold it to
    the contract, and train with it by name."""
    prepare(session)
    directory = Path(session.create_tmp())
    for package in (CORE, SOCKETS):
        options = ("--wheel", "--no-isolation", "--outdir", str(directory / "wheels"))
        session.run("python", "-m", "build", *options, package)
    wheels = ("--no-index", "--find-links", str(directory / "wheels"))
    session.install(*wheels, "polyshard[testing]", "polyshard-sockets")
    session.chdir(directory)  # So that nothing is imported from the sources.
    session.run("polyshard", "backends", "--device-type", "cpu")
    # All of the contract once, on the ranks that see most; the package's own tests ask the same
    # questions again, so of them it suffices to see that they run.
    session.run("python", "-m", "polyshard.testing", "--backend", "sockets", "--world-size", "4")
    tests = ("-c", f"{ROOT}/pyproject.toml", f"{ROOT}/{SOCKETS}/tests", "-k", "zero3")
    session.run("python", "-m", "pytest", *tests)
    options = ("--backend", "sockets", "--steps", "3", "--no-compare")
    session.run("python", *RUN_2_RANKS, f"{ROOT}/examples/train_gpt.py", *options)


def prepare(session: nox.Session, *packages: str) -> None:
    """Lay the session's environment over third_party's and put ``packages`` into it, editable."""
    location = Path(session.virtualenv.location)
    (own,) = location.glob("lib/python*/site-packages")
    (theirs,) = location.parent.glob("third_party/lib/python*/site-packages")
    (own / "third_party.pth").write_text(f"{theirs}\n")
    # Whatever pip a test starts keeps to the same versions.
    session.env["PIP_CONSTRAINT"] = session.env["PIP_BUILD_CONSTRAINT"] = CONSTRAINTS.as_uri()
    # Ranks share the cores: one thread each.
    session.env["OMP_NUM_THREADS"] = "1"
    if packages:
        editable = [argument for package in packages for argument in ("-e", package)]
        # No index: their requirements must be met by each other and by third_party.
        install_once(session, "--no-index", "--no-build-isolation", *editable)


def install_once(session: nox.Session, *arguments: str) -> None:
    """pip install, unless the environment had just that and what it depends on is unchanged."""
    declared = [CONSTRAINTS, *(ROOT / package / "pyproject.toml" for package in PACKAGES)]
    wanted = "\n".join([*arguments, *(path.read_text() for path in declared)])
    installed = Path(session.virtualenv.location) / "installed"
    if installed.exists() and installed.read_text() == wanted:
        return
    session.install(*arguments)
    installed.write_text(wanted)


def test(session: nox.Session, *directories: str) -> None:
    """Run pytest on ``directories``, or on the session's part of the paths among its arguments."""
    paths = [a for a in session.posargs if Path(a.partition("::")[0]).exists()]
    options = [a for a in session.posargs if a not in paths]
    # The core's tests belong to the session `core` and all others to the rest.
    own = [
        path
        for path in paths
        if (session.name == "core") == Path(path).resolve().is_relative_to(ROOT / CORE)
    ]
    if paths and not own:
        session.log("None of the paths given is this session's.")
        return
    # Options such as -k may select none of these tests, which is pytest's exit code 5.
    success_codes = [0, 5] if options else [0]
    session.run(
        "python", "-m", "pytest", *options, *(own or directories), success_codes=success_codes
    )
