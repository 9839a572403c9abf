"""What a core whose scheduling lacks something must fail: the checks that mutants of it are put to.

Importable without pytest and without any backend.
"""

from __future__ import annotations

import copy
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from race_programs import AXES, STRATEGIES, Net, Program, batch, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard import Placements, fully_shard
from polyshard.spi import Role
from polyshard.testing.race import Policy, RaceBackend

MeshFor = Callable[[str], DeviceMesh]
WHOLE = (0, 1, 2)
TWO = ((WHOLE, WHOLE), (WHOLE, (0, 0, 1, 2)))

PROGRAMS = [
    ("zero3", Program(TWO)),
    ("hfsdp", Program(TWO, half=True)),
    ("zero3 over two axes", Program(TWO, swap=True, inspect=True)),
    ("zero1", Program(TWO, half=True, swap=True, evaluate=True)),
    ("zero3", Program(TWO, half=True, persistent=True, prefetch=2, clip=True)),
    ("sliced", Program(TWO, keep_zeros=True, half=True)),
    ("zero3", Program((((0, 1), (2, 1)), ((0,), WHOLE)), reshard=False, evaluate=True, nudge=True)),
    ("zero3", Program((((2, 1, 0),), (WHOLE,)), reshard=False, around="reentrant", scoped=False)),
    ("hsdp", Program(TWO, recompute="plain", scoped=False, backwards=("together",))),
    ("zero2", Program(TWO, backwards=("apart", "together"))),
    ("zero3", Program(TWO, backwards=("together",), reshard=False, nudge=True)),
    ("zero3", Program(((WHOLE,), ((0, 2),)))),
    ("zero3", Program((((), ()), ((), ())), backwards=("apart", "together"))),
    ("zero3", Program(TWO, around="plain", recompute="reentrant", prefetch=0)),
]
FOR_TWO_RANKS = [
    ("zero3", Program(TWO)),
    ("hsdp", Program(TWO, half=True)),
    ("sliced", Program(TWO, keep_zeros=True)),
]


@contextmanager
def one_rank() -> Iterator[MeshFor]:
    """A world of this process alone; gives the mesh for a strategy."""
    with _world(dist.HashStore(), 0, 1, (1, 1)) as mesh:
        yield mesh


@contextmanager
def _world(store: dist.Store, rank: int, size: int, shape: tuple[int, int]) -> Iterator[MeshFor]:
    patience = timedelta(seconds=10)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=patience)
    meshes = {
        1: init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)),
        2: init_device_mesh("cpu", shape, mesh_dim_names=AXES),
    }
    try:
        yield lambda strategy: meshes[len(STRATEGIES[strategy].dp_axes)]
    finally:
        dist.destroy_process_group()


def checks(mesh: MeshFor) -> Iterator[Callable[[], object]]:
    """Those of one rank, quickest and most deadly first."""
    for strategy, program in PROGRAMS:
        yield partial(run, program, strategy, Policy.EARLY, mesh=mesh(strategy))
    yield partial(little_is_held, mesh("zero3"))
    yield partial(failures_leave_nothing, mesh("zero3"))
    yield partial(nothing_old_is_trusted, mesh("zero3"))
    yield partial(packed_again_in_flight, mesh("zero3"))
    for strategy, program in PROGRAMS:
        yield partial(run, program, strategy, Policy.LATE, mesh=mesh(strategy))


def run_on_two_ranks() -> None:
    """What needs a peer: whole runs on this process and one that is forked for it."""
    on_two_ranks(_runs)


def _runs(mesh: MeshFor) -> None:
    for strategy, program in FOR_TWO_RANKS:
        run(program, strategy, Policy.EARLY, mesh=mesh(strategy), timeout=5.0)


def on_two_ranks(body: Callable[[MeshFor], object]) -> None:
    """Run ``body`` on this process, as rank 0, and on one that is forked for it, as rank 1."""
    with tempfile.TemporaryDirectory() as folder:
        peer = os.fork()
        try:
            with _world(dist.FileStore(f"{folder}/store", 2), int(not peer), 2, (2, 1)) as mesh:
                body(mesh)
            status = os.waitpid(peer, 0)[1] if peer else 0
        except BaseException:
            if peer:
                os.kill(peer, signal.SIGKILL)
                os.waitpid(peer, 0)
                raise
            traceback.print_exc()
            os._exit(1)
        if not peer:
            os._exit(0)
    if status:
        raise RuntimeError("the peer failed")


def little_is_held(mesh: DeviceMesh) -> None:
    """With one unit of prefetch, two and the root are gathered; two reduce inputs are in use."""
    backend = run(Program(TWO), "zero3", Policy.EARLY, mesh=mesh)
    root, block = 17, 20
    gathered = backend.peak[frozenset({Role.GATHER_OUTPUT})]
    packed = backend.peak[frozenset({Role.REDUCE_INPUT})]
    assert gathered <= root + 2 * block, f"{gathered} elements were gathered at a time"
    assert packed <= 2 * block, f"{packed} elements of gradients were packed at a time"


def packed_again_in_flight(mesh: DeviceMesh) -> None:
    """Gradients that come again right after their unit's reduction wait for its input."""
    plain = Net()
    model = copy.deepcopy(plain)
    backend = RaceBackend(Policy.EARLY)
    with backend.checking():
        _sharded(backend, mesh, model, *model.blocks)
        for trained in (model, plain):
            kept = trained(batch(0, 0, 0), (0,)).sum()
            kept.backward(retain_graph=True)
            # Block 0 is reduced when the new graph was left; then its gradients come.
            (kept + trained(batch(0, 1, 0), (0,)).sum()).backward()
            del kept
        got = model.blocks[0].layer.weight.grad.to_local().clone()
        del trained, model
    torch.testing.assert_close(got, plain.blocks[0].layer.weight.grad)


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ValueError("in backward")


def _sharded(backend: RaceBackend, mesh: DeviceMesh, model: nn.Module, *units: nn.Module) -> None:
    for module in (*units, model):
        fully_shard(module, mesh, Placements.zero3("dp"), backend=backend)


def failures_leave_nothing(mesh: DeviceMesh) -> None:
    """An exception in forward or backward leaves nothing gathered and nothing packed."""
    for where in ("forward", "backward"):
        backend = RaceBackend(Policy.EARLY)
        with backend.checking():
            model = Net()
            _sharded(backend, mesh, model, *model.blocks)
            if where == "forward":
                with suppress(IndexError):
                    model(batch(0, 0, 0), (0, 7))
            else:
                # Root and the last block have their gradients packed when the first one fails.
                model.blocks[0].register_forward_hook(lambda *a: Fails.apply(a[-1]))
                with suppress(ValueError):
                    model(batch(0, 0, 0), WHOLE).sum().backward()
            with suppress(ValueError):
                model(batch(0, 0, 0), WHOLE).sum().backward()
            backend.check_released(leaves=(Role.REDUCE_OUTPUT,))


class Shows(nn.Module):
    """Returns a view of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight.T, self.weight[0]


def nothing_old_is_trusted(mesh: DeviceMesh) -> None:
    """What a no-grad forward left gathered, because its output shows it, is gathered anew by the
    next one: a write past PyTorch may have changed the weights."""
    backend = RaceBackend(Policy.EARLY)
    with backend.checking(leaves=tuple(Role)):
        model = Shows()
        _sharded(backend, mesh, model)
        x = torch.ones(2, 3)
        with torch.no_grad():
            _, shown = model(x)
            address = model.weight.to_local().data_ptr()
            rows = model.weight.to_local().numel()
            (torch.frombuffer(_memory(address, 4 * rows), dtype=torch.float32)).fill_(2.0)
            y, _ = model(x)
    del shown
    assert y.tolist() == [[6.0] * 4] * 2, y


def _memory(address: int, nbytes: int) -> object:
    import ctypes

    return (ctypes.c_char * nbytes).from_address(address)
