"""What `explain` reports, as frozen values: units, groups, segments, tensors, orders.

Knows no modules and no storage: nothing here keeps a model alive. Lengths are in elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import prod

from .layout import RowRanges
from .placements import Placements
from .precision import GroupDtypes
from .schedule import SchedulePolicy


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on one rank; the same on every rank of the group. docs/strategies.md has the formulas.

    Attributes:
        main: main weights; always held.
        kept: further buffers that the backend wants kept for life; always held.
        gradients: finished gradients, or in zero2 and zero3 the sum so far; while ``.grad`` shows
            them. 0 where nothing is trainable.
        accumulators: gradients that are still Partial; from the first backward of a window to the
            end of its last.
        copies: weights in the dtype and placements that compute starts from, where those are not
            the main weights; in a window.
        gathered: whole weights; while the unit is gathered.
    """

    main: int = 0
    kept: int = 0
    gradients: int = 0
    accumulators: int = 0
    copies: int = 0
    gathered: int = 0

    @property
    def between_steps(self) -> int:
        """What is held after ``zero_grad``; the optimizer's state comes on top."""
        return self.main + self.kept

    def __add__(self, other: HeldBytes) -> HeldBytes:
        names = [each.name for each in fields(self)]
        return HeldBytes(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, eq=False)
class RowsByRank(Mapping[int, tuple[int, int]]):
    """The rows [start, stop) of one tensor's main weight by global rank, found when asked for.

    Args:
        by_shard: the same by shard.
        shard_of: the shard that each rank holds.
    """

    by_shard: RowRanges
    shard_of: Mapping[int, int] = field(repr=False)

    def __getitem__(self, rank: int) -> tuple[int, int]:
        return self.by_shard[self.shard_of[rank]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.shard_of)

    def __len__(self) -> int:
        return len(self.shard_of)


@dataclass(frozen=True)
class ExplainedTensor:
    """One parameter in its group's flat buffer.

    Attributes:
        label: its name inside its unit; the first, if it is tied.
        names: every name under which the explained module has it.
        shape: of the whole.
        local_shape: of what is laid out here: the whole, but for other parallelism.
        distribution: how other parallelism distributes it, or "".
        trainable: it requires gradients now.
        offset: its first element in the full flat buffer; 0 for an empty tensor.
        rows: rows of ``local_shape`` that each rank's main weight has.
    """

    label: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    distribution: str
    trainable: bool
    offset: int
    rows: RowsByRank

    @property
    def numel(self) -> int:
        """Elements in the flat buffer."""
        return prod(self.local_shape)


@dataclass(frozen=True)
class ExplainedSegment:
    """A run of the full flat buffer that is gathered and reduced as one piece.

    Attributes:
        index: its place among the group's segments.
        offset: its first element in the full flat buffer.
        numel: its length, padding included.
        shard_numel: the length of each shard's part of it.
        tensors: in the order in which they lie.
    """

    index: int
    offset: int
    numel: int
    shard_numel: int
    tensors: tuple[ExplainedTensor, ...]

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return self.numel - sum(tensor.numel for tensor in self.tensors)


#: The global ranks that hold each shard, in the order of the shards.
Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExplainedGroup:
    """Parameters of one unit that share dtype and ``requires_grad``, in one flat buffer.

    Attributes:
        index: its place among the unit's groups.
        placements: as given to ``fully_shard``.
        dtypes: of the weight that computes, the main weight, the main gradient and the gradient
            that travels.
        parameter_holders, gradient_holders, main_holders: who holds which shard of weights in
            compute precision, of gradients between microbatches and of main weights; over the
            ranks of this rank's data-parallel mesh.
        segments: in the order in which they lie.
        bytes: what one rank holds.
    """

    index: int
    placements: Placements
    dtypes: GroupDtypes
    parameter_holders: Holders
    gradient_holders: Holders
    main_holders: Holders
    segments: tuple[ExplainedSegment, ...]
    bytes: HeldBytes

    @property
    def strategy(self) -> str:
        """The placements in words, e.g. ``zero3 over dp``."""
        return str(self.placements)

    @property
    def tensors(self) -> tuple[ExplainedTensor, ...]:
        """Those of all segments, in the order in which they lie."""
        return tuple(tensor for segment in self.segments for tensor in segment.tensors)

    @property
    def trainable(self) -> int:
        """How many tensors require gradients."""
        return sum(tensor.trainable for tensor in self.tensors)

    @property
    def frozen(self) -> int:
        """How many tensors do not."""
        return sum(not tensor.trainable for tensor in self.tensors)

    @property
    def numel(self) -> int:
        """Elements of the tensors."""
        return self.padded_numel - self.padding

    @property
    def padded_numel(self) -> int:
        """Elements of the full flat buffer."""
        return sum(segment.numel for segment in self.segments)

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return sum(segment.padding for segment in self.segments)


@dataclass(frozen=True)
class ExplainedUnit:
    """One module that was given to ``fully_shard``.

    Attributes:
        index: its place among the units of the explained module, parents first.
        name: its path in the explained module; "" for that module itself.
        module_class: the name of its class.
        backend: the name of what moves its data.
        axes: its data-parallel mesh axes, outer to inner as given, and the ranks along each.
        reshard_after_forward: whether weights are released between forward and backward.
        schedule: how far ahead of compute units are gathered.
        groups: possibly none.
    """

    index: int
    name: str
    module_class: str
    backend: str
    axes: tuple[tuple[str, int], ...]
    reshard_after_forward: bool
    schedule: SchedulePolicy
    groups: tuple[ExplainedGroup, ...]

    @property
    def bytes(self) -> HeldBytes:
        """The sum over the groups."""
        return sum((group.bytes for group in self.groups), HeldBytes())


@dataclass(frozen=True)
class ExplainedOrder:
    """The order in which units that run under one root are expected, and so are prefetched.

    Attributes:
        has_run: a forward has run; before, units are expected as they are registered.
        forward: names of the units, as `ExplainedUnit` has them, in the order of the next forward.
        backward: in the order of the next backward; None before the first, which expects the
            reverse of the forward that it follows.
        most_gathered_forward: bytes of whole weights that one rank holds at one time in such a
            forward, at most: of units that contain the one that runs, of that one, of those
            gathered ahead of it, and of those kept from forward to backward. None where the order
            has units outside of the explained module.
        most_gathered_backward: the same for such a backward; None before the first.
    """

    has_run: bool
    forward: tuple[str, ...]
    backward: tuple[str, ...] | None
    most_gathered_forward: int | None
    most_gathered_backward: int | None
