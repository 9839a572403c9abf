"""The contract, on all GPUs of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

from polyshard.testing import BackendConformance

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(
    not GPUS,
    reason="needs a GPU, and torch finds none here; `nox -s gpu` runs it where there is one",
)

_COMPARES = "NCCL compares nothing; POLYSHARD_DEBUG=1 does"


class TestNccl(BackendConformance):
    backend = "nccl"
    device_type = "cuda"
    world_size = max(GPUS, 1)
    expected_failures: ClassVar[Mapping[str, str]] = (
        {
            "test_ranks_that_diverge_are_told": _COMPARES,
            "test_data_of_two_collectives_never_mixes": _COMPARES,
        }
        if GPUS > 1
        else {}
    )
