"""Peak memory of a step against the formulas of docs/strategies.md."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from polyshard import explain

from .models import Size, batches, transformer
from .sharding import shard
from .site import Site, require

_SIZE = Size(blocks=8, width=1024, heads=16, tokens=128, batch=2)
_TINY = Size(blocks=2, width=16, tokens=8, batch=2, vocabulary=19)
_STEPS = 3
#: The allocator rounds every block up, and torch has a few small tensors of its own.
_SLACK_SHARE, _SLACK_BYTES = 0.01, 8 << 20


def run(site: Site) -> None:
    """Each strategy is a step: held between steps, and at most in one."""
    mesh = site.world()
    size = _TINY if site.dry_run else _SIZE
    _plain(site, size)  # cuBLAS takes memory of its own with its first products
    activations = _plain(site, size)
    site.figures["activations, bytes"] = activations
    for strategy in ("zero3", "zero2", "ddp"):
        with site.step(strategy):
            _compare(site, mesh, size, strategy, activations)


def _plain(site: Site, size: Size) -> int:
    """What a plain model's step needs beside weights, gradients and optimizer state: at most that
    much the same step needs when it is sharded."""
    before = _allocated(site)
    model, batch = transformer(size, site.device), batches(size, site.device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(_STEPS):
        _restart(site)
        loss = model(batch(step))
        loss.backward()
        peak = _most(site)
        optimizer.step()
        # They stay, so that the peak has them whole.
        optimizer.zero_grad(set_to_none=False)
        del loss
    weights = sum(each.nbytes for each in model.parameters())
    held = before + 2 * weights + _state_bytes(optimizer)
    return max(0, peak - held)


def _compare(site: Site, mesh: Any, size: Size, strategy: str, activations: int) -> None:
    gc.collect()
    before = _allocated(site)
    model, batch = transformer(size, site.device), batches(size, site.device)
    shard(model, mesh, site.backend, strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(_STEPS):
        _restart(site)
        model(batch(step)).backward()
        # AdamW has temporaries of its own, as large as the weights: not what is asked here.
        peak = _most(site) - before
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    site.synchronize()
    after = _allocated(site) - before
    rests = explain(model).bytes.between_steps + _state_bytes(optimizer)
    bound = _bound(model, strategy) + _state_bytes(optimizer) + activations
    site.figures[f"{strategy}: formula at most, bytes"] = bound
    site.figures[f"{strategy}: formula between steps, bytes"] = rests
    require(0 < rests < bound, f"the formulas give {rests} between steps and {bound} at most")
    if site.dry_run:
        return
    site.figures[f"{strategy}: measured at most, bytes"] = peak
    site.figures[f"{strategy}: measured between steps, bytes"] = after
    site.figures[f"{strategy}: at most, measured / formula"] = peak / bound
    _require_within(peak, bound, "at most")
    _require_within(after, rests, "between steps")


def _bound(model: nn.Module, strategy: str) -> int:
    """Weights and gradients at the peak of a backward, in bytes, by docs/strategies.md."""
    found = explain(model)
    (order,) = found.orders
    assert order.most_gathered_backward is not None
    by_unit = [unit.bytes.gradients for unit in found.units]
    root, blocks = by_unit[0], sorted(by_unit[1:], reverse=True)
    # The root's reduce input, the unit's that is packed, and that of one on its way.
    inputs = 0 if strategy == "ddp" else root + sum(blocks[:2])
    held = found.bytes
    largest = max(parameter.nbytes for parameter in model.parameters())
    unpacked = max(root, *blocks) // 4 + largest
    # In ddp the accumulator becomes the gradient.
    gradients = held.gradients + (0 if strategy == "ddp" else held.accumulators)
    total = held.main + held.kept + held.copies + order.most_gathered_backward
    return total + gradients + inputs + unpacked


def _require_within(measured: int, formula: int, what: str) -> None:
    limit = formula * (1 + _SLACK_SHARE) + _SLACK_BYTES
    require(measured <= limit, f"{what} {measured} bytes are held, by the formulas {formula}")


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """On the device; AdamW's step counts lie on the host."""
    return sum(
        value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )


def _allocated(site: Site) -> int:
    return 0 if site.dry_run else torch.cuda.memory_allocated()


def _most(site: Site) -> int:
    return 0 if site.dry_run else torch.cuda.max_memory_allocated()


def _restart(site: Site) -> None:
    if not site.dry_run:
        torch.cuda.reset_peak_memory_stats()
