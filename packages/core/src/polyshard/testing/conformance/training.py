"""Tests of training: every strategy against one plain process (all of sections 1, 4, 5 and 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...api import fully_shard, microbatch
from ...placements import Placements
from ...weights import full_state_dict
from .bench import Bench, mesh_shape
from .clauses import clause
from .data import require
from .running import Launch

_VOCABULARY, _WIDTH, _TOKENS, _SAMPLES = 13, 6, 5, 4
_LEARNING_RATE = 1e-2
_LOSS_TOLERANCE, _WEIGHT_TOLERANCE = 1e-5, 1e-4

#: Strategies by name, with how many axes they have.
_STRATEGIES: dict[str, tuple[Callable[..., Placements], int]] = {
    "ddp": (Placements.ddp, 1),
    "zero1": (Placements.zero1, 1),
    "zero2": (Placements.zero2, 1),
    "zero3": (Placements.zero3, 1),
    "hsdp": (Placements.hsdp, 2),
    "hfsdp": (Placements.hfsdp, 2),
}


@dataclass(frozen=True)
class _Training:
    """How to train; the same for the plain process and for the ranks."""

    steps: int = 6
    microbatches: int = 2

    def __str__(self) -> str:
        return f"{self.steps} steps of {self.microbatches} microbatches"


class _Block(nn.Module):
    """Odd row lengths, a scalar, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(_WIDTH, 2 * _WIDTH + 1)
        self.narrow = nn.Linear(2 * _WIDTH + 1, _WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(x))) * self.scale


class _Model(nn.Module):
    """Two blocks between a tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@clause("5.3", "6.1", since=(1, 0), drives=True)
def training_with_ddp(launch: Launch) -> None:
    """Training with Placements.ddp follows one plain process on the global batch."""
    _require_parity(launch, "ddp", _Training())


@clause("5.1", "5.2", "6.1", since=(1, 0), drives=True)
def training_with_zero1(launch: Launch) -> None:
    """Training with Placements.zero1 follows one plain process on the global batch."""
    _require_parity(launch, "zero1", _Training())


@clause("5.1", "5.2", "6.1", since=(1, 0), drives=True)
def training_with_zero2(launch: Launch) -> None:
    """Training with Placements.zero2 follows one plain process on the global batch."""
    _require_parity(launch, "zero2", _Training())


@clause("5.1", "5.2", "6.1", "6.2", "4.4", since=(1, 0), drives=True)
def training_with_zero3(launch: Launch) -> None:
    """Training with Placements.zero3 follows one plain process on the global batch."""
    for how in (_Training(), _Training(steps=5, microbatches=1)):
        _require_parity(launch, "zero3", how)


@clause("4.1", "5.1", "5.2", "5.3", since=(1, 0), drives=True)
def training_with_hsdp(launch: Launch) -> None:
    """Training with Placements.hsdp on a mesh of two axes follows one plain process."""
    _require_parity(launch, "hsdp", _Training())


@clause("4.1", "4.7", "5.1", "5.2", since=(1, 0), drives=True)
def training_with_hfsdp(launch: Launch) -> None:
    """Training with Placements.hfsdp on a mesh of two axes follows one plain process."""
    _require_parity(launch, "hfsdp", _Training())


def _require_parity(launch: Launch, name: str, how: _Training) -> None:
    expected_losses, expected = _train_plain(how, launch.subject.world_size)
    by_rank: list[tuple[list[float], dict[str, Tensor]]] = launch.run(
        _train, name, how, fresh=False
    )
    for rank, (losses, weights) in enumerate(by_rank):
        for step, (loss, reference) in enumerate(zip(losses, expected_losses, strict=True)):
            require(
                abs(loss - reference) <= _LOSS_TOLERANCE,
                f"{name}, {how}: rank {rank} has loss {loss:.7f} in step {step}, a plain process "
                f"{reference:.7f}",
            )
        require(
            weights.keys() == expected.keys(),
            f"{name}: rank {rank} has the weights {sorted(weights)}, expected {sorted(expected)}",
        )
        for key, value in expected.items():
            off = (weights[key].cpu() - value).abs().max().item()
            require(
                off <= _WEIGHT_TOLERANCE,
                f"{name}, {how}: weight {key!r} on rank {rank} is off by {off:.2g}",
            )


def _train(bench: Bench, name: str, how: _Training) -> tuple[list[float], dict[str, Tensor]]:
    make_placements, axes = _STRATEGIES[name]
    names = ("dp",) if axes == 1 else ("outer", "inner")
    shape = (bench.size,) if axes == 1 else mesh_shape(bench.size)
    mesh: DeviceMesh = init_device_mesh(bench.device.type, shape, mesh_dim_names=names)
    placements = make_placements(*names)
    model = _make_model().to(bench.device)
    for block in model.blocks:
        fully_shard(block, mesh, placements, backend=bench.backend)
    fully_shard(model, mesh, placements, backend=bench.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    tokens, targets = _batches(how, bench.size)
    losses = []
    for step in range(how.steps):
        total = torch.zeros(())
        for micro in range(how.microbatches):
            with microbatch(model, is_last=micro == how.microbatches - 1):
                ids, goal = tokens[step, micro, bench.rank], targets[step, micro, bench.rank]
                loss = _loss(model, ids.to(bench.device), goal.to(bench.device))
            (loss / how.microbatches).backward()
            total += loss.detach().cpu() / how.microbatches
        dist.all_reduce(total)
        losses.append(total.item() / bench.size)
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_state_dict(model)


def _train_plain(how: _Training, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process on the global batch; losses by step and the final weights."""
    with torch.random.fork_rng(devices=()):
        model = _make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    tokens, targets = _batches(how, ranks)
    losses = []
    for step in range(how.steps):
        total = 0.0
        for micro in range(how.microbatches):
            ids, goal = tokens[step, micro].flatten(0, 1), targets[step, micro].flatten(0, 1)
            loss = _loss(model, ids, goal) / how.microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def _make_model() -> _Model:
    """The same one everywhere."""
    torch.manual_seed(0)
    return _Model()


def _batches(how: _Training, ranks: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of shape (steps, microbatches, ranks, samples, tokens)."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, how.steps, how.microbatches, ranks, _SAMPLES, _TOKENS)
    tokens, targets = torch.randint(_VOCABULARY, shape, generator=generator)
    return tokens, targets


def _loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
