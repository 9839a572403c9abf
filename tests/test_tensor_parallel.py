"""Models that other parallelism has distributed already, sharded over the other axes of a mesh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import polyshard
from polyshard import MixedPrecisionPolicy, Placements, full_state_dict, fully_shard, microbatch
from polyshard.testing import run_ranks

WIDTH, HIDDEN, STEPS = 6, 10, 10


class Block(nn.Module):
    """A normalised MLP with a residual; ``up`` and ``down`` are made parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between layers that stay plain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def parallelized(model: Model, mesh: Any) -> Model:
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batches(replicas: int) -> Tensor:
    return torch.randn(STEPS, 2, replicas, 4, 3, generator=torch.Generator().manual_seed(3))


MESHES = {
    "zero3": ((2, 2), ("dp", "tp"), Placements.zero3("dp")),
    "zero1": ((2, 2), ("dp", "tp"), Placements.zero1("dp")),
    "ddp": ((2, 2), ("dp", "tp"), Placements.ddp("dp")),
    "zero3-last": ((2, 2), ("tp", "dp"), Placements.zero3(-1)),
    "hsdp": ((2, 2, 2), ("outer", "inner", "tp"), Placements.hsdp("outer", "inner")),
    "hfsdp": ((2, 2, 2), ("outer", "inner", "tp"), Placements.hfsdp("outer", "inner")),
}


def train(rank: int, case: str, how: str) -> tuple[list[float], dict[str, Tensor]]:
    """How a mesh is given: the whole, or as PyTorch's FSDP takes it, the part to shard over."""
    shape, names, placements = MESHES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = parallelized(make_model(), mesh)
    given = mesh
    if how == "part":
        given = mesh[tuple(name for name in names if name != "tp")]
        placements = Placements.zero3("dp") if case == "zero3-last" else placements
    policy = MixedPrecisionPolicy(compute_dtype=torch.float64) if how == "cast" else None
    for block in model.blocks:
        fully_shard(block, given, placements, mixed_precision_policy=policy)
    fully_shard(model, given, placements, mixed_precision_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    coordinate = dict(zip(names, mesh.get_coordinate(), strict=True))
    replicas = mesh.size() // 2
    axes = [name for name in names if name != "tp"]
    replica = 0
    for name in axes:
        replica = replica * mesh.size(names.index(name)) + coordinate[name]
    losses = []
    for step in batches(replicas):
        total = torch.zeros(())
        for micro in range(2):
            with microbatch(model, is_last=micro == 1):
                loss = model(step[micro, replica]).square().mean() / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / mesh.size())
    return losses, full_state_dict(model)


def train_plain(replicas: int) -> tuple[list[float], dict[str, Tensor]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in batches(replicas):
        loss = model(step.flatten(0, 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("case", "how"),
    [(case, "whole") for case in MESHES] + [("zero3", "part"), ("hsdp", "part"), ("zero3", "cast")],
)
def test_ten_steps_follow_a_plain_process(case: str, how: str) -> None:
    """Ten AdamW steps of a tensor-parallel model on a 2-D or 3-D mesh: losses within 1e-5, weights
    within 1e-4."""
    ranks = torch.Size(MESHES[case][0]).numel()
    expected_losses, expected = train_plain(ranks // 2)
    for losses, weights in run_ranks(ranks, train, case, how):
        assert losses == pytest.approx(expected_losses, abs=1e-5)
        torch.testing.assert_close(weights, expected, atol=1e-4, rtol=0)


def look(rank: int, case: str, path: str) -> list[str]:
    """What is wrong with tensors that lie on dp and tp axes at once; names."""
    shape, names, placements = MESHES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain = make_model()
    model = parallelized(copy.deepcopy(plain), mesh)
    fully_shard(model, mesh, placements)
    data = batches(1)[0, 0, 0]
    for each in (model, plain):
        each(data).square().mean().backward()
    wrong = []

    def check(what: str, mine: object, theirs: object) -> None:
        try:
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
        except AssertionError as error:
            wrong.append(f"{what}: {error}")

    twins = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        for kind, mine, theirs in (
            ("weight", parameter.detach(), twins[name].detach()),
            ("grad", parameter.grad, twins[name].grad),
        ):
            what = f"{kind} of {name}"
            check(what, mine.full_tensor(), theirs)
            for reduce in (torch.sum, torch.mean, torch.linalg.vector_norm, torch.amax, torch.std):
                try:
                    check(f"{reduce.__name__} of {what}", reduce(mine), reduce(theirs))
                except polyshard.UnsupportedError:
                    assert reduce is torch.std
            check(f"count of {what}", torch.count_nonzero(mine), torch.count_nonzero(theirs))
            check(f"equal of {what}", torch.equal(mine, mine.clone()), True)
            check(f"copy of {what}", mine.clone().copy_(theirs * 2).full_tensor(), theirs * 2)
            check(
                f"arithmetic of {what}",
                (mine * 2 + mine.abs()).full_tensor(),
                2 * theirs + theirs.abs(),
            )
    mine, theirs = (list(each.parameters()) for each in (model, plain))
    check("foreach norms", torch._foreach_norm(mine, 2), torch._foreach_norm(theirs, 2))
    saved = {name: parameter.detach() for name, parameter in model.named_parameters()}
    dcp.save(saved, checkpoint_id=path)
    loaded = {name: torch.zeros_like(parameter) for name, parameter in twins.items()}
    dcp.load(loaded, checkpoint_id=path)
    for name, value in loaded.items():
        check(f"checkpoint of {name}", value, twins[name].detach())
    for value in saved.values():
        value.zero_()
    dcp.load(saved, checkpoint_id=path)
    for name, value in saved.items():
        check(f"loaded {name}", value.full_tensor(), twins[name].detach())
    return wrong


@pytest.mark.parametrize("case", ["zero3", "ddp", "hfsdp"])
def test_tensors_on_both_kinds_of_axes_do_not_lie(case: str, tmp_path: Path) -> None:
    """Whole values, reductions, copies and checkpoints are those of the whole tensors."""
    ranks = torch.Size(MESHES[case][0]).numel()
    assert run_ranks(ranks, look, case, str(tmp_path)) == [[]] * ranks


def make_chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))


def sequences() -> Tensor:
    """By dp rank, row and position."""
    return torch.randn(2, 3, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def sequence_parallel(rank: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_chain(), mesh["tp"], plan)
    fully_shard(model, mesh, Placements.zero3("dp"))
    mine = sequences()[mesh.get_local_rank("dp")].chunk(2, dim=1)[mesh.get_local_rank("tp")]
    model(mine).square().mean().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def test_gradients_that_other_axes_have_to_sum() -> None:
    """The norm saw a part of each sequence, so tensor parallelism leaves its gradient Partial: it
    is summed over that axis."""
    plain = make_chain()
    plain(sequences().flatten(0, 1)).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for found in run_ranks(4, sequence_parallel):
        torch.testing.assert_close(found, expected)
