"""Whole weights in the hands of someone outside of their unit, who has no memory to read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import OneRank, batch
from torch import Tensor, nn

from polyshard import UnsupportedError, unsharded


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class TestReleasedParameters:
    """Whole weights in the hands of someone outside of their unit."""

    def test_computing_with_them(self, zero3: OneRank) -> None:
        """Whatever reads their values is an error that names parameter and unit, however it gets
        there; and it is gone while they have memory."""
        model = Model()
        weight = model.weight
        zero3.shard(model)
        uses: list[Callable[[], Any]] = [
            lambda: weight + 1,
            lambda: torch.ones(1, 4) @ weight.t(),
            lambda: torch.cat([weight]),
            lambda: torch.stack([model.bias.full_tensor(), weight[0]]),
            lambda: nn.functional.linear(batch(), weight),
            lambda: weight.data,
            lambda: weight.T,
            lambda: weight.detach(),
            lambda: weight.tolist(),
            lambda: weight.zero_(),
            lambda: copy.deepcopy(weight),
            lambda: pickle.dumps(weight),
            lambda: torch._foreach_add([weight], 1.0),
        ]
        for use in uses:
            with pytest.raises(UnsupportedError, match=r"weight 'weight' of unit 'Model', which"):
                use()
        with unsharded(model):
            assert type(weight) is nn.Parameter
            assert (weight + 1).shape == (3, 4)
        with pytest.raises(UnsupportedError, match="released outside of forwards"):
            weight.sum()

    def test_what_they_still_tell(self, zero3: OneRank) -> None:
        """They are the parameters they were: shape and attributes, keys of dicts, with hooks."""
        model = Model()
        weight = model.weight
        weight.tag = "mine"  # type: ignore[attr-defined]
        known = {weight: 1}
        zero3.shard(model)
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.dtype, weight.grad, weight.numel()) == (
            (3, 4),
            torch.float32,
            None,
            12,
        )
        assert (known[weight], weight.tag) == (1, "mine")  # type: ignore[attr-defined]
        assert "'weight' of unit 'Model'" in repr(weight)
        seen: list[Tensor] = []
        weight.register_hook(seen.append)
        model(batch()).sum().backward()
        assert seen[0].shape == (3, 4)
        del model
        with pytest.raises(UnsupportedError, match="got the whole weight, which is released"):
            weight.sum()
