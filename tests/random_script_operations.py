"""Writes down the operations of a case, one ``with run.step(...)`` each; no modules' insides."""

from __future__ import annotations

from collections.abc import Iterator

from random_case import Case, Operation
from random_draw_operations import ALWAYS_FINAL

UNPACKED = {"tuple": "[0]", "dict": '["x"]', "dataclass": ".x", "nested": "[0][0]"}
MODES = {
    "no_grad": ", torch.no_grad()",
    "inference": ", torch.inference_mode()",
    "autocast": ', torch.autocast("cpu", dtype=torch.bfloat16)',
    "unsharded": ", run.unsharded()",
}


#: What is done only to gradients that do not wait for a last microbatch.
WAITING = ("step", "clip", "scale gradients", "set gradient", "freeze")


def operate(case: Case) -> str:
    """The body of the script's ``operate``."""
    lines = ["model, optimizer = run.model, run.optimizer"]
    may_wait = case.strategy not in ALWAYS_FINAL and any(not o.last for o in case.operations)
    for operation in case.operations:
        written = list(_operation(case, operation))
        if may_wait and operation.kind in WAITING:
            written = ["if run.final:", *(f"    {line}" for line in written)]
        lines += written
    return "\n".join(lines) + "\n"


def _operation(case: Case, operation: Operation) -> Iterator[str]:
    what, scopes, body = _described(case, operation)
    yield f'with run.step("{what}"){scopes}:'
    for line in body:
        yield f"    {line}"


def _described(case: Case, operation: Operation) -> tuple[str, str, list[str]]:
    """What it is called, the scopes around it, its lines."""
    kind, target = operation.kind, operation.target
    parameter = f'model.get_parameter("{target}")'
    names = ", ".join(f'"{name}"' for name in operation.names)
    if kind == "forward":
        what = f"forward {operation.name}" + (f" of {target} alone" if target else "")
        return what, MODES.get(operation.mode, ""), [_run_forward(case, operation)]
    if kind == "mishap":
        module = f"model.{target}".rstrip(".")
        scope = f', run.raising({module}, "{operation.mode}")'
        body = [_run_forward(case, _of_the_whole(operation))]
        if operation.mode == "backward":
            body.append(f'run.backward("{operation.name}")')
        return f"{module} raises in {operation.mode}", scope, body
    if kind == "backward":
        keep = ", retain_graph=True" if operation.flag else ""
        return f"backward {' + '.join(operation.names)}", "", [f"run.backward({names}{keep})"]
    if kind == "step":
        return "optimizer.step()", "", ["optimizer.step()"]
    if kind == "zero":
        arguments = "" if operation.flag else "set_to_none=False"
        return "zero_grad", "", [f"optimizer.zero_grad({arguments})"]
    if kind == "zero one":
        return f"grad of {target} = None", "", [f"{parameter}.grad = None"]
    if kind == "clip":
        norm = 'run.noted["norm"]'
        if operation.flag:
            return "clip", "", [f"{norm} = clip_grad_norm_(model.parameters(), 0.5)"]
        return "clip", "", [f"{norm} = nn.utils.clip_grad_norm_(model.parameters(), 0.5)"]
    if kind == "scale gradients":
        body = [
            "for parameter in model.parameters():",
            "    if parameter.grad is not None:",
            "        parameter.grad.mul_(0.5)",
        ]
        return "scale gradients", "", body
    if kind == "set gradient":
        body = [
            f"parameter = {parameter}",
            "if parameter.grad is not None:",
            "    parameter.grad = parameter.grad * 0.5",
        ]
        return f"set the gradient of {target}", "", body
    if kind == "freeze":
        what = "freeze" if operation.flag else "unfreeze"
        return f"{what} {target}", "", [f"{parameter}.requires_grad_({not operation.flag})"]
    if kind == "write":
        return _write(operation, parameter)
    if kind == "save":
        body = [
            f"{operation.name} = {{",
            "    name: value.detach().clone() for name, value in model.named_parameters()",
            "}",
        ]
        return "save", "", body
    if kind == "load":
        return "load", "", [f"model.load_state_dict({operation.names[0]}, strict=False)"]
    if kind == "save full":
        return "save whole", "", [f"{operation.name} = run.save_full()"]
    if kind == "load full":
        return "load whole", "", [f"run.load_full({operation.names[0]})"]
    assert kind == "mode", kind
    return "mode", "", ["model.eval()" if operation.flag else "model.train()"]


def _write(operation: Operation, parameter: str) -> tuple[str, str, list[str]]:
    # Values change: what is written inside `unsharded` is known by that.
    mode, what = operation.mode, f"write {operation.target}"
    if mode == "in place":
        return what, ", torch.no_grad()", [f"{parameter}.add_(0.125)"]
    if mode == "copy":
        return what, ", torch.no_grad()", [f"{parameter}.copy_({parameter} * 0.5 + 0.125)"]
    if mode == "data":
        return what, "", [f"{parameter}.data.add_(0.125)"]
    if mode == "unsharded":
        return what, ", run.unsharded(), torch.no_grad()", [f"{parameter}.add_(0.125)"]
    body = ["floating = [p for p in model.parameters() if p.is_floating_point()]"]
    return "write all", ", torch.no_grad()", [*body, "torch._foreach_mul_(floating, 0.95)"]


def _of_the_whole(operation: Operation) -> Operation:
    """A forward of the whole model."""
    return Operation("forward", operation.name, data=operation.data, route=operation.route)


def _run_forward(case: Case, operation: Operation) -> str:
    if operation.target:
        block = next(b for b in case.blocks if case.path(b.name) == operation.target)
        route = f"route={operation.route}" if block.takes == "keyword" else operation.route
        arguments = f"x=x, rank=rank, {route}" if block.takes == "keyword" else f"x, rank, {route}"
        called = f"model.{operation.target}({arguments})"
        loss = f"{called}{UNPACKED.get(block.returns, '')}.sin().mean()"
    else:
        loss = f"loss_of(model, x, rank, {operation.route})"
    last = "" if operation.last else ", last=False"
    name, data = operation.name, operation.data
    return f'run.forward("{name}", {data}, lambda x, rank: {loss}{last})'
