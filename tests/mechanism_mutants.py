"""Puts tests to cores that each lack one of their mechanisms.

Run as a script, this tries every mutant in a process of its own, and prints an :class:`Outcome` as
a line of JSON for each. An argument chooses those whose mechanism contains it; ``--sound`` puts the
tests of all to the core as it is.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
CORE_TESTS = ROOT / "packages/core/tests"
sys.path.insert(0, str(CORE_TESTS))

import mutated_core  # noqa: E402
import pytest  # noqa: E402
from mechanism import FOLDERS, Mutant  # noqa: E402
from mechanisms_at_rest import AT_REST  # noqa: E402
from mechanisms_of_passes import OF_PASSES  # noqa: E402
from mutated_core import SOURCE as SOURCE  # noqa: E402

MUTANTS = [*OF_PASSES, *AT_REST]
#: Seconds after which a rank that waits for another gives up, and after which any rank ends.
PATIENCE, LIFETIME = 5, 50
#: Tests that one process puts to a sound core.
AT_ONCE = 12


def batched(tests: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """The tests, so many at a time."""
    for start in range(0, len(tests), size):
        yield tests[start : start + size]


@dataclass(frozen=True)
class Trial:
    """The core as a mutant has it, and the tests to put it to.

    Args:
        file: of the core, that is other than it was.
        source: what is in it.
        tests: as pytest is given them.
    """

    mechanism: str
    file: str
    source: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """Dotted name."""
        return f"polyshard.{self.file.removesuffix('.py')}"


@dataclass(frozen=True)
class Outcome:
    """What became of a trial: the first test that failed, in which of its phases, and the start of
    its error; all empty where none did."""

    mechanism: str
    file: str
    test: str = ""
    when: str = ""
    error: str = ""


def trial(mutant: Mutant, tests: Sequence[str] = ()) -> Trial:
    """What is to be tried of a mutant.

    Raises:
        ValueError: what the mutant replaces is not in the source, or more than once.
    """
    text = (SOURCE / mutant.file).read_text()
    found = text.count(mutant.before)
    if found != 1:
        raise ValueError(
            f"mutant {mutant.mechanism!r}: {mutant.file} has {mutant.before!r} {found} times, not "
            "once; change the list as the source was changed."
        )
    source = text.replace(mutant.before, mutant.after)
    return Trial(mutant.mechanism, mutant.file, source, tuple(tests) or (mutant.test,))


def sound(tests: Sequence[str]) -> Trial:
    """The core as it is."""
    file = MUTANTS[0].file
    return Trial("none", file, (SOURCE / file).read_text(), tuple(tests))


def try_all(trials: Sequence[Trial]) -> Iterator[Outcome]:
    """The outcome of each, as they end."""
    for done, told in mutated_core.try_all(trials, _check):
        # What was raised is told in one line, the type first; what died by itself has no test.
        parts = told.partition("Failed: ")[2].split(SEPARATOR, 2)
        parts = parts if len(parts) == 3 else ["", "", told]
        yield Outcome(done.mechanism, done.file, *parts)


SEPARATOR = " | "


class Failed(BaseException):
    """The first test that failed."""

    def __init__(self, test: str, when: str, error: str) -> None:
        super().__init__(SEPARATOR.join((test, when, error)))


class _First:
    """Notes the first failure of a pytest run."""

    def __init__(self) -> None:
        self.failed: Failed | None = None

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        when = getattr(report, "when", "collect")
        self.failed = self.failed or Failed(node.nodeid, when, call.excinfo.exconly())


def _check(trial: Trial) -> None:
    import polyshard.testing

    polyshard.testing.run_ranks = run_forked
    os.chdir(ROOT)
    first = _First()
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    code = pytest.main([*options, *trial.tests], plugins=[first])
    if first.failed is not None:
        raise first.failed
    if code != pytest.ExitCode.OK:
        raise Failed("pytest", "start", f"it ended with {code!r}")


# -- ranks, without starting an interpreter that would import torch again -----------------------


class RankError(Exception):
    """A rank raised."""


def run_forked(
    world_size: int, body: Callable[..., Any], /, *args: Any, timeout: float = 0, **kwargs: Any
) -> list[Any]:
    """As ``polyshard.testing.run_ranks``, on forks of this process: they have its core."""
    with tempfile.TemporaryDirectory() as folder:
        here, pids = [], []
        for rank in range(world_size):
            reader, writer = Pipe(duplex=False)
            pid = os.fork()
            if not pid:
                _be_rank(rank, world_size, folder, writer, lambda r: body(r, *args, **kwargs))
            writer.close()
            here.append(reader)
            pids.append(pid)
        try:
            return _answers(here)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)  # not reaped yet: the number is still its own
                os.waitpid(pid, 0)


def _answers(readers: Sequence[Connection]) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(readers):
        waiting = [each for rank, each in enumerate(readers) if rank not in answers]
        for reader in wait(waiting):
            rank = readers.index(reader)
            try:
                error, answers[rank] = pickle.loads(readers[rank].recv_bytes())
            except EOFError:
                error = "died"
            if error:
                raise RankError(f"rank {rank} {error}")
    return [answers[rank] for rank in range(len(readers))]


def _be_rank(
    rank: int, world_size: int, folder: str, writer: Connection, body: Callable[[int], Any]
) -> NoReturn:
    import numpy
    import torch
    import torch.distributed as dist

    from polyshard.testing.zygote import worker_environment

    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not the handler of a test's own time limit
    signal.alarm(LIFETIME)
    try:
        os.environ.update(worker_environment(), POLYSHARD_GLOO_TIMEOUT=str(PATIENCE))
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=timedelta(seconds=PATIENCE),
        )
        answer = pickle.dumps(("", body(rank)))
    except BaseException as error:
        answer = pickle.dumps((f"raised {type(error).__name__}: {error}", None))
    writer.send_bytes(answer)
    # Whoever still gathers from this rank is not to find it gone.
    signal.pause()
    os._exit(0)


def prepare() -> None:
    """Import, before forking, what all tests need and what does not import the core."""
    mutated_core.prepare()
    late = "checkpoint", "fsdp", "tensor.parallel"
    for name in ("numpy", "hypothesis", *(f"torch.distributed.{each}" for each in late)):
        importlib.import_module(name)


def main() -> None:
    """Try all mutants, or those that the argument says."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if wanted == "--sound":
        tests = sorted({mutant.test for mutant in MUTANTS})
        trials = [
            sound(few)
            for folder in FOLDERS.values()
            for few in batched([test for test in tests if test.startswith(folder)], AT_ONCE)
        ]
    else:
        trials = [trial(mutant) for mutant in MUTANTS if wanted in mutant.mechanism]
    prepare()
    for outcome in try_all(trials):
        print(json.dumps(vars(outcome)), flush=True)


if __name__ == "__main__":
    main()
