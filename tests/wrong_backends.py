"""Gloo backends that break one promise each: what they send, combine and count.

Each differs from the right one in a single way, so that what finds it has found just that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from polyshard.spi import Communicator, LaneRole, Op
from polyshard_gloo import GlooBackend
from polyshard_gloo.communicator import GlooCommunicator

_HALF_PRECISION = (torch.float16, torch.bfloat16)
Tensors = Sequence[Tensor]


class Wrong(GlooBackend):
    """A gloo backend whose communicators are of another class."""

    communicators: ClassVar[type[GlooCommunicator]] = GlooCommunicator

    def communicator(self, *args: Any, **kwargs: Any) -> Communicator:
        made = super().communicator(*args, **kwargs)
        # They have the same fields, and differ in what they do.
        made.__class__ = self.communicators
        return made


class _AveragesAreSums(GlooCommunicator):
    def _reduce_scatter(self, outputs: Tensors, inputs: Tensors, op: Op, *, label: str) -> None:
        super()._reduce_scatter(outputs, inputs, Op.SUM, label=label)

    def _all_reduce(self, buffers: Tensors, op: Op, *, label: str) -> None:
        super()._all_reduce(buffers, Op.SUM, label=label)


class AveragesAreSums(Wrong):
    """An average is the sum."""

    communicators = _AveragesAreSums


class _ScattersSumsOfBf16(GlooCommunicator):
    def _reduce_scatter(self, outputs: Tensors, inputs: Tensors, op: Op, *, label: str) -> None:
        forgets = any(tensor.dtype is torch.bfloat16 for tensor in inputs)
        super()._reduce_scatter(outputs, inputs, Op.SUM if forgets else op, label=label)


class ScattersSumsOfBf16(Wrong):
    """An average is the sum in a single case: bf16 that is scattered."""

    communicators = _ScattersSumsOfBf16


class _RotatesRanks(GlooCommunicator):
    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        super()._all_gather(outputs, shards, label=label)
        for output, shard in zip(outputs, shards, strict=True):
            output.data.copy_(output.roll(shard.numel()))


class RotatesRanks(Wrong):
    """A rank's shard lands in the next rank's slot."""

    communicators = _RotatesRanks


class _DropsLastChunk(GlooCommunicator):
    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        before = [output.clone() for output in outputs]
        super()._all_gather(outputs, shards, label=label)
        for output, old, shard in zip(outputs, before, shards, strict=True):
            rest = shard.numel() % 1024
            if shard.numel() > 1024 and rest:
                output.data[-rest:].copy_(old[-rest:])


class DropsLastChunk(Wrong):
    """What is left after whole chunks of 1024 elements stays behind."""

    communicators = _DropsLastChunk


class _SumsInItsDtype(GlooCommunicator):
    def _sum(self, tensor: Tensor, op: Op, label: str) -> Tensor:
        everyones = tensor.new_empty(self.size * tensor.numel())
        super()._all_gather([everyones], [tensor], label=label)
        total, *rest = everyones.tensor_split(self.size)
        for other in rest:
            total = total + other
        return total / self.size if op is Op.AVG else total

    def _reduce_scatter(self, outputs: Tensors, inputs: Tensors, op: Op, *, label: str) -> None:
        if not inputs or inputs[0].dtype not in _HALF_PRECISION:
            super()._reduce_scatter(outputs, inputs, op, label=label)
            return
        for output, whole in zip(outputs, inputs, strict=True):
            output.data.copy_(self._sum(whole, op, label).tensor_split(self.size)[self.rank])

    def _all_reduce(self, buffers: Tensors, op: Op, *, label: str) -> None:
        if not buffers or buffers[0].dtype not in _HALF_PRECISION:
            super()._all_reduce(buffers, op, label=label)
            return
        for buffer in buffers:
            buffer.data.copy_(self._sum(buffer, op, label))


class SumsInItsDtype(Wrong):
    """fp32 accumulation is claimed, and half precision is summed as it is."""

    communicators = _SumsInItsDtype


class _TakesTwoForOne(GlooCommunicator):
    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        if len(shards) != 2:
            super()._all_gather(outputs, shards, label=label)
            return
        run = torch.cat(list(outputs))
        super()._all_gather([run], [torch.cat(list(shards))], label=label)
        for output, part in zip(outputs, run.split([o.numel() for o in outputs]), strict=True):
            output.data.copy_(part)


class TakesTwoForOne(Wrong):
    """A list of two is gathered as if it were one tensor."""

    communicators = _TakesTwoForOne


class TakesGroupsForOthers(Wrong):
    """Groups are told apart by their size: that of the first axis serves the second as well."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[int, ProcessGroup] = {}

    def communicator(self, group: ProcessGroup, *args: Any, **kwargs: Any) -> Communicator:
        return super().communicator(self._groups.setdefault(group.size(), group), *args, **kwargs)


class _FailsOnComplex(GlooCommunicator):
    def _all_reduce(self, buffers: Tensors, op: Op, *, label: str) -> None:
        if any(buffer.is_complex() for buffer in buffers):
            raise RuntimeError("unhandled dtype")
        super()._all_reduce(buffers, op, label=label)


class FailsOnComplex(Wrong):
    """Complex numbers are claimed, and no reduction of them works."""

    communicators = _FailsOnComplex


class ReducesWhatItDoesNotClaim(Wrong):
    """float64 is not claimed, and reduced all the same."""

    capabilities = replace(
        GlooBackend.capabilities,
        reduce_dtypes=GlooBackend.capabilities.reduce_dtypes - {torch.float64},
    )


class _BumpsVersions(GlooCommunicator):
    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        results = [torch.empty_like(output) for output in outputs]
        super()._all_gather(results, shards, label=label)
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)


class BumpsVersions(Wrong):
    """To autograd a gathered buffer looks like one that was changed."""

    communicators = _BumpsVersions


class _WritesAround(GlooCommunicator):
    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        super()._all_gather(outputs, shards, label=label)
        for output in outputs:
            end = (output.storage_offset() + output.numel()) * output.element_size()
            octets = torch.empty(0, dtype=torch.uint8).set_(output.untyped_storage())
            # Rounded up to whole words, as vector instructions like it.
            octets[end : -(-end // 4) * 4] = 0


class WritesAround(Wrong):
    """Gathers write whole words, also where the output ends within one."""

    communicators = _WritesAround


class _ForgetsDtypes(GlooCommunicator):
    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        # Not through what keeps every bit, but through a dtype that has room for most values.
        wide = torch.float64
        results = [torch.empty_like(output, dtype=wide) for output in outputs]
        super()._all_gather(results, [shard.to(wide) for shard in shards], label=label)
        for output, result in zip(outputs, results, strict=True):
            output.data.copy_(result)


class ForgetsDtypes(Wrong):
    """Everything travels as float64: complex numbers and large integers do not survive."""

    communicators = _ForgetsDtypes


class _CountsTwice(GlooCommunicator):
    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        nbytes = sum(shard.numel() * shard.element_size() for shard in shards)
        self.traffic.add("all_gather", (self.size - 1) * nbytes)
        super()._all_gather(outputs, shards, label=label)


class CountsTwice(Wrong):
    """The backend counts what the base class has counted."""

    communicators = _CountsTwice


class _ComparesNoLabels(GlooCommunicator):
    def _all_reduce(self, buffers: Tensors, op: Op, *, label: str) -> None:
        super()._all_reduce(buffers, op, label="")


class ComparesNoLabels(Wrong):
    """Ranks that reduce different units do not notice."""

    communicators = _ComparesNoLabels


class _BroadcastsFromFirst(GlooCommunicator):
    def _broadcast(self, buffers: Tensors, source: int, *, label: str) -> None:
        super()._broadcast(buffers, 0, label=label)


class BroadcastsFromFirst(Wrong):
    """The first rank is taken for the source."""

    communicators = _BroadcastsFromFirst


class _AddsFromItself(GlooCommunicator):
    calls = 0

    def _all_reduce(self, buffers: Tensors, op: Op, *, label: str) -> None:
        for buffer in buffers:
            everyones = buffer.new_empty(self.size * buffer.numel())
            super()._all_gather([everyones], [buffer], label=label)
            parts = everyones.tensor_split(self.size)
            total = torch.zeros_like(buffer)
            for step in range(self.size):
                total = total + parts[(self._first() + step) % self.size]
            average = op is Op.AVG
            buffer.data.copy_(total / self.size if average else total)

    def _first(self) -> int:
        return self.rank


class AddsFromItself(Wrong):
    """Every rank adds up in an order of its own."""

    communicators = _AddsFromItself


class _AddsInTurns(_AddsFromItself):
    def _all_reduce(self, buffers: Tensors, op: Op, *, label: str) -> None:
        self.calls += 1
        super()._all_reduce(buffers, op, label=label)

    def _first(self) -> int:
        return self.calls


class AddsInTurns(Wrong):
    """All ranks add up in one order, and in another one at the next call."""

    communicators = _AddsInTurns


class _ChecksNothing(GlooCommunicator):
    def _check(self, *args: Any, **kwargs: Any) -> None:
        """Whatever comes is sent."""


class ChecksNothing(Wrong):
    """Calls are not validated."""

    communicators = _ChecksNothing


class IgnoresOptions(Wrong):
    """An option that does not exist is not noticed."""

    def communicator(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        purpose: LaneRole,
        options: Mapping[str, Any] | None = None,
    ) -> Communicator:
        return super().communicator(group, device, purpose=purpose)
