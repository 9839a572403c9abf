"""Host time per unit and step time beside FSDP2 and the plain model. Asserts no times."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from polyshard import MixedPrecisionPolicy

from .models import Size, batches, transformer, units_of
from .sharding import BACKENDS, backend_for, shard, train_step
from .site import Site, Skip, require

# Of the first, the host is the slower part; of the second, the GPU.
SIZES = {
    "host-bound": Size(blocks=12, width=64, tokens=16, batch=1),
    "device-bound": Size(blocks=8, width=1024, heads=16, tokens=512, batch=8),
}
_TINY = Size(blocks=2, width=16, tokens=8, batch=1, vocabulary=19)
_WARM_UP = 4

Step = Callable[[Tensor], Tensor]


def run(site: Site) -> None:
    """Each size is a step; contenders take turns within it."""
    mesh = site.world()
    for title, size in SIZES.items():
        for bf16 in (False, True) if title == "device-bound" else (False,):
            name = f"{title}{', bf16' if bf16 else ''}"
            with site.step(name):
                measure(site, mesh, name, _TINY if site.dry_run else size, bf16)


def measure(site: Site, mesh: Any, name: str, size: Size, bf16: bool) -> None:
    """Medians of the time until the host is back, and until the device is done."""
    contenders = {}
    for contender in ("plain", "fsdp2", *(f"polyshard {kind}" for kind in BACKENDS)):
        try:
            contenders[contender] = _contender(site, mesh, contender, size, bf16)
        except Skip:
            continue
    batch = batches(size, site.device)
    host: dict[str, list[float]] = {each: [] for each in contenders}
    whole: dict[str, list[float]] = {each: [] for each in contenders}
    repetitions = 3 if site.dry_run else 40
    gc.collect()
    gc.disable()
    for number in range(_WARM_UP + repetitions):
        tokens = batch(number)
        for contender, step in contenders.items():
            site.synchronize()
            began = time.perf_counter()
            loss = step(tokens)
            returned = time.perf_counter()
            site.synchronize()
            ended = time.perf_counter()
            require(bool(torch.isfinite(loss)), f"{contender}: the loss is {loss}")
            if number >= _WARM_UP:
                host[contender].append(returned - began)
                whole[contender].append(ended - began)
    gc.enable()
    if site.dry_run:
        return  # Times of a tiny model on a busy CPU are nobody's.
    units = size.blocks + 1
    for contender in contenders:
        beside = median(host[contender]) - median(host["plain"])
        site.figures[f"{name}: {contender}"] = {
            "step ms": round(1e3 * median(whole[contender]), 3),
            "host ms": round(1e3 * median(host[contender]), 3),
            "host us per unit above plain": round(1e6 * beside / units, 1),
            "step / fsdp2": round(median(whole[contender]) / median(whole["fsdp2"]), 3),
            "step / plain": round(median(whole[contender]) / median(whole["plain"]), 3),
        }


def _contender(site: Site, mesh: Any, name: str, size: Size, bf16: bool) -> Step:
    model: nn.Module = transformer(size, site.device)
    if name == "plain":
        if bf16:
            model = _Autocast(model, site.device_type)
    elif name == "fsdp2":
        _fsdp2(model, mesh, bf16)
    else:
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16) if bf16 else None
        backend = backend_for(site, name.partition(" ")[2])
        shard(model, mesh, backend, mixed_precision_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return lambda tokens: train_step(model, optimizer, tokens)


class _Autocast(nn.Module):
    """The model with products in bf16, as mixed precision is had without sharding."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        super().__init__()
        self.model, self.device_type = model, device_type

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device_type, torch.bfloat16):
            loss: Tensor = self.model(tokens)
        return loss


def _fsdp2(model: nn.Module, mesh: Any, bf16: bool) -> None:
    from torch.distributed import fsdp

    policy = (
        fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bf16
        else fsdp.MixedPrecisionPolicy()
    )
    for unit in units_of(model):
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy)
