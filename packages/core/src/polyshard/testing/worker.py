"""What one rank of a warm world does: join the process group, then run the bodies it is sent.

Owns the state that a body finds. Knows no other rank and no policy: when the channel to the
launcher or the zygote's lifeline closes it exits, and a body that raised is only reported.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# How long a collective waits for a rank that never joins it.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)

SEED = 0

_MANY_DESCRIPTORS = 512


@dataclass(frozen=True)
class RankSetup:
    """What a worker is born with. The integers are file descriptors it alone owns.

    ``listener`` is the socket that the process group's store listens on, at rank 0 only: it is
    bound before anyone looks for it, so no port is ever guessed.
    """

    rank: int
    world_size: int
    channel: int
    output: int
    stacks: int
    lifeline: int
    store_port: int
    listener: int | None


@dataclass(frozen=True)
class Surroundings:
    """What a body finds around it: the launching process's, as they are when it calls.

    ``home_name`` and ``home_file`` are those of the module that the body is defined in.
    """

    import_paths: list[str]
    directory: str
    environment: dict[str, str]
    home_name: str
    home_file: str | None


@dataclass(frozen=True)
class Returned:
    """Answer to a body; the pickled result follows as a frame of its own."""


@dataclass(frozen=True)
class Raised:
    """Answer to a body, or to being started. Text only: any exception can be told in text."""

    moment: float
    summary: str
    traceback: str


@dataclass(frozen=True)
class Settled:
    """Answer to SETTLE; ``spent`` says why this world should not run another body, or is None."""

    spent: str | None


# Sent to a worker instead of Surroundings, once a body has returned on every rank.
SETTLE = "settle"


def serve(setup: RankSetup) -> NoReturn:
    """Be rank ``setup.rank`` until the launcher or the zygote goes away."""
    channel = Connection(setup.channel)
    _redirect_output(setup.output)
    _report_stacks(setup.stacks)
    _exit_with(setup.lifeline)
    try:
        _join_process_group(setup)
    except BaseException as error:
        _answer(channel, _raised(error))
    else:
        _answer(channel, Returned())
    home_group = dist.group.WORLD
    while True:
        try:
            request = pickle.loads(channel.recv_bytes())
            payload = b"" if request == SETTLE else channel.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        if request == SETTLE:
            _answer(channel, Settled(_settle(home_group)))
        else:
            _perform(channel, request, setup.rank, payload)


def _perform(channel: Connection, around: Surroundings, rank: int, payload: bytes) -> None:
    """Run one body and send its result, or what it raised."""
    try:
        with warnings.catch_warnings():  # the body's filters end with it
            _restore_state(around)
            _import_home(around.home_name, around.home_file)
            body, args, kwargs = pickle.loads(payload)
            result = body(rank, *args, **kwargs)
        try:
            answer = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(
                f"the body returned a {type(result).__name__}, which cannot be pickled: return "
                "plain values or tensors"
            ) from error
    except BaseException as error:
        _answer(channel, _raised(error))
    else:
        _answer(channel, Returned(), answer)


def _restore_state(around: Surroundings) -> None:
    """Undo what earlier bodies changed in this process, and seed every generator alike."""
    sys.path[:] = around.import_paths
    os.chdir(around.directory)
    os.environ.clear()
    os.environ.update(around.environment)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(SEED)
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def _import_home(name: str, file: str | None) -> None:
    """Import the body's module from the very file that the launching process has it from.

    The name alone is not enough: pytest's importlib mode loads test modules from outside
    sys.path, and its prepend mode changes which of two equally named files a name means.
    """
    module = sys.modules.get(name)
    if module is None:
        importlib.invalidate_caches()
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing_itself = error.name is not None and f"{name}.".startswith(f"{error.name}.")
            if file is None or not missing_itself:
                raise
    loaded_from = getattr(module, "__file__", None)
    if file is None or (loaded_from is not None and os.path.samefile(loaded_from, file)):
        return
    for end in (place for place, letter in enumerate(name) if letter == "."):
        _import_or_stand_in(name[:end])
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import module {name!r} from {file}", name=name, path=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _import_or_stand_in(package: str) -> None:
    """Import a package, or have an empty one where there is none: pickle asks for the parents."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        sys.modules[package] = types.ModuleType(package)


def _settle(home_group: dist.ProcessGroup | None) -> str | None:
    """Drop what the body left behind; the reason why no other body should run here, or None."""
    if not dist.is_initialized() or dist.group.WORLD is not home_group:
        return "the body replaced the process group"
    gc.collect()
    try:
        # Every rank's body has returned, so all must be at the same point. One that issued a
        # collective which others did not hangs here and now, not in an innocent later test.
        dist.barrier()
    except Exception as error:
        return f"the process group is broken: {error}"
    # Sub-groups are never destroyed, because DTensor's caches may still name them. Each holds
    # sockets and threads: leave before a body runs out of them.
    if len(os.listdir("/dev/fd")) > min(_MANY_DESCRIPTORS, os.sysconf("SC_OPEN_MAX") // 2):
        return "too many open file descriptors"
    return None


def _join_process_group(setup: RankSetup) -> None:
    """Make the gloo process group of the world, through a store on the loopback interface."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        setup.store_port,
        setup.world_size,
        is_master=setup.listener is not None,
        master_listen_fd=setup.listener,
        wait_for_workers=False,
        timeout=COLLECTIVE_TIMEOUT,
    )
    dist.init_process_group(
        "gloo",
        store=store,
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _redirect_output(output: int) -> None:
    """Send everything printed, by Python and by libraries, to this rank's own file."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(output, descriptor)


def _report_stacks(stacks: int) -> None:
    """Write every thread's stack to ``stacks`` on a crash, and on SIGUSR1, even inside C code."""
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=False)


def _exit_with(lifeline: int) -> None:
    """End this process when the other end of ``lifeline`` closes, whatever a body is doing."""

    def watch() -> None:
        os.read(lifeline, 1)  # nothing is ever written: it returns at end of file
        os._exit(0)

    threading.Thread(target=watch, name="polyshard-lifeline", daemon=True).start()


def _answer(channel: Connection, message: object, payload: bytes | None = None) -> None:
    try:
        channel.send_bytes(pickle.dumps(message))
        if payload is not None:
            channel.send_bytes(payload)
    except OSError:  # the launcher is gone
        os._exit(0)


def _raised(error: BaseException) -> Raised:
    moment = time.monotonic()
    tracebacks: Any = error.__traceback__
    own_frames_left_out = tracebacks.tb_next or tracebacks
    text = "".join(traceback.format_exception(type(error), error, own_frames_left_out))
    summary = traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]
    return Raised(moment, summary, text)
