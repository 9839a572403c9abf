"""Lanes of the gloo backend: messages, threads and the end of the process.

What any backend promises is tested in test_gloo_conformance.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch

from polyshard import BackendError
from polyshard.spi import Lane
from polyshard_gloo import GlooBackend

CPU = torch.device("cpu")
# Waits that are expected to end at once; generous, because they end a test that hangs.
SOON = 30.0


@pytest.fixture
def backend() -> GlooBackend:
    return GlooBackend()


@pytest.fixture
def gather(backend: GlooBackend) -> Lane:
    return backend.lane("gather", CPU)


class Gate:
    """Work that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.leave.wait(SOON)


def fail() -> None:
    raise ValueError("broken")


class TestErrors:
    def test_of_one_backend_stay_there(self, gather: Lane) -> None:
        """Lanes of another backend object go on."""
        gather.submit(fail, label="unit")
        with pytest.raises(BackendError, match="unit"):
            gather.synchronize(SOON)
        GlooBackend().lane("gather", CPU).synchronize(SOON)

    def test_synchronize_names_what_runs(self, gather: Lane) -> None:
        """A lane that is not empty in time is an error with the label of the running work."""
        gate = Gate()
        gather.submit(gate, label="blocks.3 gather")
        assert gate.entered.wait(SOON)
        with pytest.raises(BackendError, match=r"'gather'.*'blocks\.3 gather'.*0\.01 s"):
            gather.synchronize(0.01)
        gate.leave.set()
        gather.synchronize(SOON)


class TestLifetime:
    def test_threads_start_late_and_end_with_the_backend(self) -> None:
        """A lane has a thread from its first work on, until nobody holds the lane."""
        before = set(threading.enumerate())
        backend = GlooBackend()
        lane = backend.lane("outer", CPU)
        assert lane is backend.lane("outer", torch.device("cpu", 0))
        assert set(threading.enumerate()) == before
        lane.submit(lambda: None, label="unit")
        lane.synchronize(SOON)
        (thread,) = set(threading.enumerate()) - before
        del backend, lane
        gc.collect()
        thread.join(SOON)
        assert not thread.is_alive()

    @pytest.mark.parametrize(
        "work",
        ["threading.Event().wait()", "time.sleep(0.3)", "None"],
        ids=["stuck", "busy", "idle"],
    )
    def test_the_process_can_end(self, work: str) -> None:
        """A program ends, with its own exit code and in silence, whatever its lanes do."""
        program = (
            "import threading, time, torch; from polyshard_gloo import GlooBackend\n"
            "backend = GlooBackend(); cpu = torch.device('cpu')\n"
            f"for role in ('gather', 'reduce'):\n"
            f"    backend.lane(role, cpu).submit(lambda: {work}, label='unit')\n"
            "raise SystemExit(3)"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")

    def test_a_forked_child_is_told(self) -> None:
        """A lane used in a child of fork is an error there, not a wait forever."""
        program = (
            "import os, torch; from polyshard_gloo import GlooBackend\n"
            "lane = GlooBackend().lane('gather', torch.device('cpu'))\n"
            "lane.submit(lambda: None, label='unit'); lane.synchronize(30)\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    try: lane.submit(lambda: None, label='unit')\n"
            "    except RuntimeError as error: print(error)\n"
            "else: os.waitpid(child, 0)\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == 0
        assert "unit: lane 'gather' has stopped" in ended.stdout
        assert "forked" in ended.stdout
