"""What cannot work is refused with one clear error, on every rank, before anything changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from refusing import ZERO3, Request, hooked_linear, on, refuse
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from training import make_mesh

from polyshard import Placements, fully_shard
from polyshard.testing import run_ranks
from polyshard_gloo import GlooBackend


class Tied(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class FutureGloo(GlooBackend):
    """Speaks an interface that this core does not know."""

    spi = (2, 0)


def already_managed(rank: int) -> Request:
    module = nn.Linear(3, 2)
    fully_shard(module, make_mesh(), ZERO3)
    return on(module)


def tied_across_units(rank: int) -> Request:
    module = Tied()
    fully_shard(module.embedding, make_mesh(), ZERO3)
    return on(module)


def tied_afterwards(rank: int) -> Request:
    module = Tied()
    fully_shard(module.embedding, make_mesh(), ZERO3)
    module.head.weight = module.embedding.weight
    return on(module)


def missing_axis(rank: int) -> Request:
    return on(hooked_linear(), placements=Placements.zero3("tp"))


def missing_index(rank: int) -> Request:
    return on(hooked_linear(), placements=Placements.ddp(1))


def axis_by_name_and_index(rank: int) -> Request:
    return on(hooked_linear(), placements=Placements.hsdp("dp", 0))


def unfit_device(rank: int) -> Request:
    mesh = DeviceMesh("xpu", [0, 1], mesh_dim_names=("dp",))
    return Request(hooked_linear(), {"backend": "gloo"}, mesh)


def unserved_device(rank: int) -> Request:
    return Request(hooked_linear(), {}, DeviceMesh("xpu", [0, 1], mesh_dim_names=("dp",)))


def missing_backend(rank: int) -> Request:
    return on(hooked_linear(), backend="glue")


def incompatible_backend(rank: int) -> Request:
    return on(hooked_linear(), backend=FutureGloo())


def symmetric_memory(rank: int) -> Request:
    return on(hooked_linear(), use_symm_mem=True)


def two_backends(rank: int) -> Request:
    return on(hooked_linear(), use_symm_mem=True, backend="gloo")


def no_mesh(rank: int) -> Request:
    return Request(hooked_linear(), {}, "dp")  # type: ignore[arg-type]


def no_placements(rank: int) -> Request:
    return on(hooked_linear(), placements="zero3")


def no_policy(rank: int) -> Request:
    return on(hooked_linear(), mixed_precision_policy=torch.bfloat16)


def no_schedule(rank: int) -> Request:
    return on(hooked_linear(), schedule_policy=2)


def zero_divisor(rank: int) -> Request:
    return on(hooked_linear(), grad_divisor=0.0)


def ignored_by_name(rank: int) -> Request:
    return on(hooked_linear(), ignored_params=["weight"])


def no_module(rank: int) -> Request:
    return on([nn.Linear(1, 1)])


def no_forward(rank: int) -> Request:
    return on(nn.ModuleList([hooked_linear()]))


def scripted(rank: int) -> Request:
    return on(torch.jit.script(nn.Linear(3, 2)))


def lazy(rank: int) -> Request:
    return on(nn.LazyLinear(2))


def with_tensor_parallelism(rank: int) -> Request:
    module = nn.Linear(3, 2)
    weight = distribute_tensor(module.weight.detach(), make_mesh(), [Shard(0)])
    module.weight = nn.Parameter(weight)
    return on(module)


REFUSED: list[tuple[Callable[[int], Request], str, list[str]]] = [
    (already_managed, "UnsupportedError", ["Linear", "already given to fully_shard"]),
    (tied_across_units, "UnsupportedError", ["'head.weight' of Tied", "unit 'Embedding'"]),
    (tied_afterwards, "UnsupportedError", ["'head.weight' of Tied", "unit 'Embedding'"]),
    (missing_axis, "PlacementError", ["no axis 'tp'", "('dp',)"]),
    (missing_index, "PlacementError", ["no axis 1", "('dp',)"]),
    (axis_by_name_and_index, "PlacementError", ["'dp' and 0", "same mesh axis"]),
    (unfit_device, "BackendError", ["'gloo'", "'xpu'", "serves cpu"]),
    (unserved_device, "BackendError", ["device type 'xpu'", "'gloo'", "serves cpu"]),
    (missing_backend, "BackendError", ["'glue'", "Installed", "'gloo'"]),
    (incompatible_backend, "BackendError", ["2.0", "this polyshard has 1.0", "Upgrade polyshard"]),
    (symmetric_memory, "BackendError", ["'symm_mem'", "unavailable", "serves cuda"]),
    (two_backends, "ValueError", ["use_symm_mem=True", "'gloo'"]),
    (no_mesh, "PlacementError", ["DeviceMesh", "got str"]),
    (no_placements, "PlacementError", ["Placements", "'zero3'"]),
    (no_policy, "ValueError", ["mixed_precision_policy", "torch.bfloat16"]),
    (no_schedule, "ValueError", ["schedule_policy", "2"]),
    (zero_divisor, "ValueError", ["grad_divisor", "0.0"]),
    (ignored_by_name, "ValueError", ["ignored_params", "'weight'"]),
    (no_module, "UnsupportedError", ["a module", "list"]),
    (no_forward, "UnsupportedError", ["ModuleList has no forward"]),
    (scripted, "UnsupportedError", ["ScriptModule"]),
    (lazy, "UnsupportedError", ["'weight'", "not initialised"]),
    (with_tensor_parallelism, "PlacementError", ["'weight' of Linear", "shares ranks", "dp_axes"]),
]


@pytest.mark.parametrize(
    ("make", "kind", "fragments"), REFUSED, ids=[make.__name__ for make, _, _ in REFUSED]
)
def test_bad_requests_are_refused(
    make: Callable[[int], Request], kind: str, fragments: list[str]
) -> None:
    """Every rank gets the same error, which says what was wrong, and nothing has changed."""
    first, second = run_ranks(2, refuse, make)
    assert first == second
    assert first.kind == kind
    for fragment in fragments:
        assert fragment in first.message
