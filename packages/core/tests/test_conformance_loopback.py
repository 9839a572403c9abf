"""The backend for groups of one rank keeps the contract, as far as one rank can."""

from __future__ import annotations

from polyshard.testing import BackendConformance, LoopbackBackend


class TestLoopback(BackendConformance):
    backend = LoopbackBackend
    device_type = "cpu"
    world_size = 1
    expected_failures = {  # noqa: RUF012
        "test_submit_does_not_wait": "with one rank there is nothing to wait for: its collectives "
        "are copies, which are done when submit returns"
    }
