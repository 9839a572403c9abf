"""What tests of polyshard and of its backends share, in this project and in others.

``BackendConformance`` needs the extra ``polyshard[testing]``; all else needs the core only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .launcher import run_ranks
from .loopback import LoopbackBackend
from .rank_failure import RankFailure, RankOutcome, RankReport
from .world import World

if TYPE_CHECKING:
    from .conformance.suite import BackendConformance

__all__ = [
    "BackendConformance",
    "LoopbackBackend",
    "RankFailure",
    "RankOutcome",
    "RankReport",
    "World",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    # Ranks import this package as well, and have no use for pytest.
    if name != "BackendConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .conformance.suite import BackendConformance
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ImportError(
            "BackendConformance needs pytest: install the extra, polyshard[testing]."
        ) from error
    return BackendConformance
