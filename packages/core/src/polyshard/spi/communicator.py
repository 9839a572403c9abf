"""Collectives over one mesh axis for one purpose: validation and accounting, then the transport.

Knows no layout, no modules and no lanes: whoever calls it is already inside submitted work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from ..errors import UnsupportedError


class Op(Enum):
    """How contributions combine. AVG divides by the number of ranks, always (clause 5); integers
    have no average."""

    SUM = "sum"
    AVG = "avg"


@dataclass
class Traffic:
    """What one communicator moved: calls by kind, and bytes that this rank had to send.

    Bytes are the least any algorithm can do, averaged over the ranks: with n ranks, (n-1) times
    the shard for a gather and a reduce-scatter, 2(n-1)/n of the buffer for an all-reduce and
    (n-1)/n of it for a broadcast (Thakur, Rabenseifner and Gropp, IJHPCA 2005).
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, nbytes: int) -> None:
        """Record one call of ``kind``."""
        self.calls[kind] += 1
        self.bytes[kind] += nbytes

    def __iadd__(self, other: Traffic) -> Traffic:
        self.calls.update(other.calls)
        self.bytes.update(other.bytes)
        return self

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())


class Communicator(ABC):
    """Collectives among the ranks of one process group.

    Every rank calls the same methods with the same lengths in the same order. A list travels as
    one launch. Tensors of a call are 1-D, contiguous, of one dtype and on the communicator's
    device; any length is legal, zero included. ``label`` names unit and phase for errors, alike
    on every rank.

    Args:
        rank: this process's rank in the group.
        size: ranks in the group.
        device: where the tensors are; compared as it is, index included.
        reduce_dtypes: what reductions accept, usually the backend's capability.

    Raises (all methods): ValueError or UnsupportedError before anything is launched or counted;
    BackendError from the transport.
    """

    rank: int
    size: int
    device: torch.device
    traffic: Traffic

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        *,
        reduce_dtypes: frozenset[torch.dtype] | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.reduce_dtypes = reduce_dtypes
        self.traffic = Traffic()

    def all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        """``outputs[i]`` becomes the ranks' ``shards[i]``, rank-major; a shard may alias its slot
        in the output."""
        self._check(outputs, shards, size=self.size, label=label)
        self.traffic.add("all_gather", (self.size - 1) * _nbytes(shards))
        self._all_gather(outputs, shards, label=label)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        """``outputs[i]`` becomes this rank's slot of the ranks' combined ``inputs[i]``; an output
        may alias its slot in the input."""
        self._check(inputs, outputs, size=self.size, label=label)
        self._check_reduction(inputs, op, label=label)
        self.traffic.add("reduce_scatter", (self.size - 1) * _nbytes(outputs))
        self._reduce_scatter(outputs, inputs, op, label=label)

    def all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        """Combine in place; every rank ends with the same bits."""
        self._check(buffers, buffers, size=1, label=label)
        self._check_reduction(buffers, op, label=label)
        self.traffic.add("all_reduce", 2 * (self.size - 1) * _nbytes(buffers) // self.size)
        self._all_reduce(buffers, op, label=label)

    def broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        """Every rank's ``buffers`` become those of rank ``source`` of this group."""
        if not 0 <= source < self.size:
            raise ValueError(f"{label}: source {source} is not a rank of a group of {self.size}.")
        self._check(buffers, buffers, size=1, label=label)
        self.traffic.add("broadcast", (self.size - 1) * _nbytes(buffers) // self.size)
        self._broadcast(buffers, source, label=label)

    @abstractmethod
    def settle(self) -> None:
        """After it, peers are done with this rank's inputs (clause 6)."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds. Local, idempotent, legal at exit."""

    @abstractmethod
    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None: ...

    @abstractmethod
    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None: ...

    @abstractmethod
    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None: ...

    @abstractmethod
    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None: ...

    def _check(
        self, wholes: Sequence[Tensor], parts: Sequence[Tensor], *, size: int, label: str
    ) -> None:
        """Whole i has ``size`` times the length of part i; everything is flat and alike."""
        if len(wholes) != len(parts):
            raise ValueError(f"{label}: {len(wholes)} outputs or inputs for {len(parts)} shards.")
        dtype = wholes[0].dtype if wholes else None
        for whole, part in zip(wholes, parts, strict=True):
            for tensor in (whole, part):
                if tensor.dtype != dtype:
                    raise ValueError(f"{label}: {tensor.dtype} in a list of {dtype}; use one.")
                if tensor.dim() != 1 or not tensor.is_contiguous():
                    raise ValueError(
                        f"{label}: tensors must be 1-D and contiguous, got shape "
                        f"{tuple(tensor.shape)} with strides {tensor.stride()}."
                    )
                if tensor.device != self.device:
                    raise ValueError(f"{label}: tensor on {tensor.device}, not {self.device}.")
            if whole.numel() != size * part.numel():
                raise ValueError(
                    f"{label}: {whole.numel()} elements is not {size} times {part.numel()}."
                )

    def _check_reduction(self, tensors: Sequence[Tensor], op: Op, *, label: str) -> None:
        """The operation exists and this transport reduces the dtype."""
        if not isinstance(op, Op):
            raise ValueError(f"{label}: op must be Op.SUM or Op.AVG, got {op!r}.")
        if not tensors:
            return
        dtype = tensors[0].dtype
        if self.reduce_dtypes is not None and dtype not in self.reduce_dtypes:
            names = ", ".join(sorted(str(known) for known in self.reduce_dtypes))
            raise UnsupportedError(
                f"{label}: this backend does not reduce {dtype}, only {names}; convert first."
            )
        if op is Op.AVG and not (dtype.is_floating_point or dtype.is_complex):
            raise UnsupportedError(
                f"{label}: {dtype} has no average; use Op.SUM and divide as you need it rounded."
            )


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
