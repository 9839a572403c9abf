"""Misuse gives one message on every rank, which says what to do, and training goes on after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from behaving import Side, over_strategies
from misuses import INPUT, MISUSES, Misuse, sharded

from polyshard.testing import run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"


def told(rank: int, misuse: Misuse, strategy: str) -> tuple[str, list[str], bool]:
    """The error's kind and the classes it derives from; what it says; whether a model trains."""
    side = Side(2, rank, strategy)
    model = sharded(side)
    kind, kinds, said = "nothing", [], ""
    try:
        misuse(side)
    except Exception as error:
        kind, said = type(error).__name__, str(error)
        kinds = [base.__name__ for base in type(error).__mro__]
    model(INPUT).sum().backward()
    return (
        f"{kind}: {said}",
        kinds,
        bool(torch.isfinite(model.last.weight.grad.full_tensor()).all()),
    )


@pytest.mark.behaviour(9, 12, 20, 21, 24, 35)
@over_strategies
@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_each_is_told(misuse: Misuse, strategy: str) -> None:
    """Every rank gets the error, with the unit, the parameter and the remedy, and finds it on the
    page of errors; other models go on."""
    quoted = re.findall(r"\*\*`(.+?)`\*\*", PAGE.read_text())
    kind, fragments = MISUSES[misuse]
    for said, kinds, goes_on in run_ranks(2, told, misuse, strategy):
        assert kind.__name__ in kinds, said
        for fragment in fragments:
            assert fragment in said
        assert any(quote in said for quote in quoted), said
        assert goes_on
