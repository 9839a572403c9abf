"""What must hold of the installed wheels. Knows the public names only, and no source tree.

python smoke.py imports [BACKEND ...]    importing polyshard imports no backend; these exist
torchrun ... smoke.py train              a sharded model trains like a plain one
"""

from __future__ import annotations

import importlib.resources
import sys
from importlib.metadata import entry_points


def check_imports(expected: list[str]) -> None:
    """The core stays alone until a backend is chosen, and every package carries its types."""
    import polyshard

    early = sorted(name for name in sys.modules if name.startswith("polyshard_"))
    if early:
        sys.exit(f"import polyshard also imported {', '.join(early)}")
    if "site-packages" not in str(polyshard.__file__):
        sys.exit(f"polyshard came from {polyshard.__file__}, not from the wheel")
    backends = entry_points(group="polyshard.backends")
    if sorted(backends.names) != sorted(expected):
        sys.exit(f"installed backends: {sorted(backends.names)}, expected: {expected}")
    for module in ("polyshard", *(backend.module for backend in backends)):
        if not (importlib.resources.files(module) / "py.typed").is_file():
            sys.exit(f"{module} has no py.typed")
    for backend in backends:
        backend.load()
    print(f"polyshard imports, with {', '.join(expected) or 'no backend'}")


def train() -> None:
    """Ten AdamW steps on the ranks' own data end where one process on all of it ends."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from polyshard import Placements, fully_shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
    sharded = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
    sharded.load_state_dict(plain.state_dict())
    inputs, targets = torch.randn(10, 8, 7), torch.randn(10, 8, 3)

    fully_shard(sharded, mesh, Placements.zero3("dp"))
    own = slice(4 * mesh.get_rank(), 4 * mesh.get_rank() + 4)
    for model, rows in ((plain, slice(None)), (sharded, own)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch, target in zip(inputs[:, rows], targets[:, rows], strict=True):
            nn.functional.mse_loss(model(batch), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(sharded(inputs), plain(inputs))
    print(f"rank {mesh.get_rank()}: trained from the wheels like one process")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["imports", *backends]:
            check_imports(backends)
        case ["train"]:
            train()
        case _:
            sys.exit(__doc__)
