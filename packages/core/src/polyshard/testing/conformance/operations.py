"""Tests of raw buffer operations: ops.pack and ops.accumulate (clause 5.11)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...spi import BufferOps
from .bench import Bench
from .clauses import clause
from .data import Violation, require, values

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)
_SCALES = (1.0, 0.5, 1 / 3)


@clause("5.11", since=(1, 0))
def packing_is_what_torch_does(bench: Bench) -> None:
    """ops.pack writes each piece, cast and scaled, to its place and leaves the rest, as the
    torch version does up to the last bit of the fp32 result; empty pieces and transposed ones
    too."""
    ops, definition = bench.backend.ops, BufferOps()
    for dtype in _DTYPES:
        for source in _DTYPES:
            for scale in _SCALES:
                drawn = values(0, [7, 0, 1, 4099, 12], source, device=bench.device)
                drawn = [_bounded(tensor) for tensor in drawn]
                pieces = [(1, drawn[0]), (9, drawn[1]), (9, drawn[2]), (11, drawn[3])]
                pieces.append((4113, drawn[4].view(3, 4).t()))
                outs = [torch.full((4200,), 7, device=bench.device).to(dtype) for _ in range(2)]
                for each, out in zip((ops, definition), outs, strict=True):
                    _on_compute(bench, partial(each.pack, out, pieces, scale))
                _require_close(outs, f"pack of {source} into {dtype}, scale {scale:g}")


@clause("5.11", since=(1, 0))
def accumulating_is_what_torch_does(bench: Bench) -> None:
    """ops.accumulate adds the scaled contribution, as the torch version does up to the last bit
    of the fp32 result, and leaves the contribution."""
    ops, definition = bench.backend.ops, BufferOps()
    for dtype in _DTYPES:
        for source in _DTYPES:
            for scale in _SCALES:
                for numel in (0, 1, 4099):
                    (start,) = values(0, [numel], dtype, device=bench.device)
                    (drawn,) = values(1, [numel], source, device=bench.device)
                    contribution = _bounded(drawn)
                    kept = contribution.clone()
                    outs = [_bounded(start).clone() for _ in range(2)]
                    for each, out in zip((ops, definition), outs, strict=True):
                        _on_compute(bench, partial(each.accumulate, out, contribution, scale))
                    what = f"accumulate of {source} into {dtype}, scale {scale:g}"
                    _require_close(outs, f"{what}, {numel} elements")
                    require(torch.equal(kept, contribution), f"{what} changed the contribution")


def _bounded(tensor: Tensor) -> Tensor:
    """Integers small enough for any dtype here."""
    return tensor if tensor.is_floating_point() else tensor % 1000


def _on_compute(bench: Bench, work: Callable[[], None]) -> None:
    with torch.no_grad():
        bench.compute.submit(work, label="unit pack")
        bench.compute.mark()


def _require_close(outs: list[Tensor], where: str) -> None:
    got, expected = outs[0].detach().cpu(), outs[1].detach().cpu()
    if got.is_floating_point():
        # A last bit of fp32 more or less can turn a rounding to a narrower dtype.
        eps = max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps)
        if got.dtype == torch.float64:
            eps = torch.finfo(torch.float32).eps
        close = torch.isclose(got.double(), expected.double(), rtol=eps, atol=1e-30)
    else:
        close = got == expected
    if not bool(close.all()):
        first = int((~close).nonzero()[0])
        raise Violation(
            f"{where}: element {first} is {got[first].item()}, expected {expected[first].item()}"
        )
