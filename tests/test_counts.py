"""What a strategy holds and sends is counted, and equals the formulas of docs/strategies.md."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch
from strategy_formulas import DOCUMENT, Book, Group
from torch import Tensor, nn
from training import Training, make_mesh, make_model, shard, train_sharded
from watched_gloo import WatchedGloo

from polyshard import MixedPrecisionPolicy, Placements, microbatch
from polyshard.context import unit_of
from polyshard.testing import run_ranks

STRATEGIES = ("zero3", "ddp")
VOCABULARY, WIDTH = 11, 6

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
    """Lengths that do not divide by two."""

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


def count(rank: int, strategy: str, policy: str, scoped: bool, reshard: bool) -> Counted:
    """Two steps of two microbatches each."""
    dtype, precision, _ = POLICIES[policy]
    backend = WatchedGloo()
    ledger = backend.ledger
    model = Chain().to(dtype)
    shard(
        model,
        make_mesh(),
        getattr(Placements, strategy)("dp"),
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
    landing = Counter({"reduce output": max(book("landing", group) for group in every)})
    if book.strategy == "zero3":
        gradients = Counter({"reduce output": book.total("gradients", every)})
        inputs = Counter({"reduce input": book.total("reduce input", in_pass)})
    else:
        # Reduced in place, or through one group's worth of another dtype.
        gradients = Counter({"reduce input": book.total("gradients", every)})
        inputs = Counter({"reduce input": max(book("reduce input", group) for group in every)})
    contribution = Counter({"reduce input": book.total("contribution", every)})

    held, most = {}, {}
    for step in ("first", "second"):
        held[f"{step} step, before"] = main
        for micro in ("first", "last"):
            moment = f"{step} step, {micro} microbatch"
            is_final = micro == "last" or not scoped
            before = main + gradients if micro == "last" else main
            most[f"{moment}, forward"] = before + copies + gathered
            held[f"{moment}, forward"] = before + copies + kept
            backward = main + copies + gathered + gradients
            if book.strategy == "zero3" or is_final:
                backward += inputs
                if micro == "last" and (book.strategy == "zero3" or not scoped):
                    backward += contribution + landing
            most[f"{moment}, backward"] = backward
            held[f"{moment}, backward"] = main + gradients + (Counter() if is_final else copies)
    return held, most


@pytest.mark.parametrize(
    ("scoped", "reshard"),
    [(True, True), (False, True), (True, False)],
    ids=["scoped", "unscoped", "kept-gathered"],
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_what_the_document_says(
    strategy: str, policy: str, scoped: bool, reshard: bool
) -> None:
    """Between steps, inside a window and at their peaks, buffers hold what the formulas say."""
    book = Book(strategy, {"n": 2, "M": 2, "U": 4, **POLICIES[policy][2]})
    for counted in run_ranks(2, count, strategy, policy, scoped, reshard):
        held, most = expected_memory(counted, book, scoped=scoped, reshard=reshard)
        assert {moment: +counter for moment, counter in counted.held.items()} == held
        assert {moment: +counter for moment, counter in counted.most.items()} == most


# -- traffic ------------------------------------------------------------------------------------


def count_traffic(
    rank: int, strategy: str, microbatches: int, scoped: bool, reshard: bool
) -> Counted:
    """Two steps of a model with frozen, unused and tied parameters."""
    mesh = make_mesh()
    model = make_model()
    placements = getattr(Placements, strategy)("dp")
    shard(model, mesh, placements, reshard_after_forward=reshard)
    counted = Counted(groups_of(model), moved=[moved_by(model)])
    for _ in range(2):
        how = Training(steps=1, microbatches=microbatches, scoped=scoped)
        train_sharded(model, how, rank, mesh.size())
        counted.moved.append(moved_by(model))
    return counted


def expected_traffic(
    units: list[list[Group]], book: Book, *, steps: int, scoped: bool, reshard: bool
) -> dict[str, tuple[int, int]]:
    """(calls, bytes) by kind after ``steps``, according to the document."""
    every = [group for groups in units for group in groups]
    trainable = [group for group in every if group.trainable]
    gathers = Fraction(steps) if reshard else Fraction(steps, 2)
    reductions = steps * (book.letters["M"] if book.strategy == "ddp" and not scoped else 1)
    ordered = min(steps, 1)
    moved = {
        "all_gather": (
            gathers * book.total("gathers", every),
            gathers * book.total("gathered bytes", every),
        ),
        {"zero3": "reduce_scatter", "ddp": "all_reduce"}[book.strategy]: (
            reductions * book.total("reductions", trainable),
            reductions * book.total("reduced bytes", trainable),
        ),
        "broadcast": (
            book.total("first values", every) + ordered * book("order"),
            book.total("bytes of first values", every) + ordered * book("bytes of the order"),
        ),
    }
    return {kind: counted for kind, counted in moved.items() if counted != (0, 0)}


@pytest.mark.parametrize(
    ("ranks", "microbatches", "scoped", "reshard"),
    [(2, 1, False, True), (4, 3, True, True), (2, 3, False, True), (2, 2, True, False)],
    ids=["2-ranks", "4-ranks-scoped", "unscoped", "kept-gathered"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_is_what_the_document_says(
    strategy: str, ranks: int, microbatches: int, scoped: bool, reshard: bool
) -> None:
    """A step sends the bytes and calls the collectives that the formulas say, and so does the
    next; what happens once happens once."""
    letters = {"n": ranks, "M": microbatches, "U": 4, **POLICIES["fp32"][2]}
    book = Book(strategy, letters)
    for counted in run_ranks(ranks, count_traffic, strategy, microbatches, scoped, reshard):
        assert any(not group.trainable for groups in counted.units for group in groups)
        for steps, moved in enumerate(counted.moved):
            assert moved == expected_traffic(
                counted.units, book, steps=steps, scoped=scoped, reshard=reshard
            )


# -- the example --------------------------------------------------------------------------------


def example_rows(units: dict[str, list[list[Group]]], books: dict[str, Book]) -> list[str]:
    """The example's tables as the document has to have them, computed from its formulas."""
    cells: dict[str, list[int]] = {}
    step = "first step"
    for strategy, book in books.items():
        every = [group for groups in units[strategy] for group in groups]
        _, most = expected_memory(Counted(units[strategy]), book, scoped=True, reshard=True)
        moved = [
            expected_traffic(units[strategy], book, steps=steps, scoped=True, reshard=True)
            for steps in (1, 2)
        ]
        one, two = (sum(calls for calls, _ in kinds.values()) for kinds in moved)
        sent_in_one, sent_in_two = (sum(sent for _, sent in kinds.values()) for kinds in moved)
        at_rest = book.total("main weights", every)
        for title, value in {
            "held between steps, gradients cleared": at_rest,
            "held between steps with gradients": at_rest + book.total("gradients", every),
            "held at most in a first forward": most[f"{step}, first microbatch, forward"].total(),
            "held at most in a last backward": most[f"{step}, last microbatch, backward"].total(),
            "sent in a step": sent_in_two - sent_in_one,
            "collectives in a step": two - one,
            "sent once": 2 * sent_in_one - sent_in_two,
            "collectives once": 2 * one - two,
        }.items():
            cells.setdefault(title, []).append(int(value))
    sizes = [
        [str(groups[0].count), *(str(units[strategy][index][0].numel) for strategy in books)]
        for index, groups in enumerate(units["zero3"][:2])
    ]
    rows = [["root", *sizes[0]], ["each block", *sizes[1]]]
    rows += [[title, *map(str, values)] for title, values in cells.items()]
    return [f"| {' | '.join(row)} |" for row in rows]


def test_the_example_is_what_is_counted() -> None:
    """Every number of the document's example follows from its formulas and from a count."""
    letters = {"n": 2, "M": 2, "U": 4, **POLICIES["bf16"][2]}
    books = {strategy: Book(strategy, letters) for strategy in STRATEGIES}
    units = {}
    for strategy, book in books.items():
        counted = run_ranks(2, count, strategy, "bf16", True, True)[0]
        units[strategy] = counted.units
        for steps, moved in enumerate(counted.moved, start=1):
            expected = expected_traffic(counted.units, book, steps=steps, scoped=True, reshard=True)
            assert moved == expected
    example = DOCUMENT.read_text().partition("## An example")[2]
    shown = [line for line in example.splitlines() if re.search(r"\d \|$", line)]
    assert shown == example_rows(units, books)
