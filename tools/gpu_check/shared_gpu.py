"""Several ranks on one GPU, their tensors staged through the host: training follows one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import (
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    full_state_dict,
    fully_shard,
    microbatch,
)
from polyshard.testing import run_ranks

from .models import RECOMPUTE, OddModel, units_of
from .site import CheckFailed, Site

_TOKENS, _SAMPLES, _RATE = 5, 4, 1e-2
_LOSS_TOLERANCE, _WEIGHT_TOLERANCE = 1e-5, 1e-4
_TIMEOUT = 60.0

_TWO_AXES = ("outer", "inner")
STRATEGIES = {
    "ddp": (Placements.ddp("dp"), ("dp",)),
    "zero1": (Placements.zero1("dp"), ("dp",)),
    "zero2": (Placements.zero2("dp"), ("dp",)),
    "zero3": (Placements.zero3("dp"), ("dp",)),
    "hsdp": (Placements.hsdp(*_TWO_AXES), _TWO_AXES),
    "hfsdp": (Placements.hfsdp(*_TWO_AXES), _TWO_AXES),
}


@dataclass(frozen=True)
class Way:
    """How to train; the same for the plain process and for the ranks.

    Args:
        bf16: weights of half precision over fp32 main weights and main gradients.
        scoped: microbatches are in ``microbatch`` scopes.
        recompute: of ``models.RECOMPUTE``.
        ahead: units that are gathered ahead of compute.
        keep: units stay gathered from forward to backward.
    """

    bf16: bool = False
    microbatches: int = 1
    scoped: bool = False
    recompute: str = "nothing"
    ahead: int = 1
    keep: bool = False
    steps: int = 5


WAYS = {
    "fp32": Way(),
    "fp32, 3 scoped microbatches, 2 ahead, reentrant": Way(False, 3, True, "reentrant", 2),
    "fp32, 2 bare microbatches, none ahead, saved": Way(False, 2, False, "saved", 0),
    "bf16, 3 scoped microbatches, saved": Way(True, 3, True, "saved", 1),
    "bf16, 2 ahead, reentrant, kept": Way(True, 1, False, "reentrant", 2, keep=True),
}


def run(site: Site, *, ranks: int) -> None:
    """Every strategy in every way; each pair is a step."""
    settle()
    ways = dict(list(WAYS.items())[1::2]) if site.dry_run else WAYS
    names = ("zero3", "hfsdp") if site.dry_run else tuple(STRATEGIES)
    worst_loss = worst_weight = 0.0
    for strategy in names:
        for title, way in ways.items():
            with site.step(f"{strategy}: {title}"):
                losses, weights = compare(site.device_type, ranks, strategy, way)
                worst_loss, worst_weight = max(worst_loss, losses), max(worst_weight, weights)
    site.figures["largest difference of a loss"] = worst_loss
    site.figures["largest difference of a weight"] = worst_weight


def settle() -> None:
    """The same bits at every call, and no product in reduced precision."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False


def compare(device_type: str, ranks: int, strategy: str, way: Way) -> tuple[float, float]:
    """Largest difference of a loss and of a final weight; raises CheckFailed beyond tolerance."""
    expected_losses, expected = _plain(device_type, ranks, way)
    worst_loss = worst_weight = 0.0
    results = run_ranks(ranks, train, device_type, strategy, way, timeout=_TIMEOUT)
    for rank, (losses, weights) in enumerate(results):
        if weights.keys() != expected.keys() or len(losses) != len(expected_losses):
            raise CheckFailed(f"rank {rank} has weights {sorted(weights)}, {len(losses)} losses")
        for loss, reference in zip(losses, expected_losses, strict=True):
            worst_loss = max(worst_loss, _finite(abs(loss - reference)))
        for name, value in expected.items():
            worst_weight = max(worst_weight, _finite((weights[name] - value).abs().max().item()))
    if worst_loss > _LOSS_TOLERANCE or worst_weight > _WEIGHT_TOLERANCE:
        raise CheckFailed(f"losses are off by {worst_loss:.2g}, weights by {worst_weight:.2g}")
    return worst_loss, worst_weight


def train(
    rank: int, device_type: str, strategy: str, way: Way
) -> tuple[list[float], dict[str, Tensor]]:
    """What one rank does: mean losses by step, and all weights in the end."""
    settle()
    device = torch.device(device_type, 0) if device_type != "cpu" else torch.device("cpu")
    if device_type != "cpu":
        torch.cuda.set_device(device)
    placements, axes = STRATEGIES[strategy]
    ranks = dist.get_world_size()
    shape = (ranks,) if len(axes) == 1 else (max(ranks // 2, 1), min(ranks, 2))
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    model = make_model(way, torch.bfloat16 if way.bf16 else torch.float32).to(device)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32) if way.bf16 else None
    for unit in units_of(model):
        fully_shard(
            unit,
            mesh,
            placements,
            policy,
            backend="gloo",
            reshard_after_forward=not way.keep,
            schedule_policy=SchedulePolicy(way.ahead, way.ahead),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, eps=1e-6)
    tokens, targets = _data(way, ranks)
    losses = []
    for step in range(way.steps):
        total = torch.zeros(())
        for micro in range(way.microbatches):
            last = micro == way.microbatches - 1
            with microbatch(model, is_last=last) if way.scoped else nullcontext():
                ids, goal = tokens[step, micro, rank], targets[step, micro, rank]
                loss = _loss(model, ids.to(device), goal.to(device)) / way.microbatches
            loss.backward()
            total += loss.detach().cpu()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.cpu() for name, value in full_state_dict(model).items()}


@lru_cache
def _plain(device_type: str, ranks: int, way: Way) -> tuple[list[float], dict[str, Tensor]]:
    """One process on everyone's data, a rank's part at a time.

    In bf16 the weights that forward sees are rounded from fp32 ones, as the ranks' are.
    """
    device = torch.device(device_type)
    model = make_model(way, torch.float32).to(device)
    if way.bf16:
        model = model.bfloat16().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, eps=1e-6)
    tokens, targets = _data(way, ranks)
    losses = []
    for step in range(way.steps):
        total = 0.0
        for micro in range(way.microbatches):
            for rank in range(ranks):
                seen = copy.deepcopy(model).bfloat16() if way.bf16 else model
                if seen is not model:
                    seen.zero_grad()
                ids, goal = tokens[step, micro, rank], targets[step, micro, rank]
                loss = _loss(seen, ids.to(device), goal.to(device)) / way.microbatches
                (loss if way.bf16 else loss / ranks).backward()
                if seen is not model:
                    _add_gradients(seen, model, 1 / ranks)
                total += loss.item() / ranks
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().cpu() for name, value in model.state_dict().items()}


def _add_gradients(source: nn.Module, target: nn.Module, scale: float) -> None:
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        if theirs.grad is not None:
            contribution = theirs.grad.float() * scale
            ours.grad = contribution if ours.grad is None else ours.grad + contribution


def make_model(way: Way, dtype: torch.dtype) -> OddModel:
    """The same on every rank and in the plain process."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return OddModel(recompute=RECOMPUTE[way.recompute]).to(dtype)


def _data(way: Way, ranks: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of shape (steps, microbatches, ranks, samples, tokens)."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, way.steps, way.microbatches, ranks, _SAMPLES, _TOKENS)
    tokens, targets = torch.randint(OddModel.vocabulary, shape, generator=generator)
    return tokens, targets


def _loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _finite(difference: float) -> float:
    if difference != difference or difference == float("inf"):
        raise CheckFailed("a loss or a weight is not a number")
    return difference
