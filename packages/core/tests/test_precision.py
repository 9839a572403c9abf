"""MixedPrecisionPolicy: which dtypes a group of parameters gets."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyshard import MixedPrecisionPolicy
from polyshard.precision import GroupDtypes

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UNTOUCHED = [
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_defaults(dtype: torch.dtype) -> None:
    """Main weights have at least fp32; everything else follows the parameter."""
    assert MixedPrecisionPolicy().resolve(dtype) == GroupDtypes(F32, dtype, dtype, dtype)


def test_the_usual_policy() -> None:
    """bf16 compute over fp32 parameters: fp32 main weights and gradients, bf16 in between."""
    policy = MixedPrecisionPolicy(compute_dtype=BF16)
    assert policy.resolve(F32) == GroupDtypes(main=F32, compute=BF16, main_grad=F32, grad_comm=F32)


@pytest.mark.parametrize(
    ("main", "dtype", "expected"),
    [
        (F32, F16, F32),
        (BF16, F32, F32),  # never lowered
        (BF16, F16, F16),  # fewer digits: not raised
        (F16, BF16, F16),
        (F64, F32, F64),
        (None, BF16, BF16),
        (F32, F64, F64),
    ],
)
def test_main_weights_are_only_raised(
    main: torch.dtype | None, dtype: torch.dtype, expected: torch.dtype
) -> None:
    """main_params_dtype applies to parameters of lower precision, others keep theirs."""
    assert MixedPrecisionPolicy(main_params_dtype=main).resolve(dtype).main == expected


@pytest.mark.parametrize(
    ("main_grads", "grad_comm", "expected"),
    [
        (None, None, (BF16, BF16)),
        (F32, None, (F32, F32)),
        (F32, BF16, (F32, BF16)),
        (None, F32, (BF16, F32)),
    ],
)
def test_gradients(
    main_grads: torch.dtype | None,
    grad_comm: torch.dtype | None,
    expected: tuple[torch.dtype, torch.dtype],
) -> None:
    """Main gradients follow the parameter, travelling ones the main gradients."""
    policy = MixedPrecisionPolicy(main_grads_dtype=main_grads, grad_comm_dtype=grad_comm)
    dtypes = policy.resolve(BF16)
    assert (dtypes.main_grad, dtypes.grad_comm) == expected


EVERYTHING = MixedPrecisionPolicy(
    main_params_dtype=F32,
    main_grads_dtype=F32,
    grad_comm_dtype=BF16,
    compute_dtype=BF16,
    output_dtype=F32,
)


@pytest.mark.parametrize("dtype", [F64, *UNTOUCHED])
def test_what_keeps_its_dtype(dtype: torch.dtype) -> None:
    """float64, complex numbers, integers and booleans keep theirs throughout."""
    assert EVERYTHING.resolve(dtype) == GroupDtypes(dtype, dtype, dtype, dtype)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_everything_set(dtype: torch.dtype) -> None:
    """Set dtypes hold for every floating parameter up to fp32."""
    assert EVERYTHING.resolve(dtype) == GroupDtypes(F32, BF16, F32, BF16)


FIELDS = [
    field.name
    for field in dataclasses.fields(MixedPrecisionPolicy)
    if field.name.endswith("_dtype")
]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [torch.int32, torch.complex64, torch.bool, "float32", float, 1])
def test_bad_dtypes(name: str, value: object) -> None:
    """A dtype that is no floating one is refused by the name of its field."""
    with pytest.raises(ValueError, match=f"{name} must be a floating torch.dtype or None, got"):
        MixedPrecisionPolicy(**{name: value})  # type: ignore[arg-type]


def test_every_dtype_field_is_checked() -> None:
    """Five fields hold dtypes; one that is added is checked by the tests above."""
    assert FIELDS == [
        "main_params_dtype",
        "main_grads_dtype",
        "grad_comm_dtype",
        "compute_dtype",
        "output_dtype",
    ]


def test_a_policy_is_a_value() -> None:
    """Equal policies are equal, hash alike and cannot be changed."""
    assert MixedPrecisionPolicy(compute_dtype=BF16) == MixedPrecisionPolicy(compute_dtype=BF16)
    assert len({MixedPrecisionPolicy(), MixedPrecisionPolicy()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedPrecisionPolicy().compute_dtype = BF16  # type: ignore[misc]
