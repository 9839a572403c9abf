"""Sharded tensors on one rank: what they share, what they count, and what they do not let pass."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from wrapped_tensors import aten, split_of, wrap

from polyshard.errors import PlacementError, UnsupportedError
from polyshard.row_split import Geometry
from polyshard.sharded_tensor import ShardedTensor, WriteCounter

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
