"""A whole step in one CUDA graph, replayed: the same bits as without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyshard import full_state_dict

from .models import Size, batches, transformer
from .sharding import BACKENDS, backend_for, require_same, shard, train_step
from .site import Site, require

_WARM_UP, _REPLAYS = 3, 6
_SIZE = Size(blocks=3, width=128)
_TINY = Size(blocks=2, width=16, tokens=8, batch=2, vocabulary=19)


def run(site: Site) -> None:
    """A strategy over each kind of backend is a step."""
    torch.use_deterministic_algorithms(True)
    mesh = site.world()
    for kind in BACKENDS:
        for strategy in ("zero3", "zero1"):
            with site.step(f"{strategy}, {kind}"):
                compare(site, mesh, backend_for(site, kind), strategy)
    site.figures["replays of each"] = _REPLAYS


def compare(site: Site, mesh: Any, backend: Any, strategy: str) -> None:
    """Train the same model with and without a graph; losses and weights must be the same bits."""
    size = _TINY if site.dry_run else _SIZE
    batch = batches(size, site.device)
    found = []
    # One kind of attention whose backward gives the same bits at every call.
    with sdpa_kernel(SDPBackend.MATH):
        for captures in (True, False):
            model = transformer(size, site.device)
            shard(model, mesh, backend, strategy)
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=1e-2, capturable=not site.dry_run, foreach=True
            )
            tokens = batch(0).clone()
            step = _warmed(site, model, optimizer, tokens, batch)
            if captures and not site.dry_run:
                step = _captured(step)
            losses = []
            for number in range(_WARM_UP, _WARM_UP + _REPLAYS):
                tokens.copy_(batch(number))
                losses.append(step().clone())
            site.synchronize()
            weights = {name: value.cpu() for name, value in full_state_dict(model).items()}
            found.append({"losses": torch.stack(losses).cpu(), **weights})
            # The graph goes before the model: NCCL ends no communicator that a graph uses.
            del step
    graphed, eager = found
    first, last = eager["losses"][0].item(), eager["losses"][-1].item()
    require(first != last, "the loss never changed, so nothing was trained")
    require_same(graphed, eager)


def _warmed(
    site: Site,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    batch: Callable[[int], Tensor],
) -> Callable[[], Tensor]:
    """A step on ``tokens`` as they are when it is called, after some on a side stream."""

    def step() -> Tensor:
        return train_step(model, optimizer, tokens)

    def warm_up() -> None:
        for number in range(_WARM_UP):
            tokens.copy_(batch(number))
            step()

    if site.dry_run:
        warm_up()
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up()
    torch.cuda.current_stream().wait_stream(side)
    return step


def _captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step in a graph; what it returns is overwritten by the next one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay
