"""One strategy's model, optimizer and data on this rank, and the training step.

``distribute`` is all that a script needs of polyshard. Knows no terminal, files or processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from gpt_data import Batches, Corpus
from gpt_model import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from polyshard import FsdpModule, Placements, fully_shard

TORCH_DDP = "torch-ddp"
TWO_AXES = ("hsdp", "hfsdp")


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; equal on all ranks. ``batch_size`` is per rank.

    ``mesh``: the ranks along one axis, or along an outer and an inner one.
    """

    strategy: str
    mesh: tuple[int, ...]
    steps: int
    backend: str | None = None
    batch_size: int = 4
    learning_rate: float = 1.5e-3
    seed: int = 0
    model: GPTConfig = field(default_factory=GPTConfig)


def distribute(model: GPT, strategy: str, mesh_shape: tuple[int, ...], backend: str | None) -> None:
    """Share ``model`` among all ranks by ``strategy``: in place, each block a unit of its own.

    Raises what ``fully_shard`` raises: BackendError, PlacementError, UnsupportedError.
    """
    mesh, placements = mesh_and_placements(strategy, mesh_shape)
    for block in model.blocks:
        fully_shard(block, mesh, placements, backend=backend)
    fully_shard(model, mesh, placements, backend=backend)


def mesh_and_placements(strategy: str, shape: tuple[int, ...]) -> tuple[DeviceMesh, Placements]:
    """The mesh of ``shape`` for strategies of two axes; for the others, all ranks on one axis."""
    names = ("outer", "inner") if strategy in TWO_AXES else ("dp",)
    if strategy not in TWO_AXES:
        shape = (math.prod(shape),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh, getattr(Placements, strategy)(*names)


class Sharded:
    """A model that polyshard shares among the ranks, and what travels for it."""

    def __init__(self, model: GPT, recipe: Recipe) -> None:
        distribute(model, recipe.strategy, recipe.mesh, recipe.backend)
        self.module = model

    @property
    def transport(self) -> str:
        """What carries the traffic, for people to read."""
        transports = cast(FsdpModule, self.module).fsdp_context.transports()
        return ", ".join(transport.backend.name for transport in transports)

    def sent_bytes(self) -> int:
        """What this rank had to send so far, over all units and purposes."""
        return cast(FsdpModule, self.module).fsdp_context.traffic().total_bytes


class PlainDDP:
    """PyTorch's own data parallelism, its traffic counted as polyshard counts its own."""

    transport = "gloo process group"

    def __init__(self, model: GPT) -> None:
        self._sent_bytes = 0
        self.module = DistributedDataParallel(model)
        # A lambda, because DDP refuses the string annotations of a method as a hook.
        self.module.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket))

    def sent_bytes(self) -> int:
        """What this rank had to send so far for gradients."""
        return self._sent_bytes

    def _all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        ranks = dist.get_world_size()
        # The least any algorithm can send: 2 (n - 1) / n of the buffer, averaged over the ranks.
        self._sent_bytes += 2 * (ranks - 1) * bucket.buffer().nbytes // ranks
        return allreduce_hook(self.module.process_group, bucket)


class Trainer:
    """Builds the model on this rank and trains it, one batch per rank and step."""

    def __init__(self, recipe: Recipe, corpus: Corpus) -> None:
        self.recipe = recipe
        # Ranks start from the same weights; the seed is the same everywhere.
        torch.manual_seed(recipe.seed)
        model = GPT(recipe.model)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        parallel: Sharded | PlainDDP
        if recipe.strategy == TORCH_DDP:
            parallel = PlainDDP(model)
        else:
            parallel = Sharded(model, recipe)
        self.model: nn.Module = parallel.module
        self.transport = parallel.transport
        self._parallel = parallel
        # Handing out the first weights is no traffic of training.
        self._sent_before_training = parallel.sent_bytes()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self._corpus = corpus
        self._train_batches = self._batches(corpus.train)

    @property
    def bytes_per_step(self) -> int:
        """Text bytes, which are this model's tokens, of one step over all ranks."""
        return self.recipe.batch_size * self.recipe.model.context * dist.get_world_size()

    def sent_bytes(self) -> int:
        """What this rank had to send so far to train."""
        return self._parallel.sent_bytes() - self._sent_before_training

    def step(self) -> float:
        """Forward, backward, optimizer; the loss of this rank's batch in nats per byte."""
        loss: Tensor = self.model(*self._train_batches.next())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        return loss.item()

    @torch.no_grad()
    def validate(self, num_batches: int = 8) -> float:
        """Mean loss over all ranks on files that training never sees, in nats per byte."""
        batches = self._batches(self._corpus.validation)
        losses = [self.model(*batches.next()).item() for _ in range(num_batches)]
        return mean_over_ranks([sum(losses) / num_batches])[0]

    def _batches(self, text: Tensor) -> Batches:
        return Batches(
            text,
            batch_size=self.recipe.batch_size,
            context=self.recipe.model.context,
            rank=dist.get_rank(),
            seed=self.recipe.seed,
        )

    def _rate(self, step: int) -> float:
        """Linear warm-up over the first tenth, then a half cosine down to a tenth."""
        steps = self.recipe.steps
        warm_up = max(1, steps // 10)
        if step < warm_up:
            return (step + 1) / warm_up
        progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def mean_over_ranks(values: list[float]) -> list[float]:
    """Element by element; every rank gets the same numbers."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()
