"""explain: what it says of units on one rank, what it refuses, and how it shows and writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_rank import (
    OneRank,
    batch,
    groups,
    make_stack,
    unit,
    units_in,
)
from torch import Tensor, nn

import polyshard
from polyshard import (
    MixedPrecisionPolicy,
    SchedulePolicy,
    UnsupportedError,
    explain,
    unsharded,
)
from polyshard.explained import ExplainedGroup

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(
        compute_dtype=torch.bfloat16,
        main_grads_dtype=torch.float64,
        grad_comm_dtype=torch.bfloat16,
    ),
}


class Tied(nn.Module):
    """One weight under three names: a tied parameter, and a module that is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 6)
        self.head = nn.Linear(6, 3)
        self.head.weight = self.embedding.weight
        self.again = self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def only_group(model: nn.Module, index: int = 0) -> ExplainedGroup:
    (group,) = explain(model).units[index].groups
    return group


class TestUnits:
    def test_what_fully_shard_was_told(self, zero3: OneRank) -> None:
        """Names, classes, strategy, mesh, backend, resharding and schedule of every unit."""
        model = make_stack()
        ahead = SchedulePolicy(forward_units=3, backward_elements=100)
        zero3.shard(*model.blocks, schedule_policy=ahead, reshard_after_forward=False)
        zero3.shard(model)
        found = explain(model)
        names = ["", "blocks.0", "blocks.1", "blocks.2"]
        assert [each.name for each in found.units] == names
        assert [each.index for each in found.units] == [0, 1, 2, 3]
        assert [each.module_class for each in found.units] == ["Stack", *["Block"] * 3]
        assert {each.backend for each in found.units} == {"loopback"}
        assert {each.axes for each in found.units} == {(("dp", 1),)}
        assert [each.reshard_after_forward for each in found.units] == [True, *[False] * 3]
        assert [each.schedule for each in found.units] == [SchedulePolicy(), *[ahead] * 3]
        assert {group.strategy for each in found.units for group in each.groups} == {
            "zero3 over dp"
        }

    def test_a_unit_without_parameters(self, zero3: OneRank) -> None:
        """It is listed, has no groups, and takes no bytes."""
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        zero3.shard(model[1], model)
        empty = explain(model).units[1]
        assert (empty.name, empty.groups, empty.bytes.between_steps) == ("1", (), 0)
        assert "no parameters" in str(explain(model))

    def test_a_part_of_a_model(self, zero3: OneRank) -> None:
        """Names are those inside the module that is explained, before and after a forward."""
        model = make_stack()
        zero3.shard(*units_in(model))
        for _ in range(2):
            found = explain(model.blocks)
            assert [each.name for each in found.units] == ["0", "1", "2"]
            assert found.units[1].groups[0].tensors[0].names == ("1.narrow.weight",)
            model(batch())

    def test_parameters_of_no_unit(self, zero3: OneRank) -> None:
        """Ignored and plain parameters are told from those of a unit further out."""
        model = nn.Module()
        model.plain = nn.Linear(2, 2, bias=False)
        model.sharded = make_stack()
        kept = model.sharded.first.weight
        zero3.shard(*model.sharded.blocks)
        zero3.shard(model.sharded, ignored_params=[kept])
        found = explain(model)
        assert found.unmanaged == ("plain.weight", "sharded.first.weight")
        assert found.owned_elsewhere == ()
        assert "Not managed: plain.weight, sharded.first.weight" in str(found)
        inside = nn.ModuleList([model.sharded.blocks[0], model.sharded.last])
        assert explain(inside).owned_elsewhere == ("1.weight",)
        with unsharded(model.sharded):
            assert explain(inside).owned_elsewhere == ("1.weight",)
            assert explain(inside).unmanaged == ()

    def test_tied_parameters(self, zero3: OneRank) -> None:
        """A tensor has every name of it, whether a parameter is tied or a whole module."""
        model = Tied()
        zero3.shard(model)
        names = {
            tensor.names for group in explain(model).units[0].groups for tensor in group.tensors
        }
        assert names == {
            ("embedding.weight", "head.weight", "again.weight"),
            ("head.bias", "again.bias"),
        }
        assert "embedding.weight = head.weight, again.weight  3x6" in str(explain(model))


class TestGroups:
    def test_dtypes(self, zero3: OneRank) -> None:
        """Of the weight that computes, the main weight, the main gradient, and what travels."""
        model = nn.Linear(4, 3)
        zero3.shard(model, mixed_precision_policy=POLICIES["bf16"])
        dtypes = only_group(model).dtypes
        assert dtypes.compute == dtypes.grad_comm == torch.bfloat16
        assert (dtypes.main, dtypes.main_grad) == (torch.float32, torch.float64)

    def test_frozen_and_trained(self, zero3: OneRank) -> None:
        """Counts, and whether there are gradients, follow requires_grad as it is now."""
        model = nn.Linear(4, 3)
        zero3.shard(model)
        group = only_group(model)
        assert (group.trainable, group.frozen, group.bytes.gradients) == (2, 0, 60)
        model.weight.requires_grad_(False)
        group = only_group(model)
        assert (group.trainable, group.frozen, group.bytes.gradients) == (1, 1, 60)
        model.bias.requires_grad_(False)
        group = only_group(model)
        assert (group.trainable, group.frozen, group.bytes.gradients) == (0, 2, 0)

    def test_lengths(self, zero3: OneRank) -> None:
        """Segments, tensors and padding add up to the flat buffer that is there."""
        model = make_stack()
        zero3.shard(*units_in(model))
        explained = [group for each in explain(model).units for group in each.groups]
        for ours, theirs in zip(explained, groups(model), strict=True):
            assert ours.padded_numel == theirs.full.flat.numel()
            assert ours.numel == sum(parameter.shape.numel() for parameter in theirs.parameters)
            assert ours.padding == ours.padded_numel - ours.numel
            shapes = {tensor.label: tensor.shape for tensor in ours.tensors}
            assert shapes == {each.name: tuple(each.shape) for each in theirs.parameters}
            for tensor in ours.tensors:
                assert dict(tensor.rows) == {0: (0, tensor.shape[0])}

    def test_offsets(self, zero3: OneRank) -> None:
        """Where a tensor is said to lie, its values are."""
        model = make_stack()
        zero3.shard(*units_in(model))
        with unsharded(model):
            parameters = dict(model.named_parameters())
            for ours, theirs in zip(explain(model).units, units_in(model)[-1:], strict=False):
                flat = unit(theirs).groups[0].full.flat
                for tensor in ours.groups[0].tensors:
                    lies = flat[tensor.offset : tensor.offset + tensor.numel]
                    assert torch.equal(lies, parameters[tensor.names[0]].flatten())


class TestRefusals:
    def test_no_units(self, tmp_path: Path) -> None:
        """Without a unit there is nothing to explain, and no picture is left."""
        with pytest.raises(UnsupportedError, match=r"Linear has no units; call fully_shard"):
            explain(nn.Linear(2, 2), picture=tmp_path / "layout.svg")
        assert list(tmp_path.iterdir()) == []

    def test_no_module(self) -> None:
        """Something else than a module is named."""
        with pytest.raises(UnsupportedError, match="explain takes a module, got list"):
            explain([nn.Linear(2, 2)])  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["layout.png", "layout", "layout.svg.gz"])
    def test_another_kind_of_picture(self, tmp_path: Path, name: str) -> None:
        """A path that does not end in .svg is refused before anything else."""
        with pytest.raises(ValueError, match=rf"{name}'.*ends in \.svg"):
            explain(nn.Linear(2, 2), picture=tmp_path / name)
        assert list(tmp_path.iterdir()) == []

    def test_no_place_for_it(self, tmp_path: Path) -> None:
        """A missing folder, and a folder of that name, are told before anything else."""
        with pytest.raises(ValueError, match=r"there is no folder .*missing"):
            explain(nn.Linear(2, 2), picture=tmp_path / "missing" / "layout.svg")
        (tmp_path / "folder.svg").mkdir()
        with pytest.raises(ValueError, match="is a folder; give the path of a file"):
            explain(nn.Linear(2, 2), picture=str(tmp_path / "folder.svg"))


class TestFile:
    def test_written(self, zero3: OneRank, tmp_path: Path) -> None:
        """The file is the picture, replaces an older one, and nothing else is left there."""
        model = nn.Linear(4, 3)
        zero3.shard(model)
        path = tmp_path / "layout.SVG"
        path.write_text("an older one")
        found = explain(model, picture=str(path))
        assert path.read_text(encoding="utf-8") == found.svg()
        assert list(tmp_path.iterdir()) == [path]

    def test_whole_or_not_at_all(
        self, zero3: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A write that fails leaves the older file, and no draft."""
        model = nn.Linear(4, 3)
        zero3.shard(model)
        path = tmp_path / "layout.svg"
        path.write_text("an older one")

        def full(self: Path, text: str, **_options: object) -> int:
            with self.open("w") as file:
                file.write(text[:10])
            raise OSError("no space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space left"):
            explain(model, picture=path)
        assert path.read_text() == "an older one"
        assert list(tmp_path.iterdir()) == [path]


TABLE = """\
Stack: 4 units, 4 groups, 15 parameters of 573 elements, 0.0 % padding

Units
  unit           x  class  strategy       mesh  backend   reshard  gathers ahead
  ------------------------------------------------------------------------------
  (root)         1  Stack  zero3 over dp  dp=1  loopback  yes      1 forward, 1 backward
  blocks.{0..2}  3  Block  zero3 over dp  dp=1  loopback  yes      1 forward, 1 backward

Groups
  unit           group  trained  frozen  elements    padding  segments  shards  ranks by shard
  --------------------------------------------------------------------------------------------
  (root)             0        3       0        48  0 (0.0 %)         1   1/1/1  0
  blocks.{0..2}      0        4       0       175  0 (0.0 %)         1   1/1/1  0
"""


class TestShown:
    def test_table(self, zero3: OneRank) -> None:
        """The table is this, and says in the end what it is about."""
        model = make_stack()
        zero3.shard(*units_in(model))
        text = str(explain(model))
        assert text.startswith(TABLE)
        lines = text.splitlines()
        assert (
            "  blocks.{0..2}  3      0          700 B      700 B           0 B     0 B     700 B"
        ) in lines
        assert (
            "  all together   4              2.24 KiB   2.24 KiB           0 B     0 B  2.24 KiB"
        ) in lines
        assert max(map(len, lines)) <= 100

    def test_units_that_differ_have_lines_of_their_own(self, zero3: OneRank) -> None:
        """Only what is alike shares a line."""
        model = make_stack()
        model.blocks[1].widen.bias.requires_grad_(False)
        zero3.shard(*units_in(model))
        text = str(explain(model))
        assert "  blocks.0 ... blocks.2  2  Block" in text
        assert "  blocks.1               1  Block" in text
        assert "widen.bias (frozen)" in text

    def test_in_short(self, zero3: OneRank) -> None:
        """The repr is one line; notebooks get the table and the picture."""
        model = make_stack()
        zero3.shard(*units_in(model))
        found = explain(model)
        assert repr(found) == "<Explanation of Stack: 4 units, 4 groups>"
        html = found._repr_html_()
        assert found.svg() in html
        assert "(root) &gt; blocks.{0..2}" in html

    def test_is_the_function_of_the_package(self) -> None:
        """polyshard.explain is the function, and its module is importable beside it."""
        from polyshard.explain import Explanation

        assert callable(polyshard.explain)
        assert polyshard.explain.__annotations__["return"] == Explanation.__name__
