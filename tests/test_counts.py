"""What a strategy holds and sends is counted, and equals the formulas of docs/strategies.md."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest
import torch
from strategies import STRATEGIES
from strategy_formulas import DOCUMENT, Book, Group
from torch import Tensor, nn
from training import Training, make_model, shard, train_sharded
from watched_gloo import WatchedGloo

from polyshard import MixedPrecisionPolicy, microbatch
from polyshard.context import unit_of
from polyshard.testing import run_ranks
from polyshard_gloo import GlooBackend

PRESETS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")
TWO_AXES = ("hsdp", "hfsdp")
UNEQUAL = (2, 3)  # no formula can take one of its axes for the other
VOCABULARY, WIDTH = 11, 6

Shape = tuple[int, ...]

# dtype of the parameters, policy, and the letters that the document gives the dtypes' sizes
POLICIES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy | None, dict[str, int]]] = {
    "fp32": (torch.float32, None, {"m": 4, "c": 4, "a": 4, "t": 4}),
    "bf16": (
        torch.bfloat16,
        MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16),
        {"m": 4, "c": 2, "a": 4, "t": 2},
    ),
}


class Block(nn.Module):
    """Lengths that do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 9)
        self.narrow = nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(x)))


class Chain(nn.Module):
    """The model of the document's example."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Counted:
    """What one rank held at moments of two steps, and what it moved in each, first values apart.

    Bytes by kind of buffer, as `watched_gloo` names them; (calls, bytes) by kind of collective.
    """

    units: list[list[Group]]  # the root first
    held: dict[str, Counter[str]] = field(default_factory=dict)
    most: dict[str, Counter[str]] = field(default_factory=dict)
    moved: list[dict[str, tuple[int, int]]] = field(default_factory=list)


def letters(
    shape: Shape, units: int, microbatches: int, policy: str, *, scoped: bool, reshard: bool
) -> dict[str, int]:
    """The document's letters that do not depend on the group."""
    return {
        "n": prod(shape),
        "o": shape[0],
        "i": shape[-1],
        "M": microbatches,
        "W": 1 if scoped else microbatches,
        "G": 2 if reshard else 1,
        "U": units,
        **POLICIES[policy][2],
    }


def groups_of(model: nn.Module) -> list[list[Group]]:
    """The groups of each unit, as they are."""
    return [
        [
            Group(group.layout.padded_numel, len(group.parameters), bool(group.gradients.expected))
            for group in unit.groups
        ]
        for child in model.modules()
        if (unit := unit_of(child)) is not None
    ]


def moved_by(model: Any) -> dict[str, tuple[int, int]]:
    traffic = model.fsdp_context.traffic()
    return {kind: (traffic.calls[kind], traffic.bytes[kind]) for kind in traffic.calls}


# -- memory -------------------------------------------------------------------------------------


def count(
    rank: int, strategy: str, shape: Shape, policy: str, scoped: bool, reshard: bool
) -> Counted:
    """Two steps of two microbatches each."""
    dtype, precision, _ = POLICIES[policy]
    backend = WatchedGloo()
    ledger = backend.ledger
    model = Chain().to(dtype)
    shard(
        model,
        STRATEGIES[strategy].mesh(shape),
        STRATEGIES[strategy].placements,
        mixed_precision_policy=precision,
        reshard_after_forward=reshard,
        backend=backend,
    )
    counted = Counted(groups_of(model))
    optimizer = torch.optim.SGD(model.parameters())
    for step in ("first", "second"):
        counted.held[f"{step} step, before"] = Counter(ledger.now)
        for micro in ("first", "last"):
            moment = f"{step} step, {micro} microbatch"
            tokens = torch.randint(VOCABULARY, (2, 3))
            ledger.restart()
            with microbatch(model, is_last=micro == "last") if scoped else nullcontext():
                loss = model(tokens).float().sum()
            counted.most[f"{moment}, forward"] = Counter(ledger.most)
            counted.held[f"{moment}, forward"] = Counter(ledger.now)
            ledger.restart()
            loss.backward()
            counted.most[f"{moment}, backward"] = Counter(ledger.most)
            counted.held[f"{moment}, backward"] = Counter(ledger.now)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counted.moved.append(moved_by(model))
    return counted


def expected_memory(
    counted: Counted, book: Book, *, scoped: bool, reshard: bool
) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
    """What the document says is held, and held at most, at the moments of ``count``."""
    every = [group for groups in counted.units for group in groups]
    (root,), (block,) = counted.units[:2]
    # The root, the unit that computes, and one more: ahead of it, or being reduced behind it.
    in_pass = [root, block, block]
    main = Counter(main=book.total("main weights", every))
    copies = Counter(copies=book.total("copies", every))
    gathered = Counter(gathered=book.total("gathered", in_pass if reshard else every))
    kept = Counter() if reshard else gathered
    inputs = Counter({"reduce input": book.total("reduce input", in_pass)})
    landing, last_landing, staged = (
        Counter({kind: max(book(quantity, group) for group in every)})
        for kind, quantity in (
            ("landing", "landing"),
            ("landing", "last landing"),
            ("staged", "staged"),
        )
    )
    # Where nothing is reduced before the end, gradients are packed where they add up.
    summed = "reduce output" if +inputs else "reduce input"
    accumulators = Counter({summed: book.total("accumulators", every)})
    becomes_gradient = accumulators.total() == book.total("gradients", every)
    gradients = Counter(
        {summed if becomes_gradient else "reduce output": book.total("gradients", every)}
    )
    sums = +accumulators or gradients

    held, most = {}, {}
    for step in ("first", "second"):
        held[f"{step} step, before"] = main
        for micro in ("first", "last"):
            moment = f"{step} step, {micro} microbatch"
            is_final = micro == "last" or not scoped
            so_far = Counter() if micro == "first" else sums if scoped else gradients
            before = main + so_far
            most[f"{moment}, forward"] = before + copies + gathered
            held[f"{moment}, forward"] = before + copies + kept
            backward = main + copies + gathered + inputs + accumulators
            if is_final and +accumulators:
                adds = micro == "last" and not scoped
                backward += staged + (last_landing if adds else Counter())
                backward += gradients if adds or not becomes_gradient else Counter()
            elif not +accumulators:
                backward += gradients
            if micro == "last" and (scoped or not +accumulators):
                backward += landing
            most[f"{moment}, backward"] = backward
            held[f"{moment}, backward"] = main + (gradients if is_final else sums + copies)
    return held, most


@pytest.mark.parametrize(
    ("scoped", "reshard"),
    [(True, True), (False, True), (True, False)],
    ids=["scoped", "unscoped", "kept-gathered"],
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", PRESETS)
def test_memory_is_what_the_document_says(
    strategy: str, policy: str, scoped: bool, reshard: bool
) -> None:
    """Between steps, inside a window and at their peaks, buffers hold what the formulas say."""
    shape = UNEQUAL if strategy in TWO_AXES else (2,)
    book = Book(strategy, letters(shape, 4, 2, policy, scoped=scoped, reshard=reshard))
    for counted in run_ranks(prod(shape), count, strategy, shape, policy, scoped, reshard):
        held, most = expected_memory(counted, book, scoped=scoped, reshard=reshard)
        assert {moment: +counter for moment, counter in counted.held.items()} == held
        assert {moment: +counter for moment, counter in counted.most.items()} == most


# -- traffic ------------------------------------------------------------------------------------


def count_traffic(
    rank: int, strategy: str, shape: Shape, microbatches: int, scoped: bool, reshard: bool
) -> Counted:
    """Two steps of a model with frozen, unused and tied parameters."""
    mesh = STRATEGIES[strategy].mesh(shape)
    model = make_model(blocks=2)
    shard(
        model,
        mesh,
        STRATEGIES[strategy].placements,
        reshard_after_forward=reshard,
        backend=GlooBackend(),  # whose connections no other model has used
    )
    counted = Counted(groups_of(model), moved=[moved_by(model)])
    for _ in range(2):
        how = Training(steps=1, microbatches=microbatches, scoped=scoped)
        train_sharded(model, how, rank, mesh.size())
        counted.moved.append(moved_by(model))
    return counted


def expected_traffic(
    units: list[list[Group]], book: Book, *, steps: int
) -> dict[str, tuple[int, int]]:
    """(calls, bytes) by kind after ``steps``, according to the document."""
    every = [group for groups in units for group in groups]
    trainable = [group for group in every if group.trainable]
    last = "all_reduce" if book.strategy in ("ddp", "hsdp") else "reduce_scatter"
    calls, sent = Counter[str](), Counter[str]()
    for kind, groups, quantity, bytes_quantity in (
        ("all_gather", every, "gathers of copies", "bytes of copies"),
        ("all_gather", every, "gathers", "gathered bytes"),
        ("reduce_scatter", trainable, "reductions", "reduced bytes"),
        (last, trainable, "last reductions", "last reduced bytes"),
    ):
        calls[kind] += steps * book.total(quantity, groups)
        sent[kind] += steps * book.total(bytes_quantity, groups)
    calls["broadcast"] += book.total("first values", every) + min(steps, 1) * book("order")
    sent["broadcast"] += book.total("bytes of first values", every)
    sent["broadcast"] += min(steps, 1) * book("bytes of the order")
    return {kind: (number, sent[kind]) for kind, number in calls.items() if number}


@pytest.mark.parametrize(
    ("ranks", "microbatches", "scoped", "reshard"),
    [(2, 1, False, True), (4, 3, True, True), (2, 3, False, True), (2, 2, True, False)],
    ids=["one-microbatch", "scoped", "unscoped", "kept-gathered"],
)
@pytest.mark.parametrize("strategy", PRESETS)
def test_traffic_is_what_the_document_says(
    strategy: str, ranks: int, microbatches: int, scoped: bool, reshard: bool
) -> None:
    """A step sends the bytes and calls the collectives that the formulas say, and so does the
    next; what happens once happens once."""
    shape = UNEQUAL if strategy in TWO_AXES else (ranks,)
    values = letters(shape, 3, microbatches, "fp32", scoped=scoped, reshard=reshard)
    book = Book(strategy, values)
    for counted in run_ranks(
        prod(shape), count_traffic, strategy, shape, microbatches, scoped, reshard
    ):
        assert any(not group.trainable for groups in counted.units for group in groups)
        for steps, moved in enumerate(counted.moved):
            assert moved == expected_traffic(counted.units, book, steps=steps)


# -- the example --------------------------------------------------------------------------------


def example_rows(units: dict[str, list[list[Group]]], books: dict[str, Book]) -> list[str]:
    """The example's table as the document has to have it, computed from its formulas."""
    cells: dict[str, list[int]] = {}
    step = "first step"
    for strategy, book in books.items():
        held, most = expected_memory(Counted(units[strategy]), book, scoped=True, reshard=True)
        moved = [expected_traffic(units[strategy], book, steps=steps) for steps in (1, 2)]
        one, two = (sum(calls for calls, _ in kinds.values()) for kinds in moved)
        sent_in_one, sent_in_two = (sum(sent for _, sent in kinds.values()) for kinds in moved)
        for title, value in {
            "`P` of the root": units[strategy][0][0].numel,
            "`P` of each block": units[strategy][1][0].numel,
            "held between steps, gradients cleared": held[f"{step}, before"].total(),
            "held between steps with gradients": held[f"{step}, last microbatch, backward"].total(),
            "held between microbatches": held[f"{step}, first microbatch, backward"].total(),
            "held at most in a first forward": most[f"{step}, first microbatch, forward"].total(),
            "held at most in a last backward": most[f"{step}, last microbatch, backward"].total(),
            "sent in a step": sent_in_two - sent_in_one,
            "collectives in a step": two - one,
            "sent once": 2 * sent_in_one - sent_in_two,
            "collectives once": 2 * one - two,
        }.items():
            cells.setdefault(title, []).append(value)
    return [f"| {title} | {' | '.join(map(str, values))} |" for title, values in cells.items()]


def test_the_example_is_what_is_counted() -> None:
    """Every number of the document's example follows from its formulas and from a count."""
    units, books = {}, {}
    for strategy in PRESETS:
        shape = (2, 2) if strategy in TWO_AXES else (4,)
        book = Book(strategy, letters(shape, 4, 2, "bf16", scoped=True, reshard=True))
        counted = run_ranks(4, count, strategy, shape, "bf16", True, True)[0]
        for steps, moved in enumerate(counted.moved, start=1):
            assert moved == expected_traffic(counted.units, book, steps=steps)
        held, most = expected_memory(counted, book, scoped=True, reshard=True)
        assert {moment: +counter for moment, counter in counted.held.items()} == held
        assert {moment: +counter for moment, counter in counted.most.items()} == most
        units[strategy], books[strategy] = counted.units, book
    example = DOCUMENT.read_text().partition("## An example")[2]
    shown = [line for line in example.splitlines() if re.search(r"\d \|$", line)]
    assert shown == example_rows(units, books)
