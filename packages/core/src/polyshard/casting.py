"""Floating tensors of a value in another dtype, wherever in containers they are. Knows no units."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from typing import Any

import torch
from torch import Tensor


def cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating tensors in ``dtype``.

    Looks into mappings, tuples, lists, deques and dataclasses. A container in which nothing changes
    is returned as it is, others as copies of their own type; everything else is passed through.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, dict | UserDict):
        changed = _changed(value.items(), dtype)
        if not changed:
            return value
        copied = copy.copy(value)
        for key, item in changed:
            copied[key] = item
        return copied
    if isinstance(value, tuple | list | deque):
        changed = _changed(enumerate(value), dtype)
        if not changed:
            return value
        items = list(value)
        for index, item in changed:
            items[index] = item
        return _of_items(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = _changed([(name, getattr(value, name, None)) for name in names], dtype)
        if not changed:
            return value
        other = copy.copy(value)
        for name, item in changed:
            object.__setattr__(other, name, item)  # also where it is frozen
        return other
    return value


def _changed(items: Any, dtype: torch.dtype) -> list[tuple[Any, Any]]:
    """Those whose value becomes another one, with that."""
    return [(key, new) for key, item in items if (new := cast(item, dtype)) is not item]


def _of_items(value: Any, items: list[Any]) -> Any:
    """A sequence like ``value`` that holds ``items``."""
    if hasattr(value, "n_sequence_fields"):
        return type(value)(items)  # what operations like torch.max return
    if isinstance(value, tuple):
        made = tuple.__new__(type(value), items)  # whatever its constructor takes
        getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return made
    copied = copy.copy(value)
    copied.clear()
    copied.extend(items)
    return copied
