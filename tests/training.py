"""What the multi-rank tests share: a model that has every oddity, data by rank, plain training.

Knows no strategy. The yardstick is always one plain process on the global batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard import MixedPrecisionPolicy, Placements, fully_shard, microbatch

VOCABULARY = 13
WIDTH = 6
TOKENS = 5


class OddBlock(nn.Module):
    """Odd row lengths, a 0-D parameter, a frozen one, an unused one and a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.narrow = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.narrow(torch.relu(self.widen(x))) * self.scale + self.shift + mixed


class OddModel(nn.Module):
    """A few odd blocks between a tied embedding and head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(dtype: torch.dtype = torch.float32, *, seed: int = 0, blocks: int = 3) -> OddModel:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return OddModel(blocks).to(dtype)


def make_mesh(
    shape: Sequence[int] | None = None,
    names: Sequence[str] = ("dp",),
    *,
    device_type: str = "cpu",
) -> DeviceMesh:
    """A mesh of all ranks, one axis unless told."""
    return init_device_mesh(
        device_type, tuple(shape or (dist.get_world_size(),)), mesh_dim_names=tuple(names)
    )


def shard(model: OddModel, mesh: DeviceMesh, placements: Placements, **options: object) -> None:
    """Every block a unit, then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh, placements, **options)
    fully_shard(model, mesh, placements, **options)


def make_batches(steps: int, microbatches: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of shape (steps, microbatches, ranks, 4, TOKENS)."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, steps, microbatches, ranks, 4, TOKENS)
    tokens, targets = torch.randint(VOCABULARY, shape, generator=generator)
    return tokens, targets


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, computed in fp32."""
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Training:
    """How to train; the same for the plain process and for the ranks."""

    steps: int = 10
    microbatches: int = 1
    scoped: bool = False
    set_to_none: bool = True
    bf16: bool = False
    lr: float = 1e-2
    blocks: int = 3


def train_plain(how: Training, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process on the global batch; losses by step and the final weights.

    In bf16 the weights that forward sees are rounded from fp32 ones, and each rank's part of the
    batch is a backward of its own, so that gradients are rounded where the ranks round theirs.
    """
    model = make_model(blocks=how.blocks)
    if how.bf16:
        model = model.bfloat16().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr)
    tokens, targets = make_batches(how.steps, how.microbatches, ranks)
    losses = []
    for step in range(how.steps):
        total = 0.0
        for micro in range(how.microbatches):
            # In fp32 the global batch goes through at once.
            for ids, goal in (
                zip(tokens[step, micro], targets[step, micro], strict=True)
                if how.bf16
                else [(tokens[step, micro].flatten(0, 1), targets[step, micro].flatten(0, 1))]
            ):
                seen = copy.deepcopy(model).bfloat16() if how.bf16 else model
                loss = loss_of(seen, ids, goal) / how.microbatches
                if how.bf16:
                    seen.zero_grad()
                loss.backward()
                if how.bf16:
                    _add_gradients(seen, model, 1 / ranks)
                total += loss.item() / (ranks if how.bf16 else 1)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=how.set_to_none)
    return losses, model.state_dict()


def _add_gradients(source: nn.Module, target: nn.Module, scale: float) -> None:
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        if theirs.grad is not None:
            contribution = theirs.grad.float() * scale
            ours.grad = contribution if ours.grad is None else ours.grad + contribution


def train_sharded(model: nn.Module, how: Training, rank: int, ranks: int) -> list[float]:
    """This rank's part of the batch through a sharded model; the mean losses by step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr)
    tokens, targets = make_batches(how.steps, how.microbatches, ranks)
    losses = []
    for step in range(how.steps):
        total = torch.zeros(())
        for micro in range(how.microbatches):
            last = micro == how.microbatches - 1
            with microbatch(model, is_last=last) if how.scoped else nullcontext():
                loss = loss_of(model, tokens[step, micro, rank], targets[step, micro, rank])
            (loss / how.microbatches).backward()
            total += loss.detach() / how.microbatches
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        optimizer.step()
        optimizer.zero_grad(set_to_none=how.set_to_none)
    return losses


def bf16_policy() -> MixedPrecisionPolicy:
    """bf16 weights in forward and backward, fp32 main weights and main gradients."""
    return MixedPrecisionPolicy(main_grads_dtype=torch.float32)
