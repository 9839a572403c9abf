"""Mixed precision in a unit: casts of inputs and outputs, dtypes at rest, and what is computed."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from one_rank import OneRank, batch, groups, make_stack, twins, units_in
from torch import Tensor, nn

from polyshard import MixedPrecisionPolicy

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Point = namedtuple("Point", ["x", "y"])


class Recording(nn.Module):
    """Remembers what its forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.given: tuple[Any, ...] = ()
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = (args, kwargs)
        self.dtype = self.weight.dtype
        out = x.to(self.weight.dtype) @ self.weight
        return {"out": out, "in": x, "count": torch.tensor(3)}


class TestCasts:
    def test_inputs(self, world: OneRank) -> None:
        """Floating inputs come in the compute dtype, wherever they are; others as they are."""
        model = Recording()
        world.shard(model, mixed_precision_policy=MixedPrecisionPolicy(compute_dtype=BF16))
        ids, flag = torch.arange(3), torch.tensor([True])
        f64 = torch.ones(2, dtype=F64)
        ordered = OrderedDict(a=torch.ones(1))
        thing = object()
        out = model(
            batch(),
            ids,
            [f64, (flag, "text")],
            Point(torch.ones(1), 2),
            deep={"k": ordered},
            o=thing,
        )
        args, kwargs = model.given
        assert args[0] is ids
        assert args[1][0].dtype == BF16
        assert args[1][1][0] is flag
        assert args[1][1][1] == "text"
        assert isinstance(args[2], Point)
        assert args[2].x.dtype == BF16
        assert args[2].y == 2
        assert type(kwargs["deep"]["k"]) is OrderedDict
        assert kwargs["deep"]["k"]["a"].dtype == BF16
        assert kwargs["o"] is thing
        assert out["out"].dtype == out["in"].dtype == model.dtype == BF16
        assert ordered["a"].dtype == F32

    @pytest.mark.parametrize(
        "policy",
        [
            MixedPrecisionPolicy(),
            MixedPrecisionPolicy(compute_dtype=BF16, cast_forward_inputs=False),
        ],
    )
    def test_inputs_left_alone(self, world: OneRank, policy: MixedPrecisionPolicy) -> None:
        """Without a compute dtype, or told so, inputs come as the very objects they are."""
        model = Recording()
        world.shard(model, mixed_precision_policy=policy)
        x, other = batch(), {"a": [torch.ones(1, dtype=F64)]}
        out = model(x, other)
        assert out["in"] is x
        assert model.given[0][0] is other

    def test_outputs(self, world: OneRank) -> None:
        """Floating outputs come in the output dtype; without one they are left alone."""
        for output_dtype, expected in ((F32, F32), (None, BF16), (F64, F64)):
            model = Recording()
            policy = MixedPrecisionPolicy(compute_dtype=BF16, output_dtype=output_dtype)
            world.shard(model, mixed_precision_policy=policy)
            out = model(batch())
            assert out["out"].dtype == out["in"].dtype == expected
            assert out["count"].dtype == torch.int64

    def test_gradients_flow_through_casts(self, world: OneRank) -> None:
        """The input's gradient comes in the input's dtype."""
        model = Recording()
        policy = MixedPrecisionPolicy(compute_dtype=BF16, output_dtype=F32)
        world.shard(model, mixed_precision_policy=policy)
        x = batch().requires_grad_()
        model(x)["out"].sum().backward()
        assert x.grad.dtype == F32
        assert model.weight.grad.dtype == F32


@pytest.mark.parametrize(
    ("parameter", "policy", "expected"),
    [
        # weight at rest, in forward, gradient
        (F32, MixedPrecisionPolicy(), (F32, F32, F32)),
        (BF16, MixedPrecisionPolicy(), (F32, BF16, BF16)),
        (BF16, MixedPrecisionPolicy(main_grads_dtype=F32), (F32, BF16, F32)),
        (BF16, MixedPrecisionPolicy(main_params_dtype=None), (BF16, BF16, BF16)),
        (F32, MixedPrecisionPolicy(compute_dtype=F16), (F32, F16, F32)),
        (F32, MixedPrecisionPolicy(main_grads_dtype=BF16), (F32, F32, BF16)),
        (F32, MixedPrecisionPolicy(grad_comm_dtype=BF16, compute_dtype=BF16), (F32, BF16, F32)),
        (F64, MixedPrecisionPolicy(cast_forward_inputs=False), (F64, F64, F64)),
    ],
)
def test_dtypes(
    world: OneRank,
    parameter: torch.dtype,
    policy: MixedPrecisionPolicy,
    expected: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> None:
    """Weights at rest, in forward, and gradients have the dtypes of the policy."""
    model = Recording().to(parameter)
    world.shard(model, mixed_precision_policy=policy)
    at_rest = model.weight.dtype
    model(batch())["out"].float().sum().backward()
    assert (at_rest, model.dtype, model.weight.grad.dtype) == expected


def test_the_parameters_value_is_kept(world: OneRank) -> None:
    """A weight that is raised to fp32 starts from the very value it had, and the one seen in
    forward is that one rounded back."""
    model = nn.Linear(4, 3).bfloat16()
    values = model.weight.detach().clone()
    world.shard(model)
    assert torch.equal(model.weight.full_tensor(), values.float())
    out = model(batch().bfloat16())
    assert torch.equal(
        out, nn.functional.linear(batch().bfloat16(), values, model.bias.full_tensor().bfloat16())
    )


def test_training_in_bf16_with_fp32_weights(world: OneRank) -> None:
    """Each step computes with rounded weights and steps the exact ones."""
    model, reference = twins(make_stack())
    policy = MixedPrecisionPolicy(compute_dtype=BF16)
    world.shard(*units_in(model), mixed_precision_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(5):
        rounded = copy.deepcopy(reference).bfloat16()
        rounded(batch(step).bfloat16()).float().square().mean().backward()
        for theirs, parameter in zip(rounded.parameters(), reference.parameters(), strict=True):
            parameter.grad = theirs.grad.float()
        model.zero_grad()
        model(batch(step)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


def test_units_of_different_precision(world: OneRank) -> None:
    """Units of one root may have policies of their own."""
    model = make_stack()
    low = MixedPrecisionPolicy(compute_dtype=BF16, output_dtype=F32)
    world.shard(*model.blocks, mixed_precision_policy=low)
    world.shard(model)
    model(batch()).sum().backward()
    assert [group.dtypes.compute for group in groups(model)] == [F32, BF16, BF16, BF16]
    assert all(parameter.grad.dtype == F32 for parameter in model.parameters())
