"""The real core over the backend: what its lanes ask of streams, and that training is right.

Two ranks over gloo stand for two GPUs; see recorded_cuda.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from recorded_cuda import RecordedNccl, lane_names
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import MixedPrecisionPolicy, Placements, full_state_dict, fully_shard
from polyshard.testing import run_ranks

# Of one step after the first: 12 weights, 6 on each rank, and one use count. A line with a brace
# opens or closes a range on a stream; a mark is an event recorded there.
STEP = """
    mark compute@1
    gather waits for compute@1
    gather: { Linear (float32): gather for forward
    gather: acquire 12 float32
    gather: gather all_gather 6 float32
    gather: }
    mark gather@1
    compute waits for gather@1
    mark compute@2
    gather waits for compute@2
    gather: { Linear (float32): release
    gather: release 12 float32
    gather: }
    gather: { settle gather axis 0
    gather: }
    reduce: { settle reduce axis 0
    reduce: }
    mark gather@2
    compute waits for gather@2
    mark reduce@1
    compute waits for reduce@1
    mark compute@3
    gather waits for compute@3
    gather: { Linear (float32): gather for backward
    gather: acquire 12 float32
    gather: gather all_gather 6 float32
    gather: }
    mark gather@3
    compute waits for gather@3
    compute: release 12 float32
    compute: acquire 12 float32
    mark compute@4
    gather waits for compute@4
    gather: { Linear (float32): release
    gather: release 12 float32
    gather: }
    compute: acquire 6 float32
    mark compute@5
    reduce waits for compute@5
    reduce: { Linear (float32): reduce gradients
    reduce: reduce reduce_scatter sum 6+1 float32
    reduce: }
    mark reduce@2
    gather: { settle gather axis 0
    gather: }
    reduce: { settle reduce axis 0
    reduce: }
    mark gather@4
    compute waits for gather@4
    mark reduce@3
    compute waits for reduce@3
    compute waits for reduce@2
    compute: release 12 float32
    compute waits for gather@4
    compute waits for reduce@3
"""


def second_step(rank: int, **options: Any) -> tuple[list[str], int]:
    """What the second step of a single layer asked for, streams called by their lanes; and how
    often the host asked events."""
    torch.manual_seed(0)
    backend = RecordedNccl(**options)
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), nn.Linear(3, 4, bias=False)
    fully_shard(model, mesh, Placements.zero3("dp"), backend=backend)
    cuda = backend.cuda
    for step in range(2):
        cuda.log.clear()
        cuda.points.clear()
        cuda.queries = 0
        model(torch.full((2, 3), float(rank + step))).sum().backward()
        model.zero_grad()
    log = list(cuda.log)
    if not options:
        for role, stream in lane_names(backend).items():
            log = [line.replace(stream, role) for line in log]
    return log, cuda.queries


def test_one_unit() -> None:
    """Exactly this is waited for, marked, acquired, launched and released in a step: gathered
    memory comes and goes on the gather lane, each collective is one launch after one wait, and the
    gradient and its use count travel together."""
    expected = [line.strip() for line in STEP.strip().splitlines()]
    for log, _ in run_ranks(2, second_step):
        assert log == expected


def test_shared_stream() -> None:
    """With one stream for all lanes the same is launched, and no lane waits for another."""
    for log, _ in run_ranks(2, second_step, shared_stream=True):
        launches = [line.partition(": ")[2] for line in STEP.splitlines() if " float32" in line]
        shared = [line.partition(": ")[2] for line in log if " float32" in line]
        assert [line for line in shared if "{" not in line] == [
            line for line in launches if "{" not in line
        ]
        assert {line.partition(":")[0] for line in log if ": " in line} == {"stream0", "compute"}
        assert not any(line.startswith("stream0 waits for stream0") for line in log)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(
    rank: int, strategy: str, capability: tuple[int, int], half: bool, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Weights after three steps; those of one process on both ranks' data; the log."""
    torch.manual_seed(0)
    model = Net()
    plain, backend = copy.deepcopy(model), RecordedNccl(**options)
    backend.cuda.compute_capability = capability
    shape, axes = ((2,), ("dp",)) if "h" not in strategy else ((1, 2), ("outer", "inner"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16) if half else None
    for unit in [*model.blocks, model]:
        placements = getattr(Placements, strategy)(*axes)
        fully_shard(unit, mesh, placements, mixed_precision_policy=policy, backend=backend)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(3):
        model(inputs(rank, step)).square().mean().backward()
        ours.step()
        ours.zero_grad()
        plain(torch.cat([inputs(0, step), inputs(1, step)])).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    return full_state_dict(model), plain.state_dict(), backend.cuda.log


@pytest.mark.parametrize(
    ("strategy", "capability", "half", "options"),
    [
        ("zero3", (9, 0), False, {}),
        ("zero3", (8, 0), False, {}),
        ("zero2", (9, 0), True, {}),
        ("ddp", (9, 0), False, {"shared_stream": True}),
        ("hsdp", (9, 0), False, {"user_buffers": True}),
        ("hfsdp", (8, 0), False, {"high_priority": True}),
    ],
)
def test_training(
    strategy: str, capability: tuple[int, int], half: bool, options: dict[str, Any]
) -> None:
    """Trained over the backend's own lanes and communicators, a model ends as in one process."""
    for weights, plain, log in run_ranks(2, trained, strategy, capability, half, options):
        assert weights.keys() == plain.keys()
        for name, value in plain.items():
            tolerance = {"rtol": 0.0, "atol": 0.03} if half else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(weights[name], value, msg=name, **tolerance)
        averaged = [line for line in log if " avg " in line]
        assert bool(averaged) == (capability < (9, 0))


def captured(rank: int) -> tuple[list[str], list[str]]:
    """A step that is captured, and the one before it."""
    torch.manual_seed(0)
    backend, model = RecordedNccl(), Net()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh, Placements.zero3("dp"), backend=backend)
    cuda, logs = backend.cuda, []
    for step in range(4):
        cuda.log.clear()
        cuda.points.clear()
        if step == 2:
            queries = cuda.queries
            with cuda.capture():
                model(inputs(rank, step)).square().mean().backward()
            assert cuda.queries == queries, "the host asked events during the capture"
        else:
            model(inputs(rank, step)).square().mean().backward()
        logs.append(list(cuda.log))
        model.zero_grad(set_to_none=True)
    return logs[1], logs[2]


def test_step_in_a_capture() -> None:
    """A captured step launches what another one launches, forks every lane from compute and joins
    it, waits for nothing from before, and asks no event (FakeStream and FakeEvent would raise)."""
    for eager, graph in run_ranks(2, captured):
        assert [line for line in graph if "all_gather" in line or "reduce_scatter" in line] == [
            line for line in eager if "all_gather" in line or "reduce_scatter" in line
        ]
        lanes = {line.partition(":")[0] for line in graph if "{" in line}
        for lane in lanes:
            assert any(line.startswith(f"{lane} waits for compute@") for line in graph), lane
            assert graph[-2].startswith("compute waits for") or graph[-1].startswith(
                "compute waits for"
            )
