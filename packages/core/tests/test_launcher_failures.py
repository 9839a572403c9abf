"""Ranks that raise, hang or die: how that is reported, and that no process is left behind."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyshard.testing import RankFailure, RankOutcome, RankReport, World, run_ranks
from polyshard.testing import world as world_module
from polyshard.testing.zygote import shared_zygote

linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="threads and open files of another process are listed in /proc, which only Linux has",
)


# ---- bodies: what ranks run ----


def pid_of(rank: int) -> int:
    return os.getpid()


def meet(rank: int) -> int:
    dist.barrier()
    return rank


def say_and_raise(rank: int, failing: int) -> None:
    print(f"rank {rank} was here")
    if rank == failing:
        raise ValueError("the weights are gone")
    dist.barrier()


def raise_everywhere(rank: int) -> None:
    raise LookupError(f"nothing at {rank}")


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def raise_unpicklable(rank: int) -> None:
    raise Unpicklable("told as text")


def return_unpicklable(rank: int) -> Any:
    return lambda: rank


def load_here_only() -> None:
    raise RuntimeError("only a worker can load this")


class LoadsNowhere:
    def __reduce__(self) -> Any:
        return load_here_only, ()


def return_unloadable(rank: int) -> Any:
    return LoadsNowhere()


def leave(rank: int) -> None:
    sys.exit("enough")


def wait_for_rank_0(rank: int) -> None:
    if rank == 0:
        sleep_long()
    dist.barrier()


def sleep_long() -> None:
    time.sleep(600)


def end_rank(rank: int, ending: int, how: str) -> None:
    if rank == ending:
        if how == "exit":
            os._exit(3)
        if how == "crash":
            crash()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def issue_unmatched_collective(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def start_child_and_fail(rank: int, note: str, how: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(note).write_text(str(child.pid))
    if how == "exit":
        os._exit(3)
    raise RuntimeError("failed")


def open_shared_memory(rank: int) -> list[str]:
    links = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            links.append(os.readlink(entry.path))
        except FileNotFoundError:
            continue  # that of the scan itself
    return [link for link in links if link.startswith("/dev/shm")]


# ---- helpers ----


def runs(pid: int) -> bool:
    """Whether a process, or any thread of it, runs; one that was only not reaped yet does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    only_not_reaped = state.stdout.startswith("Z") and "l" not in state.stdout
    return state.returncode == 0 and not only_not_reaped


def wait_for(condition: Any) -> None:
    """Return once ``condition()`` holds; fail where it still does not after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def wait_until_gone(pids: list[int]) -> None:
    wait_for(lambda: not any(runs(pid) for pid in pids))


# ---- reports ----


def test_failing_rank_is_reported_first() -> None:
    """The report opens with the rank that raised; those that waited for it come after."""
    pids = run_ranks(4, pid_of)
    with pytest.raises(RankFailure) as caught:
        run_ranks(4, say_and_raise, 2)
    failure = caught.value
    cause, *others = failure.reports
    assert (cause.rank, cause.outcome) == (2, RankOutcome.RAISED)
    assert cause.traceback.endswith("ValueError: the weights are gone\n")
    assert "in say_and_raise" in cause.traceback
    assert "worker.py" not in cause.traceback
    assert cause.output == "rank 2 was here\n"
    assert {report.rank for report in others} == {0, 1, 3}
    assert {report.outcome for report in others} == {RankOutcome.STUCK}
    for report in others:
        assert "in say_and_raise" in report.stack
        assert report.output == f"rank {report.rank} was here\n"
    headline, first, *_ = str(failure).splitlines()
    assert headline == (
        f"rank 2 of 4 failed first in {__name__}.say_and_raise: "
        "raised ValueError: the weights are gone"
    )
    assert first == "  rank 2: raised ValueError: the weights are gone"
    assert set(run_ranks(4, pid_of)).isdisjoint(pids)


def test_all_ranks_raise() -> None:
    """Every rank's traceback is in the report, and the next call has a new world."""
    pids = run_ranks(2, pid_of)
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, raise_everywhere)
    assert {report.outcome for report in caught.value.reports} == {RankOutcome.RAISED}
    assert "LookupError: nothing at 0" in str(caught.value)
    assert "LookupError: nothing at 1" in str(caught.value)
    assert set(run_ranks(2, pid_of)).isdisjoint(pids)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (raise_unpicklable, "Unpicklable: told as text"),
        (return_unpicklable, "returned a function, which cannot be pickled"),
        (leave, "SystemExit: enough"),
    ],
)
def test_any_failure_can_be_told(body: Any, told: str) -> None:
    """Exceptions and results that cannot travel, and exits, are reported like other failures."""
    with pytest.raises(RankFailure, match=told):
        run_ranks(1, body)


def test_result_that_only_workers_can_load() -> None:
    """A result that cannot be loaded here is an error that names its rank; the world stays."""
    pids = run_ranks(1, pid_of)
    with pytest.raises(RuntimeError, match=r"rank 0 returned .* cannot load: RuntimeError: only"):
        run_ranks(1, return_unloadable)
    assert run_ranks(1, pid_of) == pids


def test_timeout_shows_where_ranks_hang() -> None:
    """A hung world ends at the timeout with every rank's Python stack."""
    run_ranks(2, pid_of)
    with pytest.raises(RankFailure, match=r"2 of 2 ranks did not return from .*: 0, 1") as caught:
        run_ranks(2, wait_for_rank_0, timeout=1.0)
    stacks = {report.rank: report.stack for report in caught.value.reports}
    assert "in sleep_long" in stacks[0]
    assert "in wait_for_rank_0" in stacks[0]
    assert "in barrier" in stacks[1]
    assert "worker.py" not in stacks[0]
    assert run_ranks(2, meet) == [0, 1]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kill", "was killed by SIGKILL"),
        ("exit", "exited with code 3"),
        ("crash", "was killed by SIGSEGV"),
    ],
)
def test_rank_that_dies(how: str, told: str) -> None:
    """A rank that dies is named with its exit, ahead of the errors it causes in others."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, end_rank, 1, how)
    cause, other = caught.value.reports
    assert (cause.rank, cause.outcome, cause.summary) == (1, RankOutcome.DIED, told)
    assert other.outcome in (RankOutcome.RAISED, RankOutcome.STUCK)
    assert ("in crash" in cause.stack) == (how == "crash")
    assert run_ranks(2, meet) == [0, 1]


def test_rank_that_dies_between_calls() -> None:
    """A world that lost a rank while idle is replaced."""
    pids = run_ranks(2, pid_of)
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(pids[1:])
    assert set(run_ranks(2, pid_of)).isdisjoint(pids)


def test_ranks_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that only some ranks issued fails the call that left it behind."""
    run_ranks(2, pid_of)
    monkeypatch.setattr(world_module, "_SETTLE_TIMEOUT", 1.0)
    with pytest.raises(RankFailure, match=r"barrier after .*issue_unmatched_collective: 0, 1"):
        run_ranks(2, issue_unmatched_collective)


def test_failure_survives_pickling() -> None:
    """A report reads the same after a trip between processes, as under parallel test runners."""
    failure = RankFailure("somewhere", [RankReport(0, RankOutcome.DIED, "exited", 1.0)])
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)


# ---- processes ----


def test_world_ends_with_its_context() -> None:
    """A world of one's own starts once and its processes are gone afterwards."""
    with World(2) as world:
        pids = world.pids
        assert world.run(pid_of) == pids
        world.start()
        assert world.pids == pids
    assert world.pids == []
    assert not any(runs(pid) for pid in pids)


@linux_only
def test_forks_are_safe() -> None:
    """The process that forks ranks has one thread, so no lock can be held in a fork of it."""
    run_ranks(2, pid_of)
    assert len(os.listdir(f"/proc/{shared_zygote().pid}/task")) == 1


def test_zygote_that_dies() -> None:
    """Workers do not outlive the process that forked them, and the next call starts another."""
    pids = run_ranks(2, pid_of)
    os.kill(shared_zygote().pid, signal.SIGKILL)
    wait_until_gone(pids)
    assert set(run_ranks(2, pid_of)).isdisjoint(pids)


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_children_of_a_failed_rank_end_with_it(tmp_path: Path, how: str) -> None:
    """What a body started does not outlive its rank, whether that is ended or dies."""
    note = tmp_path / "child"
    with pytest.raises(RankFailure):
        run_ranks(1, start_child_and_fail, str(note), how)
    wait_until_gone([int(note.read_text())])


@linux_only
def test_no_shared_memory() -> None:
    """Workers hold nothing in /dev/shm that a killed run could leave there."""
    assert run_ranks(2, open_shared_memory) == [[], []]


_BODIES = """
import os, time
from pathlib import Path

def pid_of(rank):
    return os.getpid()

def hang(rank, note):
    Path(f"{note}.{rank}").touch()
    time.sleep(600)
"""

_LAUNCHING = """
import json, os, sys, time
import bodies
from polyshard.testing import run_ranks
from polyshard.testing.zygote import shared_zygote

pids = run_ranks(1, bodies.pid_of) + run_ranks(2, bodies.pid_of) + [shared_zygote().pid]
fork = os.fork()  # it inherits every end of every pipe, and outlives its parent
if fork == 0:
    time.sleep(600)
print(json.dumps([fork, *pids]), flush=True)
run_ranks(2, bodies.hang, sys.argv[1], timeout=600)
"""


def _heed_interrupts() -> None:
    """A shell starts what runs in its background with interrupts ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_launching_process(tmp_path: Path, ending: signal.Signals) -> None:
    """Killed or interrupted, it leaves no worker, idle or busy, no zygote and no file."""
    (tmp_path / "bodies.py").write_text(_BODIES)
    (tmp_path / "launching.py").write_text(_LAUNCHING)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    note = tmp_path / "busy"
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "launching.py"), str(note)],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    fork, *pids = json.loads(line)
    try:
        wait_for(lambda: all(Path(f"{note}.{rank}").exists() for rank in range(2)))
        assert all(runs(pid) for pid in [fork, *pids])
        process.send_signal(ending)
        process.wait()
        assert process.returncode == -ending
        wait_until_gone(pids)
        # torch keeps a cache of its compiler there, on purpose, from any process that imports it.
        left = [file for file in temporary.iterdir() if not file.name.startswith("torchinductor_")]
        assert left == []
    finally:
        os.kill(fork, signal.SIGKILL)
        process.kill()
        process.communicate()
