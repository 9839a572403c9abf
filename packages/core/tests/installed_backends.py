"""What a program sees of the backends installed where it runs; a script, run by a test.

Prints JSON: the error of every way to ask for each backend named on the command line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import BackendError, Placements, fully_shard
from polyshard.backends import choose_backend


def outcome(action: Callable[[], object]) -> dict[str, str | None]:
    """The message and the type of the cause of a BackendError; of no error, None for both."""
    try:
        action()
    except BackendError as error:
        cause = error.__cause__
        return {"message": str(error), "cause": cause and type(cause).__name__}
    return {"message": None, "cause": None}


def main() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    answer = {}
    for word in sys.argv[1:]:
        name, device_type = word.split(":")
        module = nn.Linear(2, 2)
        before = dict(module.named_parameters())
        chosen = outcome(lambda: choose_backend(name, device_type=device_type))  # noqa: B023
        sharded = outcome(
            lambda: fully_shard(module, mesh, Placements.zero3("dp"), backend=name)  # noqa: B023
        )
        after = dict(module.named_parameters())
        unchanged = all(after[key] is parameter for key, parameter in before.items())
        imported = sorted(key for key in sys.modules if key.startswith("small_"))
        answer[name] = {
            "choose_backend": chosen,
            "fully_shard": sharded,
            "unchanged": unchanged,
            "imported": imported,
        }
    dist.destroy_process_group()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
