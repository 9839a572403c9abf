"""The placement that knows where rows lie: equality, hash, copies, what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from wrapped_tensors import row_counts, split_of

from polyshard.errors import PlacementError, UnsupportedError
from polyshard.row_split import RowSplit


@given(row_counts, row_counts)
def test_splits_are_equal_when_their_rows_are(one: list[int], other: list[int]) -> None:
    """Splits are equal exactly when every shard has the same rows, and then hash alike."""
    alike = one == other
    assert (split_of(one) == split_of(other)) is alike
    assert (split_of(one) != split_of(other)) is not alike
    if alike:
        assert hash(split_of(one)) == hash(split_of(other))


@given(row_counts)
def test_a_split_equals_shard_0_and_nothing_else_of_pytorch(counts: list[int]) -> None:
    """DTensorSpec takes a split as Shard(0); other placements differ from it."""
    split = split_of(counts)
    assert split == Shard(0)
    assert Shard(0) == split
    assert split.dim == 0
    assert split != Shard(1)
    assert split != Replicate()
    assert split != RowSplit(split.ranges, (1,))
    assert hash(split) != hash(RowSplit(split.ranges, (1,)))


def test_dtensor_spec_takes_a_split_for_its_equality_with_shard_0(mesh: DeviceMesh) -> None:
    """A placement on dim 0 that does not equal Shard(0) is not taken by DTensorSpec."""

    class Unequal(Shard):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Unequal)

        __hash__ = Shard.__hash__

    meta = TensorMeta(torch.Size((3,)), (1,), torch.float32)
    assert DTensorSpec(mesh, (split_of([3]),), tensor_meta=meta).placements == (split_of([3]),)
    with pytest.raises(AssertionError):
        DTensorSpec(mesh, (Unequal(0),), tensor_meta=meta)


@given(row_counts)
def test_splits_survive_pickling_and_copying(counts: list[int]) -> None:
    """pickle, copy and deepcopy give an equal split."""
    split = split_of(counts)
    for again in (pickle.loads(pickle.dumps(split)), copy.copy(split), copy.deepcopy(split)):
        assert type(again) is RowSplit
        assert (again, again.ranges, again.axis_order) == (split, split.ranges, split.axis_order)


def test_where_empty_shards_stand_does_not_matter() -> None:
    """An empty shard may name any row; the split is the same."""
    assert RowSplit([(0, 0), (0, 4), (2, 2), (4, 4)], (0,)) == split_of([0, 4, 0, 0])


@pytest.mark.parametrize(
    ("ranges", "axes"),
    [
        ([(0, 2), (3, 4)], (0,)),
        ([(0, 2), (1, 4)], (0,)),
        ([(1, 2)], (0,)),
        ([(2, 1)], (0,)),
        ([], (0,)),
        ([(0, 2)], (0, 0)),
        ([(0, 2)], (-1,)),
    ],
)
def test_splits_that_miss_or_repeat_rows_are_refused(
    ranges: list[tuple[int, int]], axes: tuple[int, ...]
) -> None:
    """Ranges must cover every row once, in order, over distinct axes."""
    with pytest.raises(PlacementError):
        RowSplit(ranges, axes)


def test_every_step_of_shard_is_answered_for() -> None:
    """No method by which PyTorch moves the rows of a Shard is inherited unseen."""
    # Without `self`, or about the value only: these cannot ask a split for its rows.
    static = {name for name, value in vars(Shard).items() if isinstance(value, staticmethod)}
    harmless = {"_make_shard_tensor", "__fx_repr__", "__module__", "__doc__"}
    for name, value in vars(Shard).items():
        if callable(value) and name not in static | harmless:
            assert name in vars(RowSplit), f"Shard.{name} is not overridden"
    split = split_of([1, 0, 3])
    assert [split._local_shard_size_and_offset(4, 3, rank) for rank in range(3)] == [
        (1, 0),
        (0, 1),
        (3, 1),
    ]
    with pytest.raises(UnsupportedError):
        split._local_shard_size_and_offset(5, 3, 0)
    with pytest.raises(UnsupportedError):
        split_of([1, 1, 1, 1], (1, 0))._local_shard_size_and_offset(4, 2, 0)
    with pytest.raises(UnsupportedError):
        split._split_tensor(torch.ones(4), 3)
