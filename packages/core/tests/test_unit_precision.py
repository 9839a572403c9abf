"""Mixed precision in a unit: casts of inputs and outputs, dtypes at rest, and what is computed."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import OneRank, batch, groups, make_stack, twins, units_in
from torch import Tensor, nn

from polyshard import MixedPrecisionPolicy
from polyshard.casting import cast

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


class Answer(OrderedDict[str, Any]):
    """Like the outputs of popular model libraries: reads by attribute, no update()."""

    def update(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        raise TypeError("use __setitem__")


class Box(namedtuple("Box", ["x", "kind"])):
    """Made from other arguments than its fields."""

    def __new__(cls, x: Any) -> Box:
        return super().__new__(cls, x, "box")


class Pair(tuple[Any, ...]):
    """Likewise, and no named tuple."""

    def __new__(cls, x: Any, note: str) -> Pair:
        made = super().__new__(cls, (x, 1))
        made.note = note  # type: ignore[attr-defined]
        return made


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    note: str = "kept"


class TestContainers:
    """What `cast` makes of values in which tensors are."""

    @pytest.mark.parametrize(
        ("make", "read"),
        [
            (lambda x: Answer(x=x, other=1), lambda out: out["x"]),
            (lambda x: UserDict(x=x), lambda out: out["x"]),
            (lambda x: defaultdict(list, x=x), lambda out: out["x"]),
            (lambda x: Box(x), lambda out: out.x),
            (lambda x: Pair(x, "kept"), lambda out: out[0]),
            (lambda x: torch.max(x.view(1, 2), 1), lambda out: out.values),
            (lambda x: Frozen(x), lambda out: out.x),
            (lambda x: deque([x, 1], maxlen=3), lambda out: out[0]),
            (lambda x: [(x, {"y": x})], lambda out: out[0][1]["y"]),
        ],
    )
    def test_same_kind_and_new_tensors(
        self, make: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
    ) -> None:
        """The container is of its own type, and what was given is unchanged."""
        value = make(torch.ones(2))
        found = cast(value, torch.bfloat16)
        assert type(found) is type(value)
        assert read(found).dtype == torch.bfloat16
        assert read(value).dtype == torch.float32
        if isinstance(value, deque):
            assert found.maxlen == 3
        assert getattr(found, "note", "kept") == "kept"

    def test_what_does_not_change_is_handed_on(self) -> None:
        """A cache that a module fills stays the caller's own."""
        value = [{"cache": []}, torch.ones(2, dtype=torch.int64), Frozen(torch.ones(1).bfloat16())]
        assert cast(value, torch.bfloat16) is value
