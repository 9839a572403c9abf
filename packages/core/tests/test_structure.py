"""What a unit notices of modules that come and go."""

from __future__ import annotations

import gc

import pytest
from torch import nn

from polyshard import UnsupportedError
from polyshard.structure import Structure, own_modules


def structure_of(module: nn.Module) -> Structure:
    return Structure(own_modules(module))


def test_unchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_module("none", None)
    assert structure_of(model).is_unchanged


def test_a_layer_made_anew_where_one_was() -> None:
    """Also where it lies at the address of the one that is gone."""
    model = nn.Sequential(nn.Linear(2, 2))
    known = structure_of(model)
    address = id(model[0])
    del model[0]
    gc.collect()
    kept = []  # what came to lie elsewhere
    for _ in range(100_000):
        layer = nn.Linear.__new__(nn.Linear)
        if id(layer) == address:
            break
        kept.append(layer)
    assert id(layer) == address, "no layer came to lie there, so nothing was tried"
    layer.__init__(2, 2)
    model.append(layer)
    assert not known.is_unchanged
    with pytest.raises(UnsupportedError, match="came into unit"):
        known.accept(model, unit="model")


def test_a_layer_that_became_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    known = structure_of(model)
    model._modules["1"] = None
    assert not known.is_unchanged
