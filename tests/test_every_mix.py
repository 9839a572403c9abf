"""Every legal triple of placements on two axes trains; there are too many to name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from training import Training, make_mesh, make_model, shard, train_plain, train_sharded

from polyshard import (
    Flat,
    Partial,
    PlacementError,
    Placements,
    Replicate,
    full_state_dict,
)
from polyshard.testing import run_ranks

AXES, KINDS = ("outer", "inner"), {"R": Replicate(), "F": Flat(), "P": Partial()}
HOW = [
    Training(steps=3, microbatches=2, scoped=scoped, set_to_none=not scoped, blocks=1)
    for scoped in (True, False)
]


def legal_mixes() -> Iterator[str]:
    """Letters by axis for parameter, gradient and optimizer, wherever Placements accepts them."""
    for letters in product("RF", "RF", "RFP", "RFP", "RF", "RF"):
        mix = "".join(letters)
        try:
            placements_of(mix)
        except PlacementError:
            continue
        yield mix


def placements_of(mix: str) -> Placements:
    kinds = [[KINDS[letter] for letter in mix[at : at + 2]] for at in (0, 2, 4)]
    return Placements(AXES, *kinds)


def train_all(rank: int, mixes: list[str]) -> list[list[tuple[list[float], dict]]]:
    mesh = make_mesh((2, 2), AXES)
    results = []
    for mix in mixes:
        results.append([])
        for how in HOW:
            model = make_model(blocks=how.blocks)
            shard(model, mesh, placements_of(mix))
            losses = train_sharded(model, how, rank, mesh.size())
            results[-1].append((losses, full_state_dict(model)))
    return results


def test_there_are_many() -> None:
    """The chain rule leaves more mixes than presets, and refuses more than it leaves."""
    mixes = list(legal_mixes())
    assert {"RFPFRF", "RFPFFF", "FFFFFF", "RRPPRR"} <= set(mixes)
    assert 16 < len(mixes) < 2**4 * 3**2 // 2


@pytest.mark.parametrize("part", range(4))
def test_every_legal_mix_trains(part: int) -> None:
    """Three AdamW steps of two microbatches, with and without the scope, on a 2x2 mesh."""
    mixes = list(legal_mixes())[part::4]
    plain = [train_plain(how, 4) for how in HOW]
    for results in run_ranks(4, train_all, mixes):
        for mix, ways in zip(mixes, results, strict=True):
            for (losses, weights), (expected_losses, expected) in zip(ways, plain, strict=True):
                assert losses == pytest.approx(expected_losses, abs=1e-5), mix
                for name, value in expected.items():
                    torch.testing.assert_close(
                        weights[name], value, atol=1e-4, rtol=0, msg=f"{mix}: {name}"
                    )
