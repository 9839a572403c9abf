"""``python -m gpu_check.sanitized_step cuda``: two small steps, to be watched from outside."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from .models import Size, batches, transformer
from .sharding import backend_for, shard, train_step
from .site import Site, require

_SIZE = Size(blocks=2, width=32, tokens=8, batch=2, vocabulary=19)


def main(device_type: str) -> None:
    """Train over what one rank runs: on a GPU, both with and without a connected NCCL."""
    site = Site(dry_run=device_type == "cpu")
    mesh = site.world()
    for kind in ("copies",) if site.dry_run else ("copies", "connected"):
        model, batch = transformer(_SIZE, site.device), batches(_SIZE, site.device)
        shard(model, mesh, backend_for(site, kind))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            loss = train_step(model, optimizer, batch(step))
        require(bool(torch.isfinite(loss)), f"the loss is {loss}")
        print(f"{kind}: trained, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
