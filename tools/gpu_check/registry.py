"""The checks: what they are called, which function they are, how long they may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: in the report.
        function: ``module:function``, called with a :class:`gpu_check.site.Site` and ``arguments``.
        seconds: after which it is ended.
        measures: it takes times, so nothing else runs beside it.
        environment: variables that its process starts with.
    """

    name: str
    function: str
    seconds: float = 90.0
    measures: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


# Matrix products that give the same bits at every call.
_SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_STAGED = {"POLYSHARD_GLOO_STAGING": "1", **_SAME_BITS}


def _conformance(name: str, parts: int, seconds: float, **arguments: Any) -> list[Check]:
    """The suite in several processes, which takes a fraction of the time."""
    return [
        Check(
            f"{name}_{part + 1}of{parts}",
            "gpu_check.conformance:run",
            seconds,
            arguments={**arguments, "part": part, "parts": parts},
            environment=_STAGED,
        )
        for part in range(parts)
    ]


CHECKS: tuple[Check, ...] = (
    Check("step_time", "gpu_check.step_time:run", 75, measures=True),
    Check("kernels", "gpu_check.kernels:run", 60, measures=True),
    Check("memory", "gpu_check.memory:run", 60, measures=True),
    Check(
        "nccl_calls",
        "gpu_check.nccl_calls:run",
        60,
        environment={"TORCH_FR_BUFFER_SIZE": "2000"},
    ),
    Check("graph_capture", "gpu_check.graph_capture:run", 75, environment=_SAME_BITS),
    Check(
        "ranks_share_gpu_2",
        "gpu_check.shared_gpu:run",
        120,
        arguments={"ranks": 2},
        environment=_STAGED,
    ),
    Check(
        "ranks_share_gpu_4",
        "gpu_check.shared_gpu:run",
        150,
        arguments={"ranks": 4},
        environment=_STAGED,
    ),
    Check("compile", "gpu_check.compiled:run", 120, environment=_SAME_BITS),
    *_conformance("conformance_nccl_world1", 2, 120, backend="nccl", ranks=1),
    *_conformance(
        "conformance_nccl_connected",
        2,
        150,
        backend="gpu_check.connected:ConnectedNccl",
        ranks=1,
    ),
    *_conformance("conformance_gloo_staged_ranks2", 4, 180, backend="gloo", ranks=2),
    Check("sanitizer", "gpu_check.sanitizer:run", 120),
)
