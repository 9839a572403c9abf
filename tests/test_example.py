"""The example from a user's side: what it prints, draws and refuses, and what it leaves behind.

Starts it as users do, by torchrun, and looks at its output, files and processes only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
RANKS = 2
TIMEOUT_SECONDS = 240
MARK = "POLYSHARD_EXAMPLE_TEST"
BY_ITSELF = (sys.executable, str(SCRIPT))


def by_torchrun(*launcher_options: str, ranks: int = RANKS) -> tuple[str, ...]:
    """The words that start the example on ``ranks`` ranks."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return (*launcher, f"--nproc-per-node={ranks}", *launcher_options, str(SCRIPT))


def environment(**variables: str) -> Mapping[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}


def finish(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run to the end in ``directory``, so that what the example writes lands there."""
    return subprocess.run(
        words,
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def processes_marked(mark: str) -> set[int]:
    """Ids of all living processes, of any session, that inherited ``mark`` when they started."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            variables = (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or belongs to someone else
        if f"{MARK}={mark}".encode() in variables:
            found.add(int(directory.name))
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    """A value no other process has in its environment; what still carries it ends with the test."""
    value = uuid.uuid4().hex
    yield value
    for process in processes_marked(value):
        os.kill(process, signal.SIGKILL)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels of a PNG file."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


# The others train in the comparison.
@pytest.mark.parametrize(("strategy", "ranks"), [("torch-ddp", 2), ("hfsdp", 4)])
def test_trains_and_reports(strategy: str, ranks: int, tmp_path: Path) -> None:
    """A strategy of two axes and PyTorch's own train, print their results and a sample once, and
    draw the curve."""
    options = ("--strategy", strategy, "--steps", "3", "--no-compare")
    ended = finish(*by_torchrun(ranks=ranks), *options, directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for text in ("step    3/3", "loss at the last step", "loss on unseen files", "Code it writes"):
        assert ended.stdout.count(text) == 1, ended.stdout
    assert png_size(tmp_path / "demo-output" / "train_gpt.png") > (800, 600)


def test_compares_the_strategies(tmp_path: Path) -> None:
    """Sharding takes less memory between steps and at peak than plain DDP, as measured; every
    strategy that fits the mesh is in the table."""
    options = ("--backend", "gloo", "--mesh", "2x1", "--steps", "2", "--png", "deep/er/picture.png")
    ended = finish(*by_torchrun(), *options, directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
    rows = {
        words[0].strip(): [float(word.split()[0]) for word in words[1:]]
        for line in ended.stdout.splitlines()
        if len(words := line.strip("│ ").split("│")) == 4
    }
    plain, sharded = rows["plain DDP"], rows["zero3"]
    presets = ["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"]
    assert list(rows) == ["plain DDP", *presets], ended.stdout
    for strategy in presets[1:]:
        assert rows[strategy][0] < plain[0], ended.stdout
    assert sharded[1] < plain[1], ended.stdout
    assert min(min(row) for row in rows.values()) > 0, ended.stdout
    assert png_size(tmp_path / "deep" / "er" / "picture.png") > (1600, 600)


def test_one_rank(tmp_path: Path) -> None:
    """One rank suffices, without a launcher; nothing has to be sent then."""
    ended = finish(*BY_ITSELF, "--steps", "2", "--no-compare", directory=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "0.0 MB" in ended.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--strategy", "zero9"), "unknown strategy 'zero9'; the known ones are zero3, "),
        (("--steps", "0"), "--steps must be at least 1, got 0."),
        (("--steps", "many"), "argument --steps: invalid int value: 'many'."),
        (("--png", "curve.gif"), "--png must end in .png, got 'curve.gif'."),
        (("--mesh", "2by2"), "--mesh must be one or two sizes, such as 4 or 2x2, got '2by2'."),
        (("--mesh", "0x1"), "--mesh must be one or two sizes, such as 4 or 2x2, got '0x1'."),
        (("--mesh", "2x2"), "--mesh 2x2 is for 4 ranks, but this run has 1; give sizes "),
        (
            ("--strategy", "hsdp", "--mesh", "1"),
            "hsdp needs a mesh of two axes, such as 2x2, got --mesh 1.",
        ),
    ],
)
def test_a_wrong_option_is_one_sentence(
    options: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    """A wrong option ends with exit code 2 and one line that says what was expected."""
    ended = finish(*BY_ITSELF, *options, directory=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith(f"train_gpt.py: {complaint}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [("--strategy", "zero9"), ("--backend", "pigeon")])
def test_a_wrong_option_is_said_once(options: tuple[str, str], tmp_path: Path) -> None:
    """Under torchrun one rank says what is wrong, and no rank adds a traceback."""
    # The launcher reports failed ranks at length itself; the ranks' own words go to files.
    logs = tmp_path / "logs"
    start = by_torchrun("--redirects", "3", "--log-dir", str(logs))
    ended = finish(*start, *options, directory=tmp_path)
    assert ended.returncode != 0
    said = [path.read_text() for path in logs.rglob("std*.log")]
    assert len(said) == 2 * RANKS
    lines = "".join(said).splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"train_gpt.py: unknown {options[0].strip('-')} {options[1]!r}; ")


def heed_interrupts() -> None:
    """A shell starts what runs in its background with interrupts ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(),
    reason="the processes that a demo left are found by their environment in /proc, as on Linux",
)
@pytest.mark.parametrize(
    ("options", "first_sign", "processes"),
    [
        # The launcher and its ranks; while measuring, two processes beside each rank.
        (("--steps", "100000", "--no-compare"), "step    1/", 1 + RANKS),
        (("--steps", "1"), "measured the cost of torch-ddp", 1 + 3 * RANKS),
    ],
    ids=["training", "measuring"],
)
def test_interrupting_leaves_no_process(
    options: tuple[str, ...], first_sign: str, processes: int, mark: str, tmp_path: Path
) -> None:
    """Ctrl-C at any time ends the launcher, all ranks and what they started, without tracebacks."""
    logs = tmp_path / "logs"
    start = by_torchrun("--tee", "3", "--log-dir", str(logs))
    with subprocess.Popen(
        (*start, *options),
        cwd=tmp_path,
        env=environment(**{MARK: mark}),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
        preexec_fn=heed_interrupts,
    ) as launcher:
        assert launcher.stdout is not None
        assert any(first_sign in line for line in launcher.stdout), "it ended before its first sign"
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(processes_marked(mark)) < processes and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes_marked(mark)) >= processes
        # A terminal signals its foreground process group, which is the launcher's.
        os.killpg(launcher.pid, signal.SIGINT)
        launcher.stdout.read()
        assert launcher.wait(TIMEOUT_SECONDS) != 0
    assert processes_marked(mark) == set()
    said = "".join(path.read_text() for path in logs.rglob("std*.log"))
    assert first_sign in said
    assert "Traceback" not in said
