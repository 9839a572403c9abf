"""Which dtype each copy of a weight and of a gradient has. Knows no storage and no modules."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_FIELDS = (
    "main_params_dtype",
    "main_grads_dtype",
    "grad_comm_dtype",
    "compute_dtype",
    "output_dtype",
)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit; None follows the parameter's own dtype unless said otherwise.

    float64, complex and integer parameters keep their dtype everywhere.

    Args:
        main_params_dtype: dtype of the weights the optimizer steps, where it is more precise than
            the parameter's.
        main_grads_dtype: dtype gradients are accumulated and stepped in.
        grad_comm_dtype: dtype gradients travel in; None follows ``main_grads_dtype``.
        compute_dtype: dtype of the gathered weights and, with ``cast_forward_inputs``, of the
            floating inputs of the unit's forward.
        output_dtype: dtype floating outputs are cast to; None leaves them alone.
        cast_forward_inputs: cast floating inputs to ``compute_dtype`` where that is set.

    Raises:
        ValueError: for a dtype that is not a floating one.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in _FIELDS:
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating torch.dtype or None, got {dtype!r}.")

    def resolve(self, dtype: torch.dtype) -> GroupDtypes:
        """The dtypes of a group of parameters of ``dtype``."""
        if not dtype.is_floating_point or dtype == torch.float64:
            return GroupDtypes(dtype, dtype, dtype, dtype)
        wanted = self.main_params_dtype
        main = wanted if wanted is not None and _wider(wanted, dtype) else dtype
        compute = self.compute_dtype or dtype
        main_grad = self.main_grads_dtype or dtype
        return GroupDtypes(main, compute, main_grad, self.grad_comm_dtype or main_grad)


@dataclass(frozen=True)
class GroupDtypes:
    """The dtypes of one group's main weight, gathered weight, main grad and travelling grad."""

    main: torch.dtype
    compute: torch.dtype
    main_grad: torch.dtype
    grad_comm: torch.dtype


def _wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    return torch.finfo(dtype).eps < torch.finfo(than).eps


def unwritten_value(dtype: torch.dtype) -> float:
    """What stands in weights that were given no values: NaN, where there is one."""
    return math.nan if dtype.is_floating_point or dtype.is_complex else 0
