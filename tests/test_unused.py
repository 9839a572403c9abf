"""Parameters and units that no rank used, or only some: what their gradients are, and in which
order all ranks reduce."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from strategies import STRATEGIES
from torch import Tensor, nn
from watched_gloo import RestlessGloo

from polyshard import fully_shard, microbatch
from polyshard.testing import run_ranks

WIDTH = 3
NAMES = ["zero3", "ddp", "zero1", "hfsdp"]

#: For each rank, for each microbatch, which parts are used, in which order.
Plan = list[list[str]]


class Part(nn.Module):
    """A parameter that is always used and others by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, chosen: str) -> Tensor:
        x = x * self.always
        for letter in chosen:
            x = x * self.scale if letter == "s" else torch.tanh(self.get_submodule(letter)(x))
        return x


class Whole(nn.Module):
    """Parts in an order by choice, each used as chosen. ``plan`` says "part:what part"."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, plan: str) -> Tensor:
        for entry in plan.split():
            index, _, chosen = entry.partition(":")
            x = x + self.parts[int(index)](x, chosen)
        return x * self.gain


def make_whole() -> Whole:
    torch.manual_seed(3)
    return Whole()


def inputs(rank: int, micro: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + micro))


Grads = dict[str, Tensor | None]


def plain_grads(plans: list[Plan], before: Grads | None = None) -> Grads:
    """One process: the mean over the ranks of what each adds up, zero where a rank used nothing."""
    model = make_whole()
    for rank, plan in enumerate(plans):
        for micro, entry in enumerate(plan):
            (model(inputs(rank, micro), entry).sum() / len(plans)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@dataclass(frozen=True)
class Seen:
    grads: Grads
    again: Grads  # a second step, in which every part is used by every rank
    reductions: list[list[str]]  # labels, by step


EVERYTHING = "0:sab 1:sab 2:sab"


def sharded_grads(rank: int, strategy: str, plans: list[Plan], scoped: bool) -> Seen:
    # Lanes are late, and memory that holds nothing is NaN: what counts as zero has to be made so.
    backend, mesh, model = RestlessGloo(seed=rank), STRATEGIES[strategy].mesh(), make_whole()
    for module in (*model.parts, model):
        fully_shard(module, mesh, STRATEGIES[strategy].placements, backend=backend)
    results, reductions = [], []
    for plan in (plans[rank], [EVERYTHING]):
        before = len(backend.labels["reduce"])
        for micro, entry in enumerate(plan):
            with microbatch(model, is_last=not scoped or micro == len(plan) - 1):
                loss = model(inputs(rank, micro), entry).sum()
            loss.backward()
        results.append(full_grads(model))
        labels = backend.labels["reduce"][before:]
        reductions.append([label for label in labels if "reduce gradients" in label])
        model.zero_grad()
    return Seen(*results, reductions)


def full_grads(model: nn.Module) -> Grads:
    return {
        name: None if parameter.grad is None else parameter.grad.full_tensor()  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
    }


def check(plans: list[Plan], strategy: str, *, scoped: bool = True) -> list[Seen]:
    """Gradients of both steps against one process; the ranks reduce alike."""
    seen = run_ranks(len(plans), sharded_grads, strategy, plans, scoped)
    for expected, results in (
        (plain_grads(plans), [rank.grads for rank in seen]),
        (plain_grads([[EVERYTHING]] * len(plans)), [rank.again for rank in seen]),
    ):
        for grads in results:
            for name, value in expected.items():
                if value is None:
                    assert grads[name] is None, name
                else:
                    assert grads[name] is not None, name
                    torch.testing.assert_close(grads[name], value, msg=name)
    assert all(rank.reductions == seen[0].reductions for rank in seen)
    return seen


@pytest.mark.behaviour(11)
@pytest.mark.parametrize("strategy", NAMES)
def test_what_nobody_used_keeps_none(strategy: str) -> None:
    """Parameters inside an entered unit, and a whole unit, that no rank used keep grad None; in
    the next step they are as good as new."""
    plan = ["0:sa 1:b"]
    (seen, _) = check([plan, plan], strategy)
    unused = {name for name, grad in seen.grads.items() if grad is None}
    assert unused == {
        *(f"parts.0.b.{name}" for name in ("weight", "bias")),
        *(f"parts.1.a.{name}" for name in ("weight", "bias")),
        "parts.1.scale",
        *(name for name in seen.grads if name.startswith("parts.2")),
    }


@pytest.mark.behaviour(11)
@pytest.mark.parametrize("scoped", [True, False], ids=["scoped", "unscoped"])
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(
    "plans",
    [
        [["0:sa 1:b 2:"], ["0:b 1:sb 2:"]],
        [["0:s 1: 2:", "0:a 1: 2:"], ["0: 1:s 2:", "0: 1: 2:a"]],
        [["0:a 1: 2:a", "0: 1: 2:"], ["0: 1: 2:", "0: 1: 2:"]],
        [["0:a 1: 2:"], ["0:b 1: 2:"], ["0:s 1: 2:"], ["0: 1: 2:b"]],
    ],
    ids=["half-half", "by-microbatch", "first-microbatch-only", "four-ranks"],
)
def test_what_some_ranks_used_counts_as_zero_on_the_others(
    plans: list[Plan], strategy: str, scoped: bool
) -> None:
    """A parameter that only some ranks used, in one microbatch or another, has on all ranks the
    mean of what was contributed, nothing counting as zero."""
    check(plans, strategy, scoped=scoped)


@pytest.mark.behaviour(11)
@pytest.mark.parametrize("scoped", [True, False], ids=["scoped", "unscoped"])
@pytest.mark.parametrize(
    "plans",
    [
        [["0:a 1:a 2:a"], ["0:a 2:a"]],
        [["0:a"], ["2:a"]],
        [["0:a 1:a 2:a"], ["2:a 1:a 0:a"]],
        [["1:a 0:a 2:sa", "0:b 1:b"], ["2:a 1:a 0:a", "2:sab"]],
        [["0:s 1:s 2:s"], ["1:s 2:s 0:s"], ["2:s 0:s 1:s"], ["1:s"]],
    ],
    ids=["one-missing", "disjoint", "reversed", "by-microbatch", "four-ranks"],
)
def test_whole_units_may_be_used_by_some_ranks_and_in_any_order(
    plans: list[Plan], scoped: bool
) -> None:
    """With ddp, where nothing is gathered, ranks may enter other units, or the same ones in other
    orders: all reduce in one order and get the right numbers."""
    check(plans, "ddp", scoped=scoped)


@pytest.mark.parametrize(
    ("strategy", "elsewhere"), [("ddp", "0:sab 1:sab 2:sab"), ("zero3", "1:s 0:s 2:s")]
)
def test_the_order_of_the_first_backward_on_rank_0_is_taken_by_all(
    strategy: str, elsewhere: str
) -> None:
    """The first backward reduces in reverse order of registration, every later one in the order in
    which the first rank was done with its units, whatever the others did."""
    for seen in check([["1:sab 0:sab 2:sab"], [elsewhere]], strategy):
        first, second = ([label.partition(" (")[0] for label in step] for step in seen.reductions)
        assert first == ["parts.2", "parts.1", "parts.0", "Whole"]
        assert second == ["parts.2", "parts.0", "parts.1", "Whole"]
