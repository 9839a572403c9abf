"""Faults to plant in the core, for seeing that they are found. Knows no cases."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from polyshard.gradients import GroupGradients
from polyshard.group import ParameterGroup


def _scaled_gradients() -> tuple[type, str, Callable[..., Any]]:
    """Gradients of the last of several parameters count double."""
    right = GroupGradients.add

    def add(self: GroupGradients, index: int, grad: Any, *, final: bool) -> None:
        is_last = 0 < index == len(self.parameters) - 1
        right(self, index, grad * 2 if is_last else grad, final=final)

    return GroupGradients, "add", add


def _stale_weights() -> tuple[type, str, Callable[..., Any]]:
    """Weights that were written since they were gathered seem to be as they were."""

    def epochs(self: ParameterGroup) -> list[int]:
        return [0] * len(self.parameters)

    return ParameterGroup, "epochs", epochs


FAULTS = {"scaled gradients": _scaled_gradients, "stale weights": _stale_weights}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Inside, the core has this fault; "" is none."""
    if not fault:
        yield
        return
    owner, name, wrong = FAULTS[fault]()
    right = getattr(owner, name)
    setattr(owner, name, wrong)
    try:
        yield
    finally:
        setattr(owner, name, right)


if __name__ == "__main__":  # run a script with a fault: random_faults.py FAULT SCRIPT
    with planted(sys.argv[1]):
        runpy.run_path(sys.argv[2], run_name="__main__")
