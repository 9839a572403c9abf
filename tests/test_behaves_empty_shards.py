"""Models so small that some ranks hold nothing: operations, optimizers, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaving import Side, compare, over_strategies
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from polyshard import full_state_dict, load_full_state_dict


class Tiny(nn.Module):
    """A 0-D parameter, one row, two rows, none."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 3))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.two = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.row.t() * self.gain + self.two + self.none.sum()).square().mean()


def make_tiny(side: Side) -> Tiny:
    torch.manual_seed(0)
    model = Tiny()
    side.shard(model)
    return model


def backward(side: Side, model: Tiny, seed: int) -> None:
    data = side.data(seed, 4, 3)
    side.mean(lambda rank: model(data[rank])).backward()


# -- operations ----------------------------------------------------------------------------------

#: Of a parameter, its gradient and its momentum.
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "arithmetic": lambda p, g, m: p * 0.9 - 0.1 * (g + m) / (m.abs().sqrt() + 1e-3),
    "in place": lambda p, g, m: p.detach().clone().lerp_(g, 0.3).clamp_(max=0.5),
    "choice": lambda p, g, m: torch.where(g > 0, p, m),
    "cast": lambda p, g, m: p.bfloat16().float() + g.double(),
    "copy": lambda p, g, m: torch.empty_like(p).copy_(g) + m.clone() + p.new_zeros(p.shape),
    "view": lambda p, g, m: p.view(p.shape) + g.view_as(p).contiguous(),
    "sum": lambda p, g, m: p.sum() + (p * g).sum() + (m != 0).sum(),
    "norms": lambda p, g, m: torch.stack([p.norm(), g.norm(1), torch.linalg.vector_norm(m, 3)]),
    "norms in one call": lambda p, g, m: torch.stack(torch._foreach_norm([p, g, m])),
    "truth": lambda p, g, m: (p == p).all() ^ torch.isnan(g).any(),
    "equal": lambda p, g, m: torch.tensor(torch.equal(p, p.clone())),
    "item": lambda p, g, m: torch.tensor(g.sum().item() + p.numel()),
}


def operate(side: Side) -> None:
    model = make_tiny(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(side, model, 0)
    optimizer.step()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None
        momentum = optimizer.state[parameter]["momentum_buffer"]
        for name, operation in OPERATIONS.items():
            side.note(f"{name} of {path}", operation(parameter, parameter.grad, momentum))


@pytest.mark.behaviour(7, 33)
@over_strategies
def test_operations_on_a_models_tensors(strategy: str) -> None:
    """Operations on parameters, gradients and momenta of a model on four ranks, of which some hold
    no rows, give what they give on whole tensors."""
    compare(operate, strategy, ranks=4)


# -- optimizers ----------------------------------------------------------------------------------

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.02, fused=True, amsgrad=True),
    "SGD fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "Adagrad fused": partial(torch.optim.Adagrad, lr=0.05, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, foreach=True),
    "RAdam": partial(torch.optim.RAdam, foreach=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": partial(torch.optim.ASGD, foreach=True),
}


def optimize(side: Side, name: str) -> None:
    model = make_tiny(side)
    optimizer = OPTIMIZERS[name](model.parameters())
    weights: dict[str, Tensor] = {}
    for step in range(10):
        backward(side, model, step)
        side.note("norm", side.clip(model.parameters(), 0.5))
        if step % 3 == 0:
            side.note_model(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 2:
            state = optimizer.state_dict()
            optimizer = OPTIMIZERS[name](model.parameters())
            optimizer.load_state_dict(state)
        elif step == 5:
            weights = {path: value.clone() for path, value in model.state_dict().items()}
        elif step == 6:
            model.load_state_dict(weights)
    side.note_model(model)
    for number, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            side.note(f"{number} {key}", value)


@pytest.mark.behaviour(33, 6)
@over_strategies
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_where_ranks_hold_nothing(name: str, strategy: str) -> None:
    """Clipped steps, foreach and fused, with states and weights that are saved and loaded on the
    way: weights and states are those of one process, on four ranks of which some hold nothing."""
    compare(partial(optimize, name=name), strategy, ranks=4)


# -- checkpoints ---------------------------------------------------------------------------------


def save_and_load(side: Side, directory: Path) -> None:
    model = make_tiny(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def step(seed: int) -> None:
        backward(side, model, seed)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    if side.sharded:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"weights": weights, "states": states}, checkpoint_id=directory)
        step(1)
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"weights": weights, "states": states}, checkpoint_id=directory)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    step(2)
    side.note_model(model)
    saved = full_state_dict(model) if side.sharded else model.state_dict()
    for path, value in saved.items():
        side.note(path, value)
    doubled = {path: value * 2 for path, value in saved.items()}
    if side.sharded:
        load_full_state_dict(model, doubled)
    else:
        model.load_state_dict(doubled)
    side.note_model(model)


@pytest.mark.behaviour(33)
@over_strategies
@pytest.mark.parametrize("ranks", [2, 4])
def test_checkpoints_where_ranks_hold_nothing(ranks: int, strategy: str, tmp_path: Path) -> None:
    """A distributed checkpoint of weights and states undoes a step; whole state dicts are complete
    and are loaded."""
    compare(partial(save_and_load, directory=tmp_path), strategy, ranks=ranks)
