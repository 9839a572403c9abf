"""What tests of polyshard and of its backends share, in this project and in others."""

from .launcher import run_ranks
from .loopback import LoopbackBackend
from .rank_failure import RankFailure, RankOutcome, RankReport
from .world import World

__all__ = ["LoopbackBackend", "RankFailure", "RankOutcome", "RankReport", "World", "run_ranks"]
