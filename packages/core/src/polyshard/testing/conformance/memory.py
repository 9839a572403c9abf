"""Tests of buffers: lifetimes, storage, uses (clauses 4.2 to 4.7)."""

from __future__ import annotations

import itertools
import threading

import torch
from torch import Tensor

from ...errors import BackendError
from ...spi import Buffer, Lifetime, Op, Role, Use
from .bench import Bench
from .clauses import clause
from .data import Violation, require
from .resources import require_no_growth

#: Elements of buffers whose memory shows in what a process or a device has in use.
_LARGE = 8 * 2**20


@clause("4.2", since=(1, 0))
def persistent_memory_is_zeros(bench: Bench) -> None:
    """A PERSISTENT buffer of any role, length and dtype is filled with zeros, needs no acquire,
    and holds what is written to it over any number of collectives."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    kept: list[tuple[Buffer, Role, int]] = []
    for role, numel in itertools.product(Role, (0, 1, 1021)):
        for dtype in (torch.float32, torch.bfloat16):
            on = gather if role in (Role.GATHER_INPUT, Role.GATHER_OUTPUT) else reduce
            buffer = bench.buffer(on, role, numel, dtype, Lifetime.PERSISTENT)
            what = f"a PERSISTENT buffer ({role.value}, {numel} elements of {dtype})"
            _require_shape(bench, buffer, numel, dtype, Lifetime.PERSISTENT, what)
            require(
                buffer.tensor.float().abs().sum().item() == 0,
                f"{what} is not filled with zeros",
            )
            buffer.tensor.fill_(len(kept) % 100)
            kept.append((buffer, role, len(kept) % 100))
    for _ in range(3):
        total = torch.ones(5000, device=bench.device)
        bench.all_reduce(reduce, [total], Op.SUM)
    for buffer, role, value in kept:
        require(
            bool((buffer.tensor.float() == value).all()),
            f"a PERSISTENT buffer ({role.value}) lost what was written to it",
        )


@clause("4.3", since=(1, 0))
def transient_buffers_are_local(bench: Bench) -> None:
    """allocate(..., TRANSIENT), acquire and release need no peer: ranks may do them alone, at any
    time, and have the memory between acquire and release only."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    # Each rank allocates another number of buffers, while the others wait for it elsewhere.
    for turn in range(bench.size):
        if turn == bench.rank:
            for role in list(Role)[: 1 + turn % len(Role)]:
                on = gather if role in (Role.GATHER_INPUT, Role.GATHER_OUTPUT) else reduce
                for numel in (0, 1, 1021):
                    what = f"a TRANSIENT buffer ({role.value}, {numel} elements)"
                    buffer = bench.buffer(on, role, numel)
                    _require_shape(bench, buffer, numel, torch.float32, Lifetime.TRANSIENT, what)
                    storage = buffer.tensor.untyped_storage()
                    require(storage.nbytes() == 0, f"{what} has memory before acquire")
                    for _ in range(2):
                        buffer.acquire()
                        buffer.tensor.fill_(7.0)
                        require(storage.nbytes() >= 4 * numel, f"{what} has no memory")
                        buffer.release()
                        require(storage.nbytes() == 0, f"{what} has memory after release")
                        require(
                            buffer.tensor.numel() == numel,
                            f"{what} has length {buffer.tensor.numel()} after release",
                        )
        bench.meet()


@clause("4.3", since=(1, 0))
def released_memory_is_given_back(bench: Bench) -> None:
    """What was released or dropped takes no memory any more."""
    gather = bench.communicator()

    def use_and_release() -> None:
        kept = [bench.buffer(gather, Role.GATHER_OUTPUT, _LARGE) for _ in range(2)]
        for buffer in kept:
            buffer.acquire()
            buffer.tensor.fill_(1.0)
            buffer.release()
        dropped = bench.buffer(gather, Role.GATHER_OUTPUT, _LARGE)
        dropped.acquire()
        dropped.tensor.fill_(1.0)

    require_no_growth(bench, use_and_release, "using and releasing TRANSIENT buffers")


@clause("4.4", since=(1, 0))
def a_buffer_has_one_storage_for_life(bench: Bench) -> None:
    """A buffer's tensor keeps its storage over any number of acquire and release: views made
    once see what is written later, and what autograd saved can be used after a refill."""
    gather = bench.communicator()
    numel = 1021
    buffer = bench.buffer(gather, Role.GATHER_OUTPUT, bench.size * numel)
    tensor = buffer.tensor
    buffer.acquire()
    view = tensor[3:].view(-1)
    weight = tensor[:numel].requires_grad_()
    tensor.data.fill_(2.0)
    loss = (weight * weight).sum()
    for number in range(4):
        buffer.release()
        taken = torch.full((bench.size * numel,), -1.0, device=bench.device)
        buffer.acquire()
        require(buffer.tensor is tensor, "a buffer's tensor is another object after acquire")
        shard = torch.full((numel,), 10.0 + number, device=bench.device)
        bench.all_gather(gather, [buffer.tensor], [shard])
        require(
            view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            and view.detach().unique().tolist() == [10.0 + number],
            f"a view made once does not follow its buffer after {number + 1} releases",
        )
        del taken
    loss.backward()
    assert weight.grad is not None
    require(
        weight.grad.unique().tolist() == [2 * 13.0],
        f"autograd used {weight.grad.unique().tolist()} of a refilled buffer, expected [26.0]",
    )


@clause("4.4", since=(1, 0))
def buffers_are_made_for_training(bench: Bench) -> None:
    """A buffer first made, or acquired, inside inference mode can be trained on later."""
    gather = bench.communicator()
    with torch.inference_mode():
        buffers = [
            bench.buffer(gather, Role.GATHER_OUTPUT, bench.size * 3, lifetime=lifetime)
            for lifetime in Lifetime
        ]
        for buffer in buffers:
            buffer.acquire()
    for buffer in buffers:
        require(not buffer.tensor.is_inference(), "a buffer made in inference mode stays so")
        weight = buffer.tensor.view(-1).requires_grad_()
        (weight * 2).sum().backward()


@clause("4.5", since=(1, 0))
def acquire_and_release_are_idempotent(bench: Bench) -> None:
    """Acquiring what is acquired changes nothing, releasing what is released neither."""
    gather = bench.communicator()
    for lifetime in Lifetime:
        buffer = bench.buffer(gather, Role.GATHER_INPUT, 100, lifetime=lifetime)
        if lifetime is Lifetime.TRANSIENT:
            buffer.release()
        buffer.acquire()
        buffer.tensor.fill_(4.0)
        address = buffer.tensor.data_ptr()
        buffer.acquire()
        require(
            buffer.tensor.data_ptr() == address and buffer.tensor.unique().tolist() == [4.0],
            f"acquiring an acquired {lifetime.value} buffer changed it",
        )
        if lifetime is Lifetime.TRANSIENT:
            buffer.release()
            buffer.release()
            buffer.acquire()
            buffer.tensor.fill_(5.0)
            buffer.release()


@clause("4.5", since=(1, 0))
def persistent_buffers_are_never_released(bench: Bench) -> None:
    """release of a PERSISTENT buffer raises BackendError and changes nothing."""
    gather = bench.communicator()
    buffer = bench.buffer(gather, Role.GATHER_INPUT, 100, lifetime=Lifetime.PERSISTENT)
    buffer.tensor.fill_(4.0)
    try:
        buffer.release()
    except BackendError:
        pass
    except Exception as error:
        raise Violation(f"release raised {type(error).__name__}: {error}") from error
    else:
        raise Violation("release of a PERSISTENT buffer raised nothing, expected BackendError")
    require(
        buffer.tensor.unique().tolist() == [4.0], "a refused release changed a PERSISTENT buffer"
    )


@clause("4.6", since=(1, 0))
def gradients_own_their_memory(bench: Bench) -> None:
    """A REDUCE_OUTPUT that becomes a gradient is acquired once and never released: its memory
    outlives the buffer and goes with the last tensor that views it, on whatever thread."""
    reduce = bench.communicator("reduce")

    def make_gradient() -> Tensor:
        buffer = bench.buffer(reduce, Role.REDUCE_OUTPUT, _LARGE)
        buffer.acquire()
        buffer.tensor.fill_(1.0)
        return buffer.tensor[1:].view(-1)

    gradient = make_gradient()
    others = [make_gradient() for _ in range(2)]
    gradient.mul_(3.0)
    require(
        gradient[:: _LARGE // 16].unique().tolist() == [3.0]
        and all(other[:: _LARGE // 16].unique().tolist() == [1.0] for other in others),
        "a gradient shares its memory with another one, though both are alive",
    )
    others.clear()

    def make_and_drop() -> None:
        kept = [make_gradient()]
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
        make_gradient()

    require_no_growth(bench, make_and_drop, "making and dropping gradients")


@clause("4.7", "4.2", since=(1, 0))
def roles_may_be_persistent(bench: Bench) -> None:
    """Buffers of the roles in capabilities.persistent_roles, which never has REDUCE_OUTPUT, and
    of all others work PERSISTENT and TRANSIENT alike."""
    wanted = bench.backend.capabilities.persistent_roles
    require(Role.REDUCE_OUTPUT not in wanted, "persistent_roles has REDUCE_OUTPUT")
    require(all(isinstance(role, Role) for role in wanted), f"persistent_roles is {wanted}")
    n, numel = bench.size, 300
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    for lifetime in Lifetime:
        shard = bench.buffer(gather, Role.GATHER_INPUT, numel, lifetime=lifetime)
        full = bench.buffer(gather, Role.GATHER_OUTPUT, n * numel, lifetime=lifetime)
        staged = bench.buffer(reduce, Role.REDUCE_INPUT, n * numel, lifetime=lifetime)
        landing = bench.buffer(reduce, Role.REDUCE_OUTPUT, numel, lifetime=lifetime)
        for step in range(3):
            for buffer in (shard, full, staged, landing):
                buffer.acquire()
            shard.tensor.fill_(float(bench.rank + step))
            bench.all_gather(gather, [full.tensor], [shard.tensor])
            means = full.tensor.view(n, numel).mean(1).tolist()
            expected = [float(rank + step) for rank in range(n)]
            require(means == expected, f"gathered from buffers: {means}, expected {expected}")
            staged.tensor.copy_(full.tensor)
            bench.reduce_scatter(reduce, [landing.tensor], [staged.tensor], Op.SUM)
            found, total = landing.tensor.unique().tolist(), float(n * (bench.rank + step))
            require(found == [total], f"reduced to buffers: {found}, expected [{total}]")
            bench.settle_on(gather)
            bench.settle_on(reduce)
            if lifetime is Lifetime.TRANSIENT:
                for buffer in (shard, full, staged, landing):
                    buffer.release()


@clause("4.7", since=(1, 0))
def a_buffer_may_have_several_uses(bench: Bench) -> None:
    """One buffer can be the output of a gather over one axis and the input of one over another,
    and likewise for reductions, of both lifetimes."""
    mesh = bench.mesh()
    outer = bench.communicator("gather", mesh.get_group("outer"))
    inner = bench.communicator("gather", mesh.get_group("inner"))
    numel = 33
    for lifetime in Lifetime:
        uses = [Use(outer, Role.GATHER_OUTPUT), Use(inner, Role.GATHER_INPUT)]
        between = bench.backend.allocate(
            uses, outer.size * numel, torch.float32, bench.device, lifetime
        )
        between.acquire()
        shard = torch.full((numel,), float(bench.rank), device=bench.device)
        bench.all_gather(outer, [between.tensor], [shard])
        whole = torch.zeros(bench.size * numel, device=bench.device)
        bench.all_gather(inner, [whole], [between.tensor])
        # Rank-major twice: the inner axis varies slowest.
        means = whole.view(bench.size, numel).mean(1).tolist()
        expected = [
            float(row * inner.size + column)
            for column in range(inner.size)
            for row in range(outer.size)
        ]
        require(means == expected, f"gathered over two axes: {means}, expected {expected}")
        bench.settle_on(inner)
        if lifetime is Lifetime.TRANSIENT:
            between.release()


def _require_shape(
    bench: Bench, buffer: Buffer, numel: int, dtype: torch.dtype, lifetime: Lifetime, what: str
) -> None:
    tensor = buffer.tensor
    require(
        tensor.dim() == 1
        and tensor.numel() == numel
        and tensor.is_contiguous()
        and tensor.dtype == dtype
        and tensor.device == bench.device,
        f"{what} has a tensor of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}",
    )
    require(buffer.lifetime is lifetime, f"{what} says {buffer.lifetime}")
