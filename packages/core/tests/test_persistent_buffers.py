"""Backends that keep buffers for life: allocated once, never released, and inputs left alone until
peers are done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from one_rank import (
    assert_same_grads,
    assert_same_weights,
    batch,
    make_stack,
    train,
    twins,
    units_in,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from polyshard import Flat, MixedPrecisionPolicy, Partial, Placements, Replicate, fully_shard
from polyshard.spi import (
    Buffer,
    Capabilities,
    Communicator,
    Lifetime,
    Op,
    Role,
    StorageBuffer,
    Use,
)
from polyshard.testing.loopback import LoopbackBackend, _LoopbackCommunicator

KEPT = frozenset({Role.GATHER_INPUT, Role.GATHER_OUTPUT, Role.REDUCE_INPUT})


@dataclass
class Lent:
    """Which memory peers may still read, and what happened to it meanwhile."""

    storages: set[int] = field(default_factory=set)
    results: list[tuple[Tensor, int]] = field(default_factory=list)  # with their versions
    disturbed: list[str] = field(default_factory=list)

    def touch(self, tensor: Tensor, what: str) -> None:
        if tensor.untyped_storage().data_ptr() in self.storages:
            self.disturbed.append(what)


class LendingCommunicator(_LoopbackCommunicator):
    """Peers read its inputs until it settles."""

    lent: Lent

    def _lend(self, inputs: Sequence[Tensor]) -> None:
        self.lent.storages |= {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        super()._reduce_scatter(outputs, inputs, op, label=label)
        self._lend(inputs[:1])  # the last one carries counts, in memory of its own
        self._hand_over(outputs[-1], label)

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        super()._all_reduce(buffers, op, label=label)
        self._hand_over(buffers[-1], label)

    def _hand_over(self, counts: Tensor, label: str) -> None:
        if "over outer axes" in label:  # on a lane of its own: no other may write what it writes
            self.lent.results.append((counts, counts._version))

    def settle(self) -> None:
        self.lent.storages.clear()


class LendingBuffer(StorageBuffer):
    """Notices when it is taken away, or filled anew, while peers read it."""

    lent: Lent

    def acquire(self) -> None:
        self.lent.touch(self.tensor, "acquired")
        super().acquire()

    def release(self) -> None:
        self.lent.touch(self.tensor, "released")
        super().release()


class KeepingBackend(LoopbackBackend):
    """Keeps buffers of some roles, and counts them."""

    def __init__(self, kept: frozenset[Role]) -> None:
        super().__init__()
        self.capabilities = Capabilities(
            device_types=frozenset({"cpu"}),
            reduce_dtypes=LoopbackBackend.capabilities.reduce_dtypes,
            fp32_accumulation=True,
            persistent_roles=kept,
        )
        self.persistent = 0
        self.lent = Lent()

    def communicator(self, *args: Any, **kwargs: Any) -> Communicator:
        made = super().communicator(*args, **kwargs)
        made.__class__ = LendingCommunicator
        made.lent = self.lent  # type: ignore[attr-defined]
        return made

    def allocate(self, uses: Sequence[Use], *args: Any) -> Buffer:
        buffer = LendingBuffer(*args)
        self.persistent += buffer.lifetime is Lifetime.PERSISTENT
        buffer.lent = self.lent
        return buffer


@pytest.fixture(scope="module")
def two_axes(mesh: DeviceMesh) -> DeviceMesh:
    """One rank on two axes."""
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))


EARLY = Placements(("outer", "inner"), (Replicate(), Flat()), (Replicate(), Flat()), (Flat(),) * 2)
MIX = Placements(("outer", "inner"), (Replicate(),) * 2, (Partial(), Flat()), (Flat(),) * 2)


@pytest.mark.parametrize("kept", [frozenset(), KEPT], ids=["none", "kept"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "placements",
    [
        Placements.zero3("inner"),
        Placements.ddp("inner"),
        Placements.zero1("inner"),
        Placements.hfsdp("outer", "inner"),
        EARLY,
        MIX,
    ],
    ids=str,
)
def test_training(
    two_axes: DeviceMesh, placements: Placements, bf16: bool, kept: frozenset[Role]
) -> None:
    """Steps allocate nothing that is kept and release nothing of it; weights are a plain twin's; no
    input is released or filled while peers may read it."""
    model, reference = twins(make_stack())
    backend = KeepingBackend(kept)
    policy = (
        MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16, compute_dtype=torch.float32)
        if bf16
        else None
    )
    for module in units_in(model):
        fully_shard(module, two_axes, placements, mixed_precision_policy=policy, backend=backend)
    allocated = backend.persistent
    losses = train(model), train(reference)
    assert backend.persistent == allocated
    assert backend.lent.disturbed == []
    if not bf16:
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        assert_same_weights(model, reference)
    for _ in range(2):  # two contributions, of which the second is added to the first
        model(batch(3)).sum().backward()
    assert backend.persistent == allocated
    assert backend.lent.disturbed == []


@pytest.mark.parametrize("placements", [Placements.hfsdp("outer", "inner"), MIX], ids=str)
def test_counts_that_went_on_are_left_alone(two_axes: DeviceMesh, placements: Placements) -> None:
    """A second contribution in one backward does not write the use counts of the first, which the
    outer lane is still reducing."""
    model, reference = twins(make_stack())
    backend = KeepingBackend(frozenset())
    for module in units_in(model):
        fully_shard(module, two_axes, placements, backend=backend)
    for each in (model, reference):
        recomputed = checkpoint(each, batch(0).requires_grad_(), use_reentrant=True)
        (recomputed.sum() + each(batch(1)).sum()).backward()
    assert len(backend.lent.results) > len(units_in(model))
    assert all(counts._version == version for counts, version in backend.lent.results)
    assert_same_grads(model, reference)


def test_gradients_are_not_kept() -> None:
    """Reduced gradients become `.grad`: a backend that would keep them is refused at once."""
    with pytest.raises(ValueError, match="REDUCE_OUTPUT"):
        KeepingBackend(frozenset({Role.REDUCE_OUTPUT}))
