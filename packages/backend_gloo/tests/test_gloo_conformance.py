"""The gloo backend keeps the contract, like any backend."""

from __future__ import annotations

from polyshard.testing import BackendConformance


class TestGloo(BackendConformance):
    backend = "gloo"
    device_type = "cpu"
    world_size = 4
