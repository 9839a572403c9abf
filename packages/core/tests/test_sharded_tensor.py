"""Sharded tensors on one rank: their placement, what they count, and what they do not let pass."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import polyshard.sharded_tensor as sharded_tensor_module
from polyshard.errors import PlacementError, UnsupportedError
from polyshard.row_split import Geometry, RowSplit
from polyshard.sharded_elementwise import ELEMENTWISE, ELEMENTWISE_OVERLOADS, FOREACH, FUSED
from polyshard.sharded_fallback import dispatch_is_honoured
from polyshard.sharded_memory_ops import MEMORY_OPERATIONS
from polyshard.sharded_ops import RANDOM, choose
from polyshard.sharded_reductions import _OTHERS, _REDUCTIONS
from polyshard.sharded_tensor import ShardedTensor, WriteCounter

aten = torch.ops.aten
row_counts = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def split_of(counts: list[int], axes: tuple[int, ...] = (0,)) -> RowSplit:
    return RowSplit(list(pairwise([0, *accumulate(counts)])), axes)


def wrap(full: Tensor, mesh: DeviceMesh, name: str = "weight", **given: Any) -> ShardedTensor:
    split = split_of([full.shape[0] if full.dim() else 1])
    return ShardedTensor.wrap(
        full, shape=full.shape, mesh=mesh, placements=[split], name=name, **given
    )


# -- the placement ----------------------------------------------------------------------------


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


# -- wrapping ---------------------------------------------------------------------------------


def test_wrap_shares_memory(mesh: DeviceMesh) -> None:
    """The sharded tensor is a view of what it was given."""
    local = torch.zeros(3, 2)
    wrap(local, mesh).add_(1)
    assert local.sum() == 6


def test_tensors_over_equal_meshes_lie_alike(mesh: DeviceMesh) -> None:
    """Whether tensors lie alike is decided by values, not by who made the mesh object."""
    again = DeviceMesh.from_group(mesh.get_group(), "cpu", mesh_dim_names=("dp",))
    assert again is not mesh
    one, other = wrap(torch.ones(3, 2), mesh), wrap(torch.ones(3, 2), again)
    assert one._geometry is other._geometry
    assert (one + other).sum() == 12


@pytest.mark.parametrize(
    ("placements", "part"),
    [
        ([Shard(2)], r"S\(2\), but the tensor has shape \(3, 2\)"),
        ([Partial("max")], "Partial"),
        ([split_of([2])], "3 rows"),
        ([split_of([1, 2])], "2 shards"),
        ([split_of([3], (1,))], "axis_order"),
        ([Replicate(), Replicate()], "one per axis"),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    mesh: DeviceMesh, placements: list[Any], part: str
) -> None:
    """Placements are checked against the mesh and the shape before anything is made."""
    with pytest.raises(PlacementError, match=part):
        ShardedTensor.wrap(
            torch.ones(3, 2), shape=(3, 2), mesh=mesh, placements=placements, name="weight"
        )


def test_plain_shard_is_no_split(mesh: DeviceMesh) -> None:
    """Shard(0), which equals any split, does not pass for one that is known already."""
    kept = wrap(torch.ones(3, 2), mesh)
    plain = Geometry.of(kept.shape, mesh, [Shard(0)])
    assert plain is not kept._geometry
    assert plain.split is None
    assert plain.spread_axes == (0,)


def test_local_tensors_that_do_not_fit_are_refused(mesh: DeviceMesh) -> None:
    """A local tensor has this rank's shape, is contiguous, plain, and counts its writes."""
    with torch.inference_mode():
        inference = torch.ones(3, 2)
    sharded = wrap(torch.ones(3, 2), mesh)
    for local in (torch.ones(2, 2), torch.ones(2, 3).t(), inference, sharded):
        with pytest.raises(ValueError, match="'weight'"):
            ShardedTensor.wrap(
                local, shape=(3, 2), mesh=mesh, placements=[split_of([3])], name="weight"
            )


def test_only_wrap_makes_one() -> None:
    """The class cannot be called."""
    with pytest.raises(TypeError, match="wrap"):
        ShardedTensor(torch.ones(1))


# -- what is counted --------------------------------------------------------------------------

WRITES: dict[str, Callable[[ShardedTensor], Any]] = {
    "add_": lambda p: p.add_(1),
    "out": lambda p: torch.add(p.detach(), 1, out=p.detach()),
    "set by mask": lambda p: p.__setitem__(p > 0, 2.0),
    "copy_": lambda p: p.copy_(torch.ones(3, 2)),
    "foreach": lambda p: torch._foreach_add_([p], 1),
    "foreach lists": lambda p: torch._foreach_mul_([p], [p.detach() * 3]),
    "data": lambda p: p.data.add_(1),
    "detach": lambda p: p.detach().add_(1),
    "alias": lambda p: aten.alias(p).add_(1),
    "view": lambda p: p.view(p.shape).add_(1),
    "parameter over it": lambda p: nn.Parameter(p).add_(1),
    "view_as_complex": lambda p: torch.view_as_complex(p).mul_(2),
    "to_local": lambda p: p.to_local().add_(1),
    "rows of to_local": lambda p: p.to_local()[1:].fill_(2),
    "foreach to_local": lambda p: torch._foreach_add_([p.to_local()], 1),
    "to_local of an alias": lambda p: p.data.to_local().add_(1),
    "step": lambda p: torch.optim.SGD([p], lr=0.1).step(),
    "fused step": lambda p: torch.optim.AdamW([p], fused=True).step(),
    "foreach step": lambda p: torch.optim.Adam([p], foreach=True).step(),
}
READS: dict[str, Callable[[ShardedTensor], Any]] = {
    "arithmetic": lambda p: p * 2 + p,
    "into another": lambda p: p.clone().add_(p),
    "reductions": lambda p: (p.sum(), p.norm(), torch._foreach_norm([p])),
    "copies": lambda p: (p.clone(), copy.deepcopy(p), p.double(), torch.zeros_like(p)),
    "aliases": lambda p: (p.detach(), p.data, p.to_local(), p.view(p.shape)),
    "full": lambda p: p.full_tensor(),
    "text": repr,
    "as gradient": lambda p: torch.optim.SGD([nn.Parameter(p.clone())], lr=0.1).step(),
}


def parameter(mesh: DeviceMesh) -> nn.Parameter:
    made = nn.Parameter(wrap(torch.ones(3, 2), mesh))
    made.grad = wrap(torch.ones(3, 2), mesh)
    return made


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", WRITES)
def test_every_write_is_counted(mesh: DeviceMesh, name: str, inference: bool) -> None:
    """A write through any alias, by any kind of operation, moves the epoch."""
    tensor = parameter(mesh)
    aliases = [tensor.detach(), tensor.data]
    before, values = [t.epoch for t in (tensor, *aliases)], tensor.full_tensor().clone()
    with torch.inference_mode() if inference else torch.no_grad():
        WRITES[name](tensor)
    assert not torch.equal(tensor.full_tensor(), values) or name == "copy_"
    assert all(t.epoch > b for t, b in zip((tensor, *aliases), before, strict=True))


@pytest.mark.parametrize("name", READS)
def test_no_read_is_counted(mesh: DeviceMesh, name: str) -> None:
    """Reading, copying and aliasing leave the epoch."""
    tensor = parameter(mesh)
    before = tensor.epoch
    with torch.no_grad():
        READS[name](tensor)
    assert tensor.epoch == before


def test_neighbours_in_one_buffer_are_counted_apart(mesh: DeviceMesh) -> None:
    """A write to one weight of a flat buffer does not move another's epoch."""
    flat = torch.zeros(12)
    one, other = wrap(flat[:6].view(3, 2), mesh), wrap(flat[6:].view(3, 2), mesh)
    one.to_local().add_(1)
    one.add_(1)
    torch._foreach_add_([one], 1)
    assert other.epoch == 0
    assert flat.sum() == 18


def test_a_counter_can_be_shared_by_hand(mesh: DeviceMesh) -> None:
    """Tensors given the same counter see each other's writes by dispatch."""
    writes = WriteCounter()
    one, other = (wrap(torch.ones(3, 2), mesh, writes=writes) for _ in range(2))
    one.add_(1)
    assert (one.epoch, other.epoch) == (1, 1)


def test_a_failed_write_counts(mesh: DeviceMesh) -> None:
    """What failed half way may have written; it moves the epoch."""
    tensor = wrap(torch.ones(3, 2, dtype=torch.int64), mesh)
    with pytest.raises(RuntimeError, match="cast"):
        tensor.add_(0.5)
    assert tensor.epoch == 1


# -- parameters, autograd, attributes ---------------------------------------------------------


def test_a_parameter_over_it_is_an_alias(mesh: DeviceMesh) -> None:
    """nn.Parameter gives a sharded leaf that shares memory, counter and name."""
    tensor = wrap(torch.ones(3, 2), mesh)
    made = nn.Parameter(tensor)
    assert type(made) is ShardedTensor
    assert isinstance(made, nn.Parameter)
    assert made.is_leaf
    assert made.requires_grad
    assert made.requires_grad_(False) is made
    assert made.writes is tensor.writes
    assert made.to_local().data_ptr() == tensor.to_local().data_ptr()
    assert "'weight'" in repr(made)


def test_gradients_are_assigned_and_cleared(mesh: DeviceMesh) -> None:
    """.grad takes a sharded tensor; zero_grad clears it either way."""
    made = parameter(mesh)
    optimizer = torch.optim.SGD([made], lr=0.1)
    grad = made.grad
    optimizer.zero_grad(set_to_none=False)
    assert made.grad is grad
    assert made.grad.sum() == 0
    optimizer.zero_grad()
    assert made.grad is None


def test_assigning_data_is_an_error(mesh: DeviceMesh) -> None:
    """p.data = x, a silent no-op on DTensors, says what to do instead."""
    made = parameter(mesh)
    with pytest.raises(UnsupportedError, match=r"'weight'.*copy_"):
        made.data = torch.zeros(3, 2)
    assert made.sum() == 6


def test_hooks_go_to_the_full_parameter(mesh: DeviceMesh) -> None:
    """register_hook is forwarded to where gradients are computed."""
    made, full = parameter(mesh), nn.Parameter(torch.ones(3, 2))
    made._hook_target = full
    handle = made.register_hook(lambda grad: grad * 3)
    full.sum().backward()
    assert full.grad is not None
    assert full.grad.sum() == 18
    handle.remove()
    full.grad = None
    full.sum().backward()
    assert full.grad.sum() == 6


def test_hooks_that_would_never_run_are_refused(mesh: DeviceMesh) -> None:
    """A hook on the rows at rest is an error, not silence; on a result of theirs it runs."""
    made = parameter(mesh)
    with pytest.raises(UnsupportedError, match=r"'weight'.*register_hook"):
        made.register_hook(lambda grad: None)
    with pytest.raises(UnsupportedError, match="register_post_accumulate_grad_hook"):
        made.register_post_accumulate_grad_hook(lambda tensor: None)
    seen: list[Tensor] = []
    squares = made * made
    squares.register_hook(seen.append)
    squares.sum().backward()
    assert len(seen) == 1


def test_gradients_of_penalties_accumulate(mesh: DeviceMesh) -> None:
    """A penalty on the weight at rest leaves a sharded gradient, added to what was there."""
    made = parameter(mesh)
    (made**2).sum().backward()
    assert type(made.grad) is ShardedTensor
    assert made.grad.full_tensor().tolist() == [[3.0, 3.0]] * 3


def test_deepcopy_is_independent(mesh: DeviceMesh) -> None:
    """A deep copy has its own rows, counter and gradient, and the attributes of the original."""
    made = parameter(mesh)
    made.note = ["kept"]
    made._owner = object()
    made._hook_target = torch.ones(1)
    again = copy.deepcopy(made)
    with torch.no_grad():
        again.add_(1)
        again.grad.add_(1)
    assert (made.sum(), again.sum()) == (6, 12)
    assert (made.grad.sum(), again.grad.sum()) == (6, 12)
    assert (made.epoch, again.epoch) == (0, 1)
    assert isinstance(again, nn.Parameter)
    assert again.requires_grad
    assert (again._owner, again._hook_target) == (None, None)
    assert again.note == ["kept"]
    assert again.note is not made.note


def test_aliases_copied_together_stay_aliases(mesh: DeviceMesh) -> None:
    """Tied weights are still tied in a deep copy."""
    made = parameter(mesh)
    first, second, other = copy.deepcopy([made, made, made.detach()])
    assert first is second
    with torch.no_grad():
        first.add_(1)
    assert other.sum() == 12
    assert other.epoch == first.epoch


def test_results_in_autograd_cannot_be_copied(mesh: DeviceMesh) -> None:
    """As for plain tensors, only graph leaves can be deep-copied."""
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(parameter(mesh) * 2)


def test_saving_one_ranks_rows_is_refused(mesh: DeviceMesh) -> None:
    """torch.save and pickle name what to use instead."""
    for save in (lambda t: torch.save(t, io.BytesIO()), pickle.dumps):
        with pytest.raises(UnsupportedError, match="full_state_dict"):
            save(parameter(mesh))


def test_it_cannot_be_traced(mesh: DeviceMesh) -> None:
    """torch.compile raises rather than write weights unseen."""

    @torch.compile(backend="eager")
    def double(tensor: Tensor) -> Tensor:
        return tensor.mul_(2)

    tensor = wrap(torch.ones(3, 2), mesh)
    with pytest.raises(Exception, match="tracing"):
        double(tensor)
    assert tensor.sum() == 6


@pytest.mark.parametrize("layout", ["split", "whole"])
def test_reads_give_memory_of_their_own(mesh: DeviceMesh, layout: str) -> None:
    """full_tensor is a fresh plain tensor also where this rank holds everything."""
    placements = [split_of([3])] if layout == "split" else [Replicate()]
    local = torch.ones(3, 2)
    tensor = ShardedTensor.wrap(
        local, shape=(3, 2), mesh=mesh, placements=placements, name="weight"
    )
    full = tensor.full_tensor()
    assert type(full) is Tensor
    full.zero_()
    assert tensor.sum() == 6


def test_meta_tensors_have_no_values_to_gather(mesh: DeviceMesh) -> None:
    """On meta, shapes are computed without communication."""
    tensor = wrap(torch.ones(3, 2, device="meta"), mesh)
    assert (tensor * 2).full_tensor().shape == (3, 2)
    assert tensor.full_tensor().is_meta
    assert tensor.sum().is_meta


def test_memory_that_is_not_there_is_not_handed_out(mesh: DeviceMesh) -> None:
    """Methods that bypass dispatch are refused by name."""
    tensor = wrap(torch.ones(3, 2), mesh)
    for name in ("data_ptr", "untyped_storage", "numpy", "tolist", "share_memory_", "__dlpack__"):
        with pytest.raises(UnsupportedError, match=rf"'weight': {name}"):
            getattr(tensor, name)()


# -- the tables -------------------------------------------------------------------------------


def test_every_named_operation_exists() -> None:
    """A name in the tables is an operation of this version of PyTorch, and is handled."""
    packets = {
        *(f"{name}" for name in ELEMENTWISE),
        *(f"_foreach_{name}" for name in FOREACH),
        *FUSED,
        *RANDOM,
        *(name.partition(".")[0] for name in {**MEMORY_OPERATIONS, **_REDUCTIONS, **_OTHERS}),
        *(name.partition(".")[0] for name in ELEMENTWISE_OVERLOADS),
    }
    missing = sorted(
        name for name in packets if not (hasattr(aten, name) or hasattr(aten, f"{name}_"))
    )
    assert missing == []


def test_elementwise_operations_take_no_dims_or_indices() -> None:
    """No overload that an elementwise name stands for works on a dim or an index."""
    suspicious = {"dim", "dims", "index", "indices", "axis", "keepdim", "size", "generator"}
    packets = [*ELEMENTWISE, *(f"{n}_" for n in ELEMENTWISE), *(f"_foreach_{n}" for n in FOREACH)]
    for name in packets:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            operation = getattr(packet, overload)
            names = {argument.name for argument in operation._schema.arguments}
            assert not names & suspicious, operation


def test_step_counts_are_where_fused_optimizers_take_them() -> None:
    """The argument that may be plain in a fused step is the list of step counts."""
    for name, position in FUSED.items():
        arguments = [a.name for a in getattr(aten, name).default._schema.arguments]
        assert (
            arguments.index("state_steps") == position
            if position
            else ("state_steps" not in arguments)
        )


def test_operations_of_others_are_refused(mesh: DeviceMesh) -> None:
    """A custom operation is not taken for elementwise, whatever its name."""
    library = torch.library.Library("polyshard_test", "DEF")
    library.define("add(Tensor x) -> Tensor")
    library.impl("add", lambda x: x + 1, "CompositeExplicitAutograd")
    with pytest.raises(UnsupportedError, match="'weight'"):
        torch.ops.polyshard_test.add(wrap(torch.ones(3, 2), mesh))


def test_handlers_exist_for_every_overload() -> None:
    """Choosing a handler never fails, also for overloads that write lists to out."""
    for name in ("_foreach_add", "add", "sum", "max", "norm", "copy_", "_fused_adamw_"):
        packet = getattr(aten, name)
        assert all(callable(choose(getattr(packet, o))) for o in packet.overloads())


# -- where dispatch is not honoured -----------------------------------------------------------


def test_this_torch_honours_dispatch() -> None:
    """The probe finds what torch 2.12 and later do: run a subclass's own dispatch."""
    assert dispatch_is_honoured()


def test_the_probe_notices_a_torch_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sends every DTensor to its own dispatch is recognised."""
    made = Tensor._dtensor__new__

    def always_dtensor(cls: type, *args: Any, **kwargs: Any) -> DTensor:
        return made(DTensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "_dtensor__new__", always_dtensor)
    dispatch_is_honoured.cache_clear()
    try:
        assert not dispatch_is_honoured()
    finally:
        monkeypatch.undo()
        dispatch_is_honoured.cache_clear()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch whose dispatch is not honoured: reaching it at all is a failure."""

    def reached(cls: type, func: Any, *args: Any) -> None:
        raise AssertionError(f"{func} reached a dispatch that is not there")

    monkeypatch.setattr(sharded_tensor_module, "dispatch_is_honoured", lambda: False)
    monkeypatch.setattr(ShardedTensor, "__torch_dispatch__", classmethod(reached))
    yield
    if "__torch_function__" in vars(ShardedTensor):
        del ShardedTensor.__torch_function__


@pytest.mark.parametrize(
    "way",
    [{"foreach": False}, {"foreach": True}, {"fused": True}],
    ids=["single", "foreach", "fused"],
)
@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "Adagrad",
        "Adadelta",
        "ASGD",
    ],
)
@pytest.mark.usefixtures("blind")
def test_optimizers_without_dispatch(mesh: DeviceMesh, name: str, way: dict[str, Any]) -> None:
    """Where dispatch is not honoured, elementwise optimizers step and resume as always."""
    kind = getattr(torch.optim, name)
    given = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}
    if not set(way) <= set(inspect.signature(kind).parameters):
        with pytest.raises(TypeError):
            kind([torch.ones(1)], **way)
        return
    start = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    plain, sharded = nn.Parameter(start.clone()), nn.Parameter(wrap(start.clone(), mesh))
    assert "__torch_function__" in vars(ShardedTensor)
    results = []
    for weight, place in ((plain, Tensor.clone), (sharded, lambda t: wrap(t.clone(), mesh))):
        optimizer = kind([weight], **given, **way)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            weight.grad = place(torch.randn(3, 2, generator=generator))
            optimizer.step()
            if step == 1:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = kind([weight], **given, **way)
                optimizer.load_state_dict(state)
            optimizer.zero_grad(set_to_none=False)
        results.append(weight.detach())
    assert sharded.epoch > 0
    torch.testing.assert_close(results[1].to_local(), results[0])


@pytest.mark.usefixtures("blind")
def test_without_dispatch_the_rest_is_refused(mesh: DeviceMesh) -> None:
    """Where dispatch is not honoured, nothing else runs, nor anything that needs gradients."""
    made = nn.Parameter(wrap(torch.ones(3, 2), mesh))
    full = made.detach()
    for operation in (
        lambda t: t.sum(),
        lambda t: t[0],
        lambda t: t.T,
        lambda t: t @ torch.ones(2, 2),
        lambda t: t.normal_(),
        lambda t: torch.where(t),
        lambda t: t + torch.ones(3, 2),
        lambda t: torch.ones(3, 2).type_as(t),
        lambda t: torch._foreach_norm([t]),
        lambda t: t.__setitem__(0, 1.0),
    ):
        with pytest.raises(UnsupportedError, match="'weight'"):
            operation(full)
    with pytest.raises(UnsupportedError, match="gradients"):
        made * 2
    assert made.shape == (3, 2)
    assert full.full_tensor().sum() == 6
    assert torch.where(full.gt(0), full, 0.0).to_local().sum() == 6
    assert torch.add(full, 1, out=full.clone()).to_local().sum() == 12
    assert full.to(torch.float64).dtype == torch.float64
    assert full.to(torch.float32) is full
    assert "'weight'" in repr(made)
    assert copy.deepcopy(made).to_local().sum() == 6
