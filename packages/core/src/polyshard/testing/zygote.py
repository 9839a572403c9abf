"""The launching process's handle on the zygote, which forks the workers of all worlds.

Owns the messages between the two; ``forking`` is what runs at the other end. Knows no worlds.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

# Importing torch takes seconds where the processors are busy, so this only bounds a hang.
_START_TIMEOUT = 300.0
_STOP_TIMEOUT = 10.0

# A message may carry about 250 descriptors, and a rank needs three.
MAX_WORLD_SIZE = 64

# One thread each: the ranks share the machine, and a zygote with threads could not fork safely.
_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# Goes ahead of every request, and carries its descriptors.
LENGTH = struct.Struct("!Q")


def worker_environment() -> dict[str, str]:
    """This process's environment as workers see it: single-threaded, gloo on loopback."""
    environment = dict(os.environ) | _SINGLE_THREADED
    interfaces = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):
        if loopback in interfaces:
            # Otherwise gloo resolves the host's name, which fails where there is no DNS.
            environment["GLOO_SOCKET_IFNAME"] = loopback
    return environment


class ZygoteGone(RuntimeError):
    """The zygote ended, and its workers with it."""

    def __init__(self) -> None:
        super().__init__("the process that forks ranks is gone")


@dataclass(frozen=True)
class Forked:
    """Report: the workers of a world, or why there are none."""

    pids: list[int]
    error: str | None = None


@dataclass(frozen=True)
class Exit:
    """Report: a worker ended. ``code`` is its exit status, or minus the signal that killed it.

    ``moment`` is the monotonic time in seconds at which it was reaped.
    """

    pid: int
    code: int
    moment: float

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-self.code, f'signal {-self.code}')}"


class Zygote:
    """A running zygote. Raises RuntimeError with its output where it does not come up."""

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise RuntimeError(f"worlds of ranks need a POSIX system, not {sys.platform}")
        self.exits: dict[int, Exit] = {}
        self._requests, requests_there = socket.socketpair()
        self.reports, reports_there = Pipe(duplex=False)
        there = (requests_there.fileno(), reports_there.fileno())
        paths = [path for path in sys.path if isinstance(path, str)]
        program = (
            # Collecting while everything is being imported costs a fifth more.
            f"import gc, sys; gc.disable(); sys.path[:] = {paths!r}; "
            f"from {__package__}.forking import serve; serve({there[0]}, {there[1]})"
        )
        with tempfile.TemporaryFile() as output:
            with requests_there, reports_there:
                self._process = subprocess.Popen(
                    # Unbuffered: a rank that is killed should have said what it printed.
                    [sys.executable, "-u", "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=worker_environment(),
                    pass_fds=there,
                    start_new_session=True,  # Ctrl-C is for the launching process alone
                )
            try:
                came_up = self.reports.poll(_START_TIMEOUT) and self.reports.recv() == "ready"
            except EOFError:
                came_up = False
            except BaseException:
                self._process.kill()  # it has no workers yet
                self.close()
                raise
            if not came_up:
                self._process.kill()
                self.close()
                output.seek(0)
                text = output.read().decode(errors="replace").strip()
                raise RuntimeError(f"the process that forks ranks did not come up:\n{text}")

    @property
    def alive(self) -> bool:
        """Whether the zygote's process runs."""
        return self._process.returncode is None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process number of the zygote."""
        return self._process.pid

    def fork_world(self, descriptors: Sequence[tuple[int, int, int]]) -> list[int]:
        """Fork one worker per (channel, output, stacks) and return their process numbers.

        Raises RuntimeError where the machine has no room for them, or the zygote is gone.
        """
        self._send(("fork", len(descriptors)), [fd for rank in descriptors for fd in rank])
        while not isinstance(report := self._receive(), Forked):
            pass
        if report.error is not None:
            raise RuntimeError(f"cannot fork {len(descriptors)} ranks: {report.error}")
        for pid in report.pids:
            self.exits.pop(pid, None)  # that of an earlier process of this number
        return report.pids

    def signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        """Signal those of ``pids`` that still run; SIGKILL takes what they started along."""
        self._send(("signal", list(pids), number))

    def collect_exits(self) -> None:
        """Bring ``exits`` up to date. Raises ZygoteGone."""
        while self._has_report(0.0):
            self._receive()

    def kill(self, pids: Sequence[int]) -> None:
        """End ``pids``, return once they are gone and forget them."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        try:
            self.signal(pids, signal.SIGKILL)
            while any(pid not in self.exits for pid in pids):
                if not self._has_report(max(0.0, deadline - time.monotonic())):
                    raise RuntimeError(f"workers {list(pids)} did not end on SIGKILL")
                self._receive()
        except ZygoteGone:
            return
        for pid in pids:
            del self.exits[pid]

    def close(self) -> None:
        """End the zygote and all its workers. Idempotent."""
        self.disconnect()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def disconnect(self) -> None:
        """Close this process's ends; without another process that has them, the zygote ends."""
        self._requests.close()
        self.reports.close()

    def _send(self, request: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        message = pickle.dumps(request)
        try:
            socket.send_fds(self._requests, [LENGTH.pack(len(message))], descriptors)
            self._requests.sendall(message)
        except OSError as error:
            raise self._gone() from error

    def _has_report(self, timeout: float) -> bool:
        try:
            return self.reports.poll(timeout)
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> object:
        try:
            report = self.reports.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(report, Exit):
            self.exits[report.pid] = report
        return report

    def _gone(self) -> ZygoteGone:
        self.close()
        return ZygoteGone()


_shared: Zygote | None = None


def shared_zygote() -> Zygote:
    """The zygote of this process, started at the first call and whenever the last one ended."""
    global _shared
    if _shared is None or not _shared.alive:
        if _shared is not None:
            _shared.close()
        _shared = Zygote()
    return _shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


def _disown_shared() -> None:
    # A fork of the launching process that kept its ends open would keep the zygote alive.
    if _shared is not None:
        _shared.disconnect()


atexit.register(_close_shared)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_shared)
