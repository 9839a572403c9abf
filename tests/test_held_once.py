"""What is gathered is held once, and gradients are not held twice, seen on the storages that exist.

Watches autograd's own gradients through weak references to their storages.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from training import make_mesh, make_model, shard
from watched_gloo import WatchedGloo

from polyshard import Placements, fully_shard
from polyshard.context import unit_of
from polyshard.testing import run_ranks

WIDTH, LAYERS, BLOCKS = 8, 12, 4
BLOCK_NUMEL = LAYERS * (WIDTH + 1) * WIDTH
BYTES = 4

# -- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Where the parameters of one group lie while the unit computes."""

    storages: set[int]
    storage_bytes: int
    padded_bytes: int
    offsets: list[int]
    expected_offsets: list[int]
    same_objects: bool


def places_in_forward(rank: int, strategy: str) -> tuple[list[Places], list[int]]:
    """The places of every group, and the bytes of every group's full buffer at rest."""
    model = make_model()
    given = {name: parameter for name, parameter in model.named_parameters()}
    shard(model, make_mesh(), getattr(Placements, strategy)("dp"))
    found: list[Places] = []

    def look(module: nn.Module, args: object) -> None:
        unit = unit_of(module)
        assert unit is not None
        prefix = next(name for name, child in model.named_modules() if child is module)
        for group in unit.groups:
            names = [f"{prefix}.{p.name}".removeprefix(".") for p in group.parameters]
            shown = [model.get_parameter(name) for name in names]
            storages = [parameter.untyped_storage() for parameter in shown]
            found.append(
                Places(
                    {storage.data_ptr() for storage in storages},
                    storages[0].nbytes(),
                    group.layout.padded_numel * BYTES,
                    [parameter.storage_offset() for parameter in shown],
                    [group.layout.offset(index) for index in range(len(shown))],
                    all(given[name] is now for name, now in zip(names, shown, strict=True)),
                )
            )

    units = [child for child in model.modules() if unit_of(child) is not None]
    for child in units:
        child.register_forward_pre_hook(look)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    at_rest = [
        group.full.flat.untyped_storage().nbytes()
        for child in units
        if (unit := unit_of(child)) is not None
        for group in unit.groups
        if group.full is not group.main
    ]
    return found, at_rest


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_parameters_in_forward_are_views_of_one_buffer(strategy: str) -> None:
    """In forward a group's parameters are the user's own objects, views of one buffer of exactly
    the padded size; gathered buffers hold nothing afterwards."""
    for found, at_rest in run_ranks(2, places_in_forward, strategy):
        assert len(found) == 1 + 3 * 2  # the root, and in each block the frozen ones apart
        for places in found:
            assert len(places.storages) == 1
            assert places.storage_bytes == places.padded_bytes
            assert places.offsets == places.expected_offsets
            assert places.same_objects
        assert at_rest == ([0] * 7 if strategy == "zero3" else [])


# -- gradients ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Many parameters, each a small part of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


@dataclass(frozen=True)
class Sample:
    """Bytes at the moment at which autograd has finished one gradient."""

    unpacked_here: int  # full gradients of the same block that are alive, this one included
    unpacked: int  # of all blocks
    inputs: int  # what is packed to be reduced


def sample_gradients(rank: int, strategy: str) -> list[Sample]:
    backend = WatchedGloo()
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    alive: list[tuple[int, int, StorageWeakRef]] = []
    samples: list[Sample] = []

    def arrives(block: int, grad: Tensor) -> None:
        storage = grad.untyped_storage()
        alive[:] = [entry for entry in alive if not entry[2].expired()]
        alive.append((block, storage.nbytes(), StorageWeakRef(storage)))
        samples.append(
            Sample(
                sum(nbytes for owner, nbytes, _ in alive if owner == block),
                sum(nbytes for _, nbytes, _ in alive),
                backend.ledger.now["reduce input"],
            )
        )

    for index, block in enumerate(model):
        for parameter in block.parameters():
            parameter.register_hook(lambda grad, index=index: arrives(index, grad))
    mesh = make_mesh()
    for child in (*model, model):
        fully_shard(child, mesh, getattr(Placements, strategy)("dp"), backend=backend)
    for _ in range(2):
        samples.clear()
        model(torch.randn(2, WIDTH)).sum().backward()
        model.zero_grad()
    return samples


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_gradients_are_never_held_twice(strategy: str) -> None:
    """While backward runs, autograd holds less than a quarter of one unit's gradients and the one
    that arrives; packed are, for zero3, one unit and one that is being reduced."""
    largest = WIDTH * WIDTH * BYTES
    block = BLOCK_NUMEL * BYTES
    for samples in run_ranks(2, sample_gradients, strategy):
        assert len(samples) == BLOCKS * LAYERS * 2
        unpacked = [sample.unpacked_here for sample in samples]
        assert max(unpacked) < block // 4 + largest
        assert max(unpacked) > largest, "gradients wait for each other, or nothing was seen"
        assert [sample.unpacked for sample in samples] == unpacked
        inputs = [sample.inputs for sample in samples]
        if strategy == "zero3":
            assert max(inputs) == 2 * block
        else:
            # ddp packs gradients where they stay.
            assert inputs == sorted(inputs)
            assert max(inputs) == BLOCKS * block
