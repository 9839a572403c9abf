"""Units compiled by torch.compile train as they do without it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyshard import full_state_dict

from .models import Size, batches, transformer
from .sharding import require_same, shard, train_step
from .site import Site, require

_STEPS = 4
_SIZE = Size(blocks=2, width=128)
_TINY = Size(blocks=2, width=16, tokens=8, batch=2, vocabulary=19)
# Fused kernels round elsewhere, and Adam turns that into more of the learning rate.
_FUSED_TOLERANCE = 1e-3


def run(site: Site) -> None:
    """A compiler, and when it is called, is a step."""
    torch.use_deterministic_algorithms(True)
    mesh = site.world()
    # One kind of attention, which compilers do not replace by another.
    with sdpa_kernel(SDPBackend.MATH):
        expected = trained(site, mesh, None, "never")
        for when in ("before sharding", "after sharding"):
            with site.step(f"aot_eager, units compiled {when}"):
                require_same(trained(site, mesh, "aot_eager", when), expected, tolerance=1e-5)
        with site.step("a unit is one graph"):
            site.figures["graphs of a unit"] = _graphs(site, mesh)
        with site.step("inductor, units compiled after sharding"):
            site.require_cuda("Triton")
            off = require_same(
                trained(site, mesh, "inductor", "after sharding"),
                expected,
                tolerance=_FUSED_TOLERANCE,
            )
            site.figures["inductor: largest difference"] = off
            written = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.py")
            require(any(written), "inductor wrote no code, so it compiled nothing")


def trained(site: Site, mesh: Any, compiler: str | None, when: str) -> dict[str, torch.Tensor]:
    """Losses and final weights."""
    torch.compiler.reset()
    size = _TINY if site.dry_run else _SIZE
    model, batch = transformer(size, site.device), batches(size, site.device)

    def compile_units() -> None:
        for block in model.blocks:
            block.compile(backend=compiler)

    if when == "before sharding":
        compile_units()
    shard(model, mesh, site.backend)
    if when == "after sharding":
        compile_units()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = torch.stack([train_step(model, optimizer, batch(step)) for step in range(_STEPS)])
    weights = {name: value.cpu() for name, value in full_state_dict(model).items()}
    return {"losses": losses.cpu(), **weights}


def _graphs(site: Site, mesh: Any) -> int:
    """Into how many graphs the forward of a unit is cut; raises CheckFailed for more than one."""
    torch.compiler.reset()
    seen: list[object] = []

    def count(graph: Any, _: object) -> Any:
        seen.append(graph)
        return graph.forward

    size = _TINY if site.dry_run else _SIZE
    model, batch = transformer(size, site.device), batches(size, site.device)
    shard(model, mesh, site.backend)
    model.blocks[0].compile(backend=count)
    model(batch(0)).backward()
    require(len(seen) == 1, f"the forward of a unit was cut into {len(seen)} graphs")
    return len(seen)
