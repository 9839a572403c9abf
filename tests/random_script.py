"""Writes a case down as a script: its modules, its sharding, its operations, all in plain torch.

What it writes is also what the tester runs. Knows no processes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from textwrap import indent

import random_twins
from random_case import LAYERS, ROOT, Block, Call, Case, Use
from random_draw_operations import ALWAYS_FINAL
from random_script_operations import UNPACKED, operate

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.02)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)",
    "adamw fused": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)",
    "adamw foreach": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, foreach=True)",
    "adam loop": "torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4, foreach=False)",
}
PACKED = {
    "tensor": "x",
    "view": "x[:]",
    "tuple": "(x, x.sum())",
    "dict": '{"x": x, "sum": x.sum()}',
    "dataclass": "Output(x, x.sum())",
    "nested": "([x], x.sum())",
}
GUARDS = {"rank": "rank % 2 == 0", "data": "x.detach()[0, 0] > 0"}
#: What a script carries of random_twins only where it says these words.
OPTIONAL_METHODS = ("raising", "unsharded", "save_full", "load_full")

IMPORTS = """\
import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
""".splitlines()
TORCH_IMPORTS = """\
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
""".splitlines()
POLYSHARD_NAMES = (
    "BackendError MixedPrecisionPolicy Placements SchedulePolicy clip_grad_norm_ full_state_dict "
    "fully_shard load_full_state_dict microbatch unsharded"
).split()

OUTPUT = """
@dataclass
class Output:
    x: Tensor
    total: Tensor
"""

END = """
def main(rank: int) -> None:
    torch.set_default_dtype({dtype})
    plain = build()
    model = copy.deepcopy(plain)
    shard(model)
    options = {tolerance}, {has_pending}
    expected = {run}(plain, make_optimizer(plain), batch, range(RANKS), {share}, *options)
    operate(expected)
    run = {run}(model, make_optimizer(model), batch, [rank], 1.0, *options, expected.seen)
    operate(run)
    run.finish(plain, expected.optimizer)
    return [seen["error"] for seen in run.seen]


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        main(dist.get_rank())
        dist.destroy_process_group()
    else:
        script = importlib.import_module(Path(__file__).stem)
        try:
            run_ranks(RANKS, script.main)
        except RankFailure as failure:
            sys.exit(str(failure))
""".replace("-> None:\n    torch", "-> list[str]:\n    torch")


def rendered(case: Case, title: str = "") -> str:
    """The whole script."""
    body = "".join(_body(case))
    run = "BufferedRun" if "batch norm" in case.kinds else "Run"
    tolerance, dtype = _tolerance(case)
    share = f"1 / {case.divisor * case.ranks:g}"
    end = END.format(
        dtype=f"torch.{dtype}",
        tolerance=tolerance,
        has_pending=case.strategy not in ALWAYS_FINAL,
        run=run,
        share=share,
    )
    twins = "\n\n".join(_twins(body, run))
    code = f"{twins}\n{body}\n{end}"
    title = title or f"Seed {case.seed}: {case.strategy} on {case.ranks} ranks"
    head = f'"""{title}; a sharded model against a plain one."""\n\n'
    text = f"{head}from __future__ import annotations\n\n{_imports(code)}\n\n{code}"
    return re.sub(r"\n{4,}", "\n\n\n", text)


def _tolerance(case: Case) -> tuple[float, str]:
    """How far numbers may lie apart, of what the largest of their tensor is; the dtype."""
    if case.precision == "mixed":
        return 1e-3, "float32"
    if case.precision == "float32":
        autocast = any(operation.mode == "autocast" for operation in case.operations)
        return (0.1 if autocast else 1e-3), "float32"
    return (1e-4 if "other dtype" in case.kinds else 1e-8), "float64"


def _imports(code: str) -> str:
    def used(line: str) -> bool:
        return any(re.search(rf"\b{name}\b", code) for name in _names(line))

    blocks = [[line for line in lines if used(line)] for lines in (IMPORTS, TORCH_IMPORTS)]
    names = [name for name in POLYSHARD_NAMES if re.search(rf"(?<!\.)\b{name}\b", code)]
    ours = [f"from polyshard import {', '.join(names)}"]
    if len(ours[0]) > 100:
        ours = ["from polyshard import (", *(f"    {name}," for name in names), ")"]
    ours.append("from polyshard.testing import RankFailure, run_ranks")
    return "\n\n".join("\n".join(lines) for lines in (*blocks, ours))


def _names(line: str) -> list[str]:
    imported = line.rpartition("import ")[2]
    return [name.rpartition(" as ")[2].strip() for name in imported.split(",")]


def _twins(body: str, run: str) -> Iterator[str]:
    """The source of what compares, without what ``body`` has no use for."""
    for name in ("Mishap", "Difference", "OnSomeRanks"):
        yield inspect.getsource(getattr(random_twins, name)) + "\n"
    source = inspect.getsource(random_twins.Run)
    for name in OPTIONAL_METHODS:
        if f"run.{name}(" not in body:
            method = inspect.getsource(getattr(random_twins.Run, name))
            source = source.replace("\n" + method, "")
    yield source + "\n"
    if run == "BufferedRun":
        yield inspect.getsource(random_twins.BufferedRun) + "\n"


# -- the model --------------------------------------------------------------------------------


def _body(case: Case) -> Iterator[str]:
    yield f"RANKS = {case.ranks}\n\n"
    if any(block.returns == "dataclass" for block in case.blocks):
        yield OUTPUT + "\n"
    for block in case.blocks:
        yield f"\nclass {_class(block)}(nn.Module):\n{indent(_module(case, block), '    ')}\n"
    yield f"\ndef build() -> {_class(case.root)}:\n{indent(_build(case), '    ')}\n"
    yield f"\ndef shard(model: nn.Module) -> None:\n{indent(_shard(case), '    ')}\n"
    yield (
        "\ndef make_optimizer(model: nn.Module) -> torch.optim.Optimizer:\n"
        f"    return {OPTIMIZERS[case.optimizer]}\n\n"
    )
    yield f"\ndef batch(number: int, rank: int) -> Tensor:\n{indent(_batch(case), '    ')}\n"
    if any(operation.kind in ("forward", "mishap") for operation in case.operations):
        yield (
            "\ndef loss_of(model: nn.Module, x: Tensor, rank: int, route: int) -> Tensor:\n"
            f"{indent(_loss(case), '    ')}\n"
        )
    yield f"\ndef operate(run: Run) -> None:\n{indent(operate(case), '    ')}\n"


def _class(block: Block) -> str:
    return "Model" if block.name == ROOT else block.name.upper()


def _module(case: Case, block: Block) -> str:
    names = {
        "w": str(case.width),
        "odd": str(2 * case.width + 1),
        "other": "float32" if case.precision == "float64" else "float64",
    }
    lines = ["def __init__(self) -> None:", "    super().__init__()"]
    for layer in block.layers:
        lines.append(f"    self.{layer.name} = {LAYERS[layer.kind].made.format(**names)}")
        if layer.frozen:
            lines.append(f"    self.{layer.name}.requires_grad_(False)")
    if block.keeps:
        lines.append("    self.kept = None")
    first = {"tensor": "x: Tensor, ", "keyword": "*, x: Tensor, ", "nothing": ""}[block.takes]
    returned = "Any" if block.returns in ("dict", "tuple", "dataclass", "nested") else "Tensor"
    signature = f"(self, {first}rank: int, route: int) -> {returned}:"
    body = list(_forward(case, block))
    if block.checkpoint and block.takes != "nothing":
        reentrant = block.checkpoint == "reentrant"
        lines += [
            "",
            f"def forward{signature}",
            f"    x = checkpoint(self.run, x, rank, route, use_reentrant={reentrant})",
            f"    return {_packed(block)}",
            "",
            "def run(self, x: Tensor, rank: int, route: int) -> Tensor:",
            *(f"    {line}" for line in body),
            "    return x",
        ]
    else:
        lines += ["", f"def forward{signature}", *(f"    {line}" for line in body)]
        lines.append(f"    return {_packed(block)}")
    return "\n".join(lines) + "\n"


def _packed(block: Block) -> str:
    if block.returns == "parameter":
        return "self.n0[:1]"
    return PACKED[block.returns]


def _forward(case: Case, block: Block) -> Iterator[str]:
    if block.takes == "nothing" and block.returns != "parameter":
        yield "x = self.n0.sum(0, keepdim=True)"
    for step in block.steps:
        if block.takes == "nothing" and block.returns == "parameter":
            continue  # it computes nothing
        lines = list(_use(block, step) if isinstance(step, Use) else _call(case, step))
        if step.guard and lines:
            bit = 2 ** int(step.guard) if step.guard.isdigit() else 0
            yield f"if {GUARDS.get(step.guard) or f'route & {bit}'}:"
            lines = [f"    {line}" for line in lines]
        yield from lines
    if block.keeps:
        yield "self.kept = x"


def _use(block: Block, step: Use) -> Iterator[str]:
    kind = next(layer.kind for layer in block.layers if layer.name == step.layer)
    expression = LAYERS[kind].used.format(it=f"self.{step.layer}")
    if not expression:
        return
    if step.no_grad:
        yield from ("with torch.no_grad():", f"    aside = {expression}", "x = x + 0.5 * aside")
    else:
        yield f"x = {expression}"


def _call(case: Case, step: Call) -> Iterator[str]:
    block = case.block(step.block)
    target = f"self.{step.block}"
    unpacked = UNPACKED.get(block.returns, "")
    if block.takes == "nothing":
        made = f"{_called(block, target, step.checkpoint)}{unpacked}"
    elif step.checkpoint and block.takes == "keyword" and step.checkpoint == "reentrant":
        made = f"{target}(x=x, rank=rank, route=route){unpacked}"  # it takes no keywords
    else:
        made = f"{_called(block, target, step.checkpoint)}{unpacked}"
    names = ("aside", "x = x + 0.5 * aside") if step.no_grad else ("y", "")
    if step.no_grad:
        yield from ("with torch.no_grad():", f"    aside = {made}", names[1])
        return
    yield f"y = {made}"
    if step.inplace:
        yield "y.mul_(0.5)"
    yield "x = x + y" if block.takes == "nothing" else "x = y"


def _called(block: Block, target: str, around: str, x: str = "x") -> str:
    arguments = {
        "tensor": f"{x}, rank, route",
        "keyword": f"x={x}, rank=rank, route=route",
        "nothing": "rank, route",
    }[block.takes]
    if around:
        return f"checkpoint({target}, {arguments}, use_reentrant={around == 'reentrant'})"
    return f"{target}({arguments})"


def _build(case: Case) -> str:
    lines = ["torch.manual_seed(1)"]
    made = [block.name for block in case.blocks]
    lines += [f"{block.name} = {_class(block)}()" for block in case.blocks]
    for block in case.blocks:
        lines += [
            f"{block.name}.{name} = {name}"
            for name in dict.fromkeys(call.block for call in block.calls)
            if name in made
        ]
    lines += [f"model.{one}.weight = model.{other}.weight" for one, other in case.ties]
    return "\n".join([*lines, "return model"]) + "\n"


def _shard(case: Case) -> str:
    if len(case.mesh) > 1:
        axes, names = '"outer", "inner"', '("outer", "inner")'
    else:
        axes, names = '"dp"', '("dp",)'
    lines = [f'mesh = init_device_mesh("cpu", {case.mesh}, mesh_dim_names={names})']
    lines.append(f"placements = Placements.{case.strategy}({axes})")
    options = []
    if case.precision == "mixed":
        options.append("mixed_precision_policy=MixedPrecisionPolicy(torch.float64, torch.float64)")
    if not case.reshard:
        options.append("reshard_after_forward=False")
    if case.prefetch != (1, 1):
        options.append(f"schedule_policy=SchedulePolicy{case.prefetch}")
    if case.divisor != 1:
        options.append(f"grad_divisor={case.divisor}")
    if case.backend:
        options.append(f"backend={case.backend!r}")
    if options:
        lines.append(f"options = dict({', '.join(options)})")
    tail = ", **options" if options else ""
    for block in reversed(case.blocks):
        if block.unit:
            module = f"model.{case.path(block.name)}".rstrip(".")
            lines.append(f"fully_shard({module}, mesh, placements{tail})")
    return "\n".join(lines) + "\n"


def _batch(case: Case) -> str:
    lines = ["generator = torch.Generator().manual_seed(100 * number + rank)"]
    rows = case.rows[0] if len(set(case.rows)) == 1 else f"{case.rows}[rank % {len(case.rows)}]"
    lines.append(f"x = torch.randn({rows}, {case.width}, generator=generator)")
    lines.append(f"return x{'.requires_grad_()' if case.input_grad else ''}")
    return "\n".join(lines) + "\n"


def _loss(case: Case) -> str:
    unpacked = UNPACKED.get(case.root.returns, "")
    called = _called(case.root, "model", "")
    output = f"{called}{unpacked}.float().sin().mean()"
    if case.precision == "float64":
        output = output.replace(".float()", "")
    if case.loss == "output":
        return f"return {output}\n"
    kept = [
        f"model.{case.path(block.name)}.kept".replace("..", ".")
        for block in case.blocks
        if block.keeps
    ]
    lines = [*(f"{each} = None" for each in kept), f"loss = {output}"]
    for index, each in enumerate(kept):
        lines.append(f"if {each} is not None:")
        more = "" if case.loss == "kept" and index == 0 else "loss + "
        lines.append(f"    loss = {more}{each}.cos().mean().to(loss.dtype)")
    return "\n".join([*lines, "return loss"]) + "\n"
