"""The contract, as far as it can be held to without a GPU: streams are noted, gloo stands for NCCL.

What is expected to fail is so of the stand-ins, which block the host in every collective, or of
NCCL, which compares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from recorded_cuda import RecordedNccl

from polyshard.testing import BackendConformance

_HOST = "the stand-in for NCCL blocks the host until its peers come"
_NCCL = "NCCL compares nothing; POLYSHARD_DEBUG=1 does"


class TestRecordedNccl(BackendConformance):
    backend = RecordedNccl
    device_type = "cpu"
    world_size = 2
    timeout = 40.0
    expected_failures: ClassVar[Mapping[str, str]] = {
        "test_submit_does_not_wait": "work is put on a stream by whoever submits it",
        "test_capture_is_claimed_where_graphs_are": "the stand-in for CUDA is on a CPU",
        "test_a_rank_that_fails_lets_its_peers_know": _HOST,
        "test_lanes_may_differ_in_order": _HOST,
        "test_ranks_that_diverge_are_told": _NCCL,
        "test_data_of_two_collectives_never_mixes": _NCCL,
    }
