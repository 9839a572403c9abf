"""The sockets backend keeps the contract."""

from __future__ import annotations

from polyshard.testing import BackendConformance


class TestSockets(BackendConformance):
    backend = "sockets"
    device_type = "cpu"
    world_size = 2
