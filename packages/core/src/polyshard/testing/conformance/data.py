"""What ranks contribute, what a single process makes of it, and words for where they differ.

The oracle: every rank can make every rank's contribution, and combines them with torch alone.
Knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...spi import Op

#: What gathers and broadcasts are tried with; those of this torch.
MOVED_DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in """
        float32 bfloat16 float16 float64 complex64 complex128 complex32 bool uint8 int8 int16
        int32 int64 uint16 uint32 uint64 float8_e4m3fn float8_e5m2
    """.split()
    if hasattr(torch, name)
)

#: Lengths per rank: nothing, one element, odd ones, more than a small message, many.
_SHORT_LISTS: tuple[tuple[int, ...], ...] = (
    (0,),
    (1,),
    (7,),
    (0, 3, 0, 5),
    (1021,),
    (1, 4099, 0, 2),
    (17,) * 70,
)

_HALF_PRECISION = frozenset({torch.float16, torch.bfloat16})
_CACHED_NUMEL = 10_000


class Violation(AssertionError):
    """The backend did not do what the contract demands; said in one line."""


def require(condition: bool, said: str | Callable[[], str]) -> None:
    """Raise Violation where ``condition`` does not hold."""
    if not condition:
        raise Violation(said if isinstance(said, str) else said())


def short_lists(dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """Lengths per rank to try a dtype with; all of them for those that are trained in."""
    is_common = dtype in (torch.float32, torch.bfloat16)
    return _SHORT_LISTS if is_common else ((1,), (0, 3, 0, 5), (1, 4099, 0, 2))


def shown(lengths: Sequence[int]) -> str:
    """Lengths as messages show them."""
    more = ", ..." if len(lengths) > 8 else ""
    return f"[{', '.join(map(str, lengths[:8]))}{more}]"


def long_lists(largest_numel: int) -> tuple[tuple[int, ...], ...]:
    """Lengths of tensors that travel in pieces, alone and among short ones."""
    return (
        (largest_numel // 8 + 1,),
        (largest_numel,),
        (largest_numel // 2 + 1, 3, 0, largest_numel // 4, 11),
    )


def bits(
    rank: int,
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """What ``rank`` has to move: any bits, NaNs of every kind and negative zeros among them."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * rank + 1)
    tensors = []
    for numel in lengths:
        if dtype is torch.bool:
            tensor = torch.randint(0, 2, (numel,), generator=generator).to(torch.bool)
        else:
            octets = torch.randint(
                0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8
            )
            tensor = octets.view(dtype)
        tensors.append(tensor.to(device))
    return tensors


def values(
    rank: int,
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """What ``rank`` has to reduce: normally distributed, or integers over the whole range."""
    return [
        _values(rank, index, numel, dtype, seed).clone().to(device)
        for index, numel in enumerate(lengths)
    ]


def combined(contributions: Sequence[Tensor], op: Op) -> Tensor:
    """The exact result: float64 or complex128 for floats, wrapped in their dtype for integers."""
    dtype = contributions[0].dtype
    if dtype is torch.bool:
        return torch.stack(list(contributions)).any(0)
    if not _is_inexact(dtype):
        total = sum(
            (_as_int64(tensor) for tensor in contributions[1:]), _as_int64(contributions[0])
        )
        return total.view(dtype) if dtype.itemsize == 8 else total.to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = contributions[0].to(wide)
    for tensor in contributions[1:]:
        total = total + tensor.to(wide)
    return total / len(contributions) if op is Op.AVG else total


def added_in_order(contributions: Sequence[Tensor], op: Op) -> Tensor:
    """One way to round: added in the order of ranks, half precision in fp32, then divided, and
    rounded once to their dtype."""
    dtype = contributions[0].dtype
    wide = torch.float32 if dtype in _HALF_PRECISION else dtype
    total = contributions[0].to(wide)
    for contribution in contributions[1:]:
        total = total + contribution.to(wide)
    return (total / len(contributions) if op is Op.AVG else total).to(dtype)


def require_bits(got: Tensor, expected: Tensor, where: str) -> None:
    """``got`` is ``expected``, bit by bit; raises Violation that says where it is not."""
    got = got.detach().cpu()
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise Violation(
            f"{where}: {got.dtype} of shape {tuple(got.shape)}, expected {expected.dtype} of "
            f"{tuple(expected.shape)}"
        )
    if got.numel() == 0:
        return
    width = got.dtype.itemsize
    differs = got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    if bool(differs.any()):
        _raise_first(differs.view(-1, width).any(1), got, expected, where)


def require_combined(
    got: Tensor,
    contributions: Sequence[Tensor],
    op: Op,
    where: str,
    *,
    in_fp32: bool,
) -> None:
    """``got`` is the combined ``contributions``, however their sum was ordered.

    Integers: to the bit. Floats: rounded once to their dtype, from sums whose rounding errors
    are those of fp32 for half precision that accumulates ``in_fp32``, else those of the dtype.
    """
    expected = combined(contributions, op)
    dtype = contributions[0].dtype
    if not _is_inexact(dtype):
        require_bits(got, expected, where)
        return
    got = got.detach().cpu()
    if got.dtype != dtype or got.shape != expected.shape:
        raise Violation(f"{where}: {got.dtype} of shape {tuple(got.shape)}, expected {dtype}")
    if got.numel() == 0:
        return
    sizes = sum(tensor.to(expected.dtype).abs() for tensor in contributions)
    assert isinstance(sizes, Tensor)
    if dtype.is_complex:
        got, expected = torch.view_as_real(got), torch.view_as_real(expected)
        sizes = sizes.unsqueeze(1)
    narrow = torch.finfo(dtype)
    accumulates = torch.float32 if in_fp32 and dtype in _HALF_PRECISION else dtype
    # Half a unit in the last place of each element, and a rounding for each rank and the division.
    _, exponent = torch.frexp(expected)
    half_unit = torch.ldexp(torch.full_like(expected, narrow.eps / 4), exponent)
    half_unit = half_unit.clamp(min=narrow.tiny * narrow.eps)
    allowed = half_unit + (len(contributions) + 1) * torch.finfo(accumulates).eps * sizes
    wrong = ~((got.to(torch.float64) - expected).abs() <= allowed)
    if bool(wrong.any()):
        _raise_first(wrong, got, expected.to(got.dtype), where)


def _raise_first(wrong: Tensor, got: Tensor, expected: Tensor, where: str) -> None:
    """Say how many elements are wrong and what the first one is."""
    wrong = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
    first = int(wrong.nonzero()[0])
    raise Violation(
        f"{where}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; element {first} is "
        f"{_shown(got[first])}, expected {_shown(expected[first])}"
    )


def _shown(element: Tensor) -> str:
    value = element.tolist()
    octets = element.reshape(1).contiguous().view(torch.uint8) if element.dim() == 0 else None
    if octets is not None and value != value:  # NaNs differ in their bits only
        return f"{value} (bytes {octets.tolist()})"
    return str(value)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _as_int64(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int64) if tensor.dtype.itemsize == 8 else tensor.to(torch.int64)


def _values(rank: int, index: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    make = _cached_values if numel <= _CACHED_NUMEL else _new_values
    return make(rank, index, numel, dtype, seed)


def _new_values(rank: int, index: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000_000 * seed + 1000 * rank + index)
    if _is_inexact(dtype):
        wide = torch.float64 if dtype.itemsize >= 8 else torch.float32
        if dtype.is_complex:
            wide = torch.complex128 if dtype.itemsize >= 16 else torch.complex64
        return torch.randn(numel, generator=generator, dtype=wide).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).to(dtype)
    octets = torch.randint(
        0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return octets.view(dtype)


_cached_values = lru_cache(maxsize=4096)(_new_values)
