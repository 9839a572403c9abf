"""The names and signatures users rely on, and the floors that the core's files stand on."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from one_rank import OneRank, batch, make_stack, units_in
from torch import nn

import polyshard
from polyshard import (
    FsdpContext,
    FsdpModule,
    MixedPrecisionPolicy,
    Partial,
    Placements,
    SchedulePolicy,
)
from polyshard.api import _attach_mixin, _collect_fsdp_contexts

SOURCE = Path(polyshard.__file__).parent
MAX_LINES = 420  # "about 400"

#: Every file of the core, lowest first: a file imports only from those before it.
FLOORS = """
    errors
    precision casting schedule autograd preflight calls
    layout_fill layout_search layout
    placements
    spi.ops spi.lanes spi.communicator spi.buffers spi.backend spi
    backend_messages backends submesh debug transport buffer
    row_split sharded_refusals sharded_collectives sharded_checkpoint sharded_memory_ops
    sharded_elementwise sharded_random sharded_reductions sharded_fallback sharded_ops
    sharded_tensor
    parameter released derivative_guard step_guard structure
    accumulated gradient_buffers gradients main_weights group
    unit
    order backward agreement context
    hooks conversions copying module
    examination
    api methods weights full_load clipping optimizer
    explained explain_words explain_table explain_colours explain_svg explain_picture
    explain_orders explain
    cli __main__
""".split()

#: Names of the public interface; each appears with the work that builds it.
NAMES = """
    fully_shard microbatch Placements MixedPrecisionPolicy SchedulePolicy Flat Replicate Partial
    FsdpModule FsdpContext DBuffer fully_shard_optimizer clip_grad_norm_ unsharded
    register_forward_method explain save_checkpoint load_checkpoint export_safetensors
    load_safetensors full_state_dict load_full_state_dict available_backends BackendError
    PlacementError UnsupportedError
""".split()
BUILT = """
    BackendError DBuffer Flat FsdpContext FsdpModule MixedPrecisionPolicy Partial PlacementError
    Placements Replicate SchedulePolicy UnsupportedError available_backends clip_grad_norm_ explain
    full_state_dict fully_shard fully_shard_optimizer load_full_state_dict microbatch
    register_forward_method unsharded
""".split()


def signature(function: object) -> list[str]:
    """Parameters as they are written, without their annotations."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [
        parameter.name
        if parameter.default is parameter.empty
        else f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
    ]


class TestNames:
    def test_what_is_exported(self) -> None:
        """What this version builds is exported, under the names that were promised."""
        assert set(BUILT) <= set(polyshard.__all__) <= set(NAMES)
        assert sorted(polyshard.__all__) == polyshard.__all__
        for name in polyshard.__all__:
            assert hasattr(polyshard, name)

    def test_fully_shard(self) -> None:
        """Five arguments by position, the others by name, and nothing is returned."""
        assert signature(polyshard.fully_shard)[:5] == [
            "module",
            "mesh",
            "placements",
            "mixed_precision_policy=None",
            "use_symm_mem=False",
        ]
        assert set(signature(polyshard.fully_shard)[5:]) >= {
            "backend=None",
            "reshard_after_forward=True",
            "schedule_policy=None",
            "grad_divisor=1.0",
            "ignored_params=()",
        }
        kinds = [p.kind for p in inspect.signature(polyshard.fully_shard).parameters.values()]
        assert set(kinds[:5]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        assert set(kinds[5:]) == {inspect.Parameter.KEYWORD_ONLY}

    def test_the_others(self) -> None:
        """Scopes and state dicts have the arguments that were promised."""
        assert signature(polyshard.microbatch) == ["module", "is_last"]
        assert signature(_attach_mixin) == ["module"]
        assert signature(_collect_fsdp_contexts) == ["module", "contexts"]
        assert signature(polyshard.unsharded) == ["module", "recurse=True", "writeback=True"]
        assert signature(polyshard.full_state_dict) == [
            "module",
            "cpu_offload=True",
            "rank0_only=False",
        ]
        assert signature(polyshard.load_full_state_dict) == [
            "module",
            "state_dict",
            "strict=True",
            "rank0_only=False",
        ]
        assert signature(polyshard.clip_grad_norm_) == signature(torch.nn.utils.clip_grad_norm_)
        assert signature(polyshard.fully_shard_optimizer) == [
            "optimizer",
            "precision_aware=False",
            "flat=None",
        ]

    def test_values(self) -> None:
        """Policies and placements are made as promised."""
        assert signature(Partial) == ["reduce_op='avg'"]
        assert signature(SchedulePolicy) == [
            "forward_units=1",
            "backward_units=1",
            "forward_elements=None",
            "backward_elements=None",
        ]
        assert signature(MixedPrecisionPolicy) == [
            f"main_params_dtype={torch.float32}",
            "main_grads_dtype=None",
            "grad_comm_dtype=None",
            "compute_dtype=None",
            "output_dtype=None",
            "cast_forward_inputs=True",
        ]
        assert signature(Placements)[:4] == ["dp_axes", "parameter", "gradient", "optimizer"]
        for preset in (Placements.ddp, Placements.zero1, Placements.zero2, Placements.zero3):
            assert signature(preset) == ["axis"]
        for preset in (Placements.hsdp, Placements.hfsdp):
            assert signature(preset) == ["outer", "inner"]

    def test_every_error(self) -> None:
        """Every error class of the core is a RuntimeError or a ValueError."""
        found = set()
        for name in FLOORS:
            for value in vars(importlib.import_module(f"polyshard.{name}")).values():
                if isinstance(value, type) and issubclass(value, BaseException):
                    found.add(value)
        assert {polyshard.BackendError, polyshard.PlacementError} <= found
        assert polyshard.UnsupportedError in found
        for error in found:
            assert issubclass(error, RuntimeError | ValueError), error


class TestHelpers:
    def test_attach_mixin(self) -> None:
        """The mixin is attached in place, without making the module a unit."""
        module = nn.Linear(2, 2)
        assert _attach_mixin(module) is None
        assert isinstance(module, FsdpModule)
        assert isinstance(module, nn.Linear)
        assert module(torch.ones(2)).shape == (2,)

    def test_collect_contexts(self, world: OneRank) -> None:
        """Each context is appended once, in the order of the modules, after what is there."""
        model = make_stack()
        world.shard(*units_in(model))
        marker = FsdpContext.__new__(FsdpContext)
        contexts = [marker]
        assert _collect_fsdp_contexts(model, contexts) is None
        units = [model, *model.blocks]
        assert contexts[0] is marker
        assert contexts[1:] == [unit.fsdp_context for unit in units]
        model(batch())
        contexts = []
        _collect_fsdp_contexts(model, contexts)
        assert contexts == [model.fsdp_context]


def files() -> list[tuple[str, Path]]:
    """(dotted name, path) of every file of the core but the side rooms."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name and parts[0] != "testing":
            found.append((name, path))
    return found


def imports(path: Path) -> Iterator[str]:
    """Names of our own modules that a file imports when it runs, wherever in it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            node.body = []
    package = ["polyshard", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


class TestFloors:
    def test_every_file_has_its_place(self) -> None:
        """The list of floors names every file, once."""
        assert sorted(FLOORS) == sorted(name for name, _ in files())

    @pytest.mark.parametrize(("name", "path"), files(), ids=[name for name, _ in files()])
    def test_imports_go_down(self, name: str, path: Path) -> None:
        """A file imports only from files below it, and from no side room."""
        above = {f"polyshard.{other}" for other in FLOORS[FLOORS.index(name) :]}
        imported = set(imports(path))
        assert imported.isdisjoint(above)
        assert not any(other.startswith("polyshard.testing") for other in imported)
        assert "polyshard" not in imported

    def test_the_check_sees_imports(self) -> None:
        """The test above is not blind: it finds imports that are there."""
        assert "polyshard.unit" in set(imports(SOURCE / "context.py"))
        assert "polyshard.errors" in set(imports(SOURCE / "spi" / "lanes.py"))

    @pytest.mark.parametrize(
        "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
    )
    def test_files(self, path: Path) -> None:
        """A file is short, says what it owns, and names no backend package and no device."""
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_LINES
        assert ast.get_docstring(ast.parse(text))
        assert not re.search(r"polyshard[_-](gloo|nccl|symm)", text)
        assert not re.search(r"""[=!]= *["']cuda|\.is_cuda\b""", text)
