"""explain on several ranks: what one rank says of all of them is what each of them holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from strategies import STRATEGIES
from strategy_formulas import Book, Group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from training import loss_of, make_batches, make_model, shard
from watched_gloo import WatchedGloo

from polyshard import MixedPrecisionPolicy, Placements, explain, fully_shard, microbatch
from polyshard.context import unit_of
from polyshard.explain import Explanation
from polyshard.explained import ExplainedUnit
from polyshard.testing import run_ranks

PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")
TWO_AXES = ("hsdp", "hfsdp")
ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "layout.svg"

#: dtype of the parameters, policy, and the letters that docs/strategies.md gives the sizes.
POLICIES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy, dict[str, int]]] = {
    "fp32": (torch.float32, MixedPrecisionPolicy(), {"m": 4, "c": 4, "a": 4, "t": 4}),
    "bf16": (
        torch.bfloat16,
        MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16),
        {"m": 4, "c": 2, "a": 4, "t": 2},
    ),
}

Rows = dict[str, tuple[int, int]]


def rows_here(model: nn.Module) -> Rows:
    """The rows of every main weight that this rank has, by the first name."""
    return {
        f"{path}.{parameter.name}" if path else parameter.name: group.main.rows(index)
        for path, child in model.named_modules()
        if (unit := unit_of(child)) is not None
        for group in unit.groups
        for index, parameter in enumerate(group.parameters)
    }


def rows_told(units: Sequence[ExplainedUnit], rank: int) -> Rows:
    return {
        tensor.names[0]: tensor.rows[rank]
        for unit in units
        for group in unit.groups
        for tensor in group.tensors
    }


def rows_and_words(rank: int, strategy: str, shape: Sequence[int]) -> tuple[Rows, list[Rows], str]:
    """The rows this rank has, those it says that each rank has, and all that it says."""
    chosen = STRATEGIES[strategy]
    mesh = chosen.mesh(shape)
    model = make_model()
    shard(model, mesh, chosen.placements)
    found = explain(model)
    told = [rows_told(found.units, other) for other in range(dist.get_world_size())]
    return rows_here(model), told, f"{found}\n{found.svg()}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_every_rank(strategy: str) -> None:
    """Every rank knows the rows of all, and all say the same."""
    axes = len(STRATEGIES[strategy].placements.dp_axes)
    shape = {1: (2,), 2: (2, 2), 3: (2, 2, 1)}[axes]
    results = run_ranks(2 if axes == 1 else 4, rows_and_words, strategy, shape)
    here = [rows for rows, _, _ in results]
    for _, told, words in results:
        assert told == here
        assert words == results[0][2]
    if strategy != "ddp" and strategy != "hsdp":
        assert len({str(rows) for rows in here}) == len(results)


def held_by(
    rank: int, strategy: str, policy: str
) -> tuple[Explanation, dict[str, int], list[tuple[int, int]]]:
    """What is told, what buffers hold at some moments, and what units hold inside of a forward."""
    dtype, precision, _ = POLICIES[policy]
    backend, chosen = WatchedGloo(), STRATEGIES[strategy]
    model = make_model(dtype)
    mesh = chosen.mesh((2, 2) if strategy in TWO_AXES else None)
    shard(model, mesh, chosen.placements, mixed_precision_policy=precision, backend=backend)
    inside: list[tuple[int, int]] = []

    def look(block: nn.Module, *_args: object) -> None:
        unit = unit_of(block)
        assert unit is not None
        storages = {
            id(buffer): buffer.flat.untyped_storage().nbytes()
            for group in unit.groups
            for buffer in (group.main, group.model, group.full)
        }
        told = explain(block).bytes
        inside.append((sum(storages.values()), told.between_steps + told.copies + told.gathered))

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    held, ledger = {"at rest": backend.ledger.now.total()}, backend.ledger
    tokens, targets = make_batches(1, 1, dist.get_world_size())
    inputs = (tokens[0, 0, rank], targets[0, 0, rank])
    with microbatch(model, is_last=False):
        loss_of(model, *inputs).backward()
    held["between microbatches"] = ledger.now.total()
    model.zero_grad()
    loss_of(model, *inputs).backward()
    held["with gradients"] = ledger.now.total()
    model.zero_grad()
    held["after a step"] = ledger.now.total()
    ledger.restart()
    loss = loss_of(model, *inputs)
    held["gathered in forward"] = ledger.most["gathered"]
    ledger.restart()
    loss.backward()
    held["gathered in backward"] = ledger.most["gathered"]
    return explain(model), held, inside


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", PRESETS)
def test_bytes(strategy: str, policy: str) -> None:
    """Bytes are those of the formulas in docs/strategies.md, and those that buffers hold."""
    ranks = 4 if strategy in TWO_AXES else 2
    letters = {"n": ranks, "o": 2, "i": 2, **POLICIES[policy][2]}
    book = Book(strategy, letters)
    for found, held, inside in run_ranks(ranks, held_by, strategy, policy):
        for unit in found.units:
            for group in unit.groups:
                counted = Group(group.padded_numel, len(group.tensors))
                assert group.bytes.main == book("main weights", counted)
                assert group.bytes.copies == book("copies", counted)
                assert group.bytes.gathered == book("gathered", counted)
                assert group.bytes.kept == 0
                if group.trainable:
                    assert group.bytes.gradients == book("gradients", counted)
                    assert group.bytes.accumulators == book("accumulators", counted)
                else:
                    assert group.bytes.gradients == group.bytes.accumulators == 0
        total = found.bytes
        window = total.accumulators or total.gradients
        assert held["at rest"] == held["after a step"] == total.between_steps
        assert held["between microbatches"] == total.between_steps + total.copies + window
        assert held["with gradients"] == total.between_steps + total.gradients
        (order,) = found.orders
        assert held["gathered in forward"] == order.most_gathered_forward
        assert held["gathered in backward"] == order.most_gathered_backward
        assert len(inside) == 9
        for measured, told in inside:
            assert measured == told


def looked_at_by_one(rank: int) -> bool:
    model = make_model()
    shard(model, STRATEGIES["zero3"].mesh(), STRATEGIES["zero3"].placements)
    before = model.fsdp_context.traffic()
    if rank == 1:
        assert "zero3 over dp" in str(explain(model))
    unmoved = model.fsdp_context.traffic() == before
    tokens, targets = make_batches(1, 1, dist.get_world_size())
    loss_of(model, tokens[0, 0, rank], targets[0, 0, rank]).backward()
    return unmoved


def test_one_rank_alone() -> None:
    """A rank may look while the others do not, moves nothing, and all train on."""
    assert run_ranks(2, looked_at_by_one) == [True, True]


def several_meshes(rank: int) -> tuple[list[tuple[object, ...]], tuple[str, ...]]:
    """A layer that is parallel over two ranks inside a model that two others replicate."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel()})
    fully_shard(model[1], mesh, Placements.zero3("dp"))
    fully_shard(model[0], everyone, Placements.zero1("all"))
    fully_shard(model[2], mesh, Placements.hsdp("tp", "dp"))
    found = explain(model)
    assert str(found)
    assert found.svg()
    facts = [
        (
            unit.axes,
            group.strategy,
            group.main_holders,
            *sorted((each.label, each.shape, each.local_shape, each.distribution)
                    for each in group.tensors),
        )
        for unit in found.units
        for group in unit.groups
    ]  # fmt: skip
    return facts, tuple(order.forward[0] for order in found.orders)


def test_several_meshes() -> None:
    """Each unit has its own mesh and strategy, and a parallel layer says what is laid out here."""
    for rank, (facts, roots) in enumerate(run_ranks(4, several_meshes)):
        column = rank % 2
        assert roots == ("0", "1", "2")
        assert facts == [
            (
                (("all", 4),),
                "zero1 over all",
                ((0,), (1,), (2,), (3,)),
                ("bias", (6,), (6,), ""),
                ("weight", (6, 3), (6, 3), ""),
            ),
            (
                (("dp", 2),),
                "zero3 over dp",
                ((column,), (column + 2,)),
                ("bias", (6,), (3,), "S(0) on tp"),
                ("weight", (6, 6), (3, 6), "S(0) on tp"),
            ),
            (
                (("tp", 2), ("dp", 2)),
                "hsdp over tp, dp",
                ((0, 1), (2, 3)),
                ("bias", (2,), (2,), ""),
                ("weight", (2, 6), (2, 6), ""),
            ),
        ]


def drawn_example(rank: int) -> str:
    """The picture of the example's model in zero3."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt_model import GPT, GPTConfig

    model = GPT(GPTConfig())
    chosen = STRATEGIES["zero3"]
    for module in (*model.blocks, model):
        fully_shard(module, chosen.mesh(), chosen.placements)
    return explain(model).svg()


def test_picture_of_the_documents(tmp_path: Path) -> None:
    """The picture in docs/strategies.md is what is drawn now."""
    drawn = tmp_path / PICTURE.name
    drawn.write_text(run_ranks(4, drawn_example)[0], encoding="utf-8")
    assert PICTURE.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8"), (
        f"look at {drawn}, and copy it to {PICTURE.relative_to(ROOT)} if it is as it should be"
    )
