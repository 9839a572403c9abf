"""The zygote's own process: it imports torch once, then forks, signals and reaps workers.

It runs no torch code and no thread, which is what makes forking after the import safe. It alone
signals workers, because it alone reaps them: no signal can reach a process number that was given
away again. It ends, and the workers with it, when the launching process goes away, however that
ends. Knows nothing of what workers do.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from .zygote import LENGTH, MAX_WORLD_SIZE, Exit, Forked


def serve(requests_descriptor: int, reports_descriptor: int) -> NoReturn:
    """Be the zygote, until the launching process closes its end of the requests."""
    requests = socket.socket(fileno=requests_descriptor)
    reports = Connection(reports_descriptor, readable=False)
    for descriptor in (requests_descriptor, reports_descriptor):
        os.set_inheritable(descriptor, False)
    _import_torch()
    # Objects that exist now are never garbage: collections in workers skip them, and do not
    # touch, hence copy, the pages they share.
    gc.collect()
    gc.freeze()
    gc.enable()
    children: set[int] = set()
    try:
        _serve_requests(requests, reports, children)
    except OSError:
        pass  # the launching process is gone
    finally:
        for pid in children:
            _signal_worker(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
    os._exit(0)


def _serve_requests(requests: socket.socket, reports: Connection, children: set[int]) -> None:
    child_ended, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    # Workers hold the reading end only, so that it closes when this process ends.
    lifeline, lifeline_there = os.pipe()
    ours = [requests.fileno(), reports.fileno(), child_ended, wake_up, lifeline_there]
    reports.send("ready")
    while True:
        ready = wait([requests, child_ended])
        if child_ended in ready:
            os.read(child_ended, 4096)
            for ended in _reap():
                children.discard(ended.pid)
                reports.send(ended)
        if requests in ready:
            request, descriptors = _receive_request(requests)
            if request is None:
                return
            if request[0] == "fork":
                forked = _fork_workers(request[1], descriptors, lifeline, ours, children)
                reports.send(forked)
            else:
                _, pids, number = request
                for pid in children.intersection(pids):
                    _signal_worker(pid, number)


def _import_torch() -> None:
    """Import what bodies need, and what those import late, so that it happens only once."""
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.tensor

    # The first optimizer of a process, and likewise its first distributed tensor, makes torch
    # import its compiler: nearly as much again as torch itself.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def _receive_request(requests: socket.socket) -> tuple[tuple[Any, ...] | None, list[int]]:
    """The next request and its descriptors, or None at the end."""
    head, descriptors, _, _ = socket.recv_fds(requests, LENGTH.size, 4 * MAX_WORLD_SIZE)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not head:
        return None, []
    (length,) = LENGTH.unpack(head)
    message = b""
    while len(message) < length:
        piece = requests.recv(length - len(message))
        if not piece:
            return None, []
        message += piece
    return pickle.loads(message), list(descriptors)


def _fork_workers(
    world_size: int,
    descriptors: Sequence[int],
    lifeline: int,
    ours: Sequence[int],
    children: set[int],
) -> Forked:
    pids: list[int] = []
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=world_size) as listener:
            for rank in range(world_size):
                pid = os.fork()
                if pid == 0:
                    _become_worker(rank, world_size, descriptors, lifeline, ours, listener)
                pids.append(pid)
                children.add(pid)
    except OSError as error:
        for pid in pids:
            _signal_worker(pid, signal.SIGKILL)
        return Forked([], str(error))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return Forked(pids)


def _become_worker(
    rank: int,
    world_size: int,
    descriptors: Sequence[int],
    lifeline: int,
    ours: Sequence[int],
    listener: socket.socket,
) -> NoReturn:
    """In the child of a fork: let go of everything that is not this rank's, and serve."""
    try:
        # A process group of its own, so that what a body starts can be killed with it.
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # An end left open here would hide from the launcher that its owner died.
        mine = descriptors[3 * rank : 3 * rank + 3]
        for descriptor in {*descriptors, *ours} - {*mine}:
            os.close(descriptor)
        port = listener.getsockname()[1]
        store_listener = listener.detach()
        if rank != 0:
            os.close(store_listener)
        from . import worker

        worker.serve(
            worker.RankSetup(
                rank=rank,
                world_size=world_size,
                channel=mine[0],
                output=mine[1],
                stacks=mine[2],
                lifeline=lifeline,
                store_port=port,
                listener=store_listener if rank == 0 else None,
            )
        )
    except BaseException:
        traceback.print_exc()  # into the rank's output: the launcher reports it with the exit
    finally:
        os._exit(70)


def _reap() -> list[Exit]:
    """The workers that ended since the last call; what they had started ends with them."""
    ended: list[Exit] = []
    while True:
        try:
            wanted = -1
            if hasattr(os, "waitid"):  # macOS has it from Python 3.13
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    return ended
                # Before it is reaped: until then the number, also its group's, is surely its own.
                wanted = found.si_pid
                _signal_worker(wanted, signal.SIGKILL)
            pid, status = os.waitpid(wanted, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(Exit(pid, os.waitstatus_to_exitcode(status), time.monotonic()))


def _signal_worker(pid: int, number: int) -> None:
    """Signal a worker that has not been reaped, hence still owns its number."""
    if number == signal.SIGKILL:
        try:
            os.killpg(pid, number)
            return
        except OSError:
            pass  # it has no group yet, or ended already
    os.kill(pid, number)
