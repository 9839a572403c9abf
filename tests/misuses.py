"""Ways to misuse the library, each with what users are told. `docs/troubleshooting.md` lists them.

Each is a function on every rank that raises; none changes what others see.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from behaving import Side
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from polyshard import (
    Placements,
    UnsupportedError,
    clip_grad_norm_,
    fully_shard,
    load_full_state_dict,
    microbatch,
    register_forward_method,
    unsharded,
)


class Model(nn.Module):
    """A unit inside another, and a method that is no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))

    def generate(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.first(x)], -1)

    def stream(self, x: Tensor) -> Any:
        yield self(x)


INPUT = torch.ones(2, 3)


def sharded(side: Side, model: nn.Module | None = None) -> Any:
    """The model, whose root has run once, so that units have their names."""
    model = Model() if model is None else model
    side.shard(model.block, model)
    model(INPUT)
    return model


# -- weights outside of forward ---------------------------------------------------------------


def weight_outside(side: Side) -> None:
    model = sharded(side)
    F.linear(torch.ones(2, 4), model.block[0].weight)


def matrix_product_outside(side: Side) -> None:
    model = sharded(side)
    torch.ones(2, 4) @ model.last.weight.t()


def layer_outside(side: Side) -> None:
    sharded(side).first(INPUT)


def method_outside(side: Side) -> None:
    sharded(side).generate(INPUT)


def forward_by_name(side: Side) -> None:
    sharded(side).forward(INPUT)


def indexing(side: Side) -> None:
    model = sharded(side)
    model.last.weight[0]


class TiedOutside(nn.Module):
    """Its head, in no unit, has the weight of its body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def tied_outside(side: Side) -> None:
    model = TiedOutside()
    side.shard(model.body)
    model(torch.ones(2, 4))


def kept_from_before(side: Side) -> None:
    model = Model()
    weight = model.last.weight
    sharded(side, model)
    weight.mul(2.0)


def method_of_no_unit(side: Side) -> None:
    register_forward_method(sharded(side).last, "forward")


def method_that_is_none(side: Side) -> None:
    register_forward_method(sharded(side), "sample")


def method_that_is_a_generator(side: Side) -> None:
    register_forward_method(sharded(side), "stream")


# -- parameters that change -------------------------------------------------------------------


def replaced_parameter(side: Side) -> None:
    model = sharded(side)
    model.last.weight = nn.Parameter(torch.zeros(2, 4))
    model(INPUT)


def tied_later(side: Side) -> None:
    model = sharded(side)
    model.block[0].weight = nn.Parameter(model.first.weight.full_tensor()[:, :1].expand(4, 4))
    model(INPUT)


def added_parameter(side: Side) -> None:
    model = sharded(side)
    model.block.scale = nn.Parameter(torch.ones(1))
    model(INPUT)


def added_layer(side: Side) -> None:
    model = sharded(side)
    model.block.append(nn.Linear(4, 4))
    model(INPUT)


def replaced_layer(side: Side) -> None:
    model = sharded(side)
    model.last = nn.Linear(4, 2)
    model(INPUT)


def another_dtype(side: Side) -> None:
    sharded(side).to(torch.bfloat16)


def another_dtype_of_a_layer(side: Side) -> None:
    sharded(side).last.half()


def another_device(side: Side) -> None:
    sharded(side).to("meta")


def assigned_data_while_whole(side: Side) -> None:
    model = sharded(side)
    with unsharded(model):
        model.last.weight.data = torch.zeros_like(model.last.weight)


def replaced_while_whole(side: Side) -> None:
    model = sharded(side)
    with unsharded(model):
        model.last.weight = nn.Parameter(torch.zeros_like(model.last.weight))


def assigned_data_in_forward(side: Side) -> None:
    class Normalising(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data / 2
            return super().forward(x)

    layer = Normalising(INPUT.shape[1], 4)
    side.shard(layer)
    layer(INPUT)


def assigned_data(side: Side) -> None:
    model = sharded(side)
    model.last.weight.data = torch.zeros(2, 4)


def assigned_state(side: Side) -> None:
    sharded(side).load_state_dict(Model().state_dict(), assign=True)


def written_in_forward(side: Side) -> None:
    model = nn.Embedding(5, 4)
    side.shard(model)
    model.max_norm = 0.1
    model(torch.arange(5))


def no_values(side: Side) -> None:
    model = nn.Linear(3, 2, device="meta")
    side.shard(model)
    model(INPUT)


# -- optimizers and gradients -----------------------------------------------------------------


def early_optimizer(side: Side) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    sharded(side, model)(INPUT).sum().backward()
    optimizer.step()


def early_list_of_parameters(side: Side) -> None:
    model = Model()
    parameters = list(model.parameters())
    sharded(side, model)(INPUT).sum().backward()
    clip_grad_norm_(parameters, 1.0)


def accumulation_hook(side: Side) -> None:
    sharded(side).last.weight.register_post_accumulate_grad_hook(lambda _: None)


def derivative_of_a_weight(side: Side) -> None:
    model = sharded(side)
    torch.autograd.grad(model(INPUT).sum(), model.last.weight, allow_unused=True)


def backward_to_a_weight(side: Side) -> None:
    model = sharded(side)
    model(INPUT).sum().backward(inputs=[model.last.weight])


def plain_gradient(side: Side) -> None:
    model = sharded(side)
    model.last.weight.grad = torch.zeros(2, 4)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


# -- what is given to fully_shard -------------------------------------------------------------


def no_forward(side: Side) -> None:
    side.shard(nn.ModuleList([nn.Linear(3, 2)]))


def sharded_twice(side: Side) -> None:
    side.shard(sharded(side))


def parent_first(side: Side) -> None:
    model = Model()
    side.shard(model, model.block)


def tied_over_units(side: Side) -> None:
    model = Model()
    model.block[0].weight = model.last.weight = nn.Parameter(torch.zeros(4, 4))
    side.shard(model.block, model)


def renormalising(side: Side) -> None:
    side.shard(nn.Sequential(nn.EmbeddingBag(5, 4, max_norm=0.1)))


def nested_parameter(side: Side) -> None:
    model = nn.Linear(2, 2)
    rows = [torch.ones(1), torch.ones(2)]
    with warnings.catch_warnings(action="ignore"):  # PyTorch calls nested tensors a prototype
        model.bias = nn.Parameter(torch.nested.nested_tensor(rows))
    side.shard(model)


def quantized_parameter(side: Side) -> None:
    model = nn.Linear(2, 2)
    values = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    model.bias = nn.Parameter(values, requires_grad=False)
    side.shard(model)


def sparse_parameter(side: Side) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    side.shard(model)


def lazy_layer(side: Side) -> None:
    side.shard(nn.LazyLinear(2))


def no_such_axis(side: Side) -> None:
    fully_shard(Model(), side.mesh, Placements.zero3("data"))


def ranks_that_descend(side: Side) -> None:
    ranks = list(reversed(range(side.world)))
    fully_shard(Model(), DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)), Placements.zero3("dp"))


def microbatch_without_units(side: Side) -> None:
    with microbatch(Model(), is_last=True):
        pass


# -- saving and copying -----------------------------------------------------------------------


def pickled(side: Side) -> None:
    pickle.dumps(sharded(side))


def copied_while_whole(side: Side) -> None:
    model = sharded(side)
    with unsharded(model):
        copy.deepcopy(model)


def loaded_by_other_names(side: Side) -> None:
    load_full_state_dict(sharded(side), {"weight": torch.zeros(2, 4)})


Misuse = Callable[[Side], None]

#: What users are told: parts of the message.
MISUSES: dict[Misuse, tuple[type[Exception], list[str]]] = {
    weight_outside: (UnsupportedError, ["'0.weight' of unit 'block'", "register_forward_method"]),
    matrix_product_outside: (
        UnsupportedError,
        ["'last.weight' of unit 'Model'", "`with unsharded"],
    ),
    layer_outside: (
        UnsupportedError,
        ["'first.weight' of unit 'Model'", "register_forward_method"],
    ),
    method_outside: (
        UnsupportedError,
        ["'first.weight' of unit 'Model'", "register_forward_method"],
    ),
    forward_by_name: (UnsupportedError, ["'first.weight' of unit 'Model'", "its unit's forward"]),
    indexing: (UnsupportedError, ["'last.weight' of unit 'Model'", "full_tensor()"]),
    tied_outside: (UnsupportedError, ["linear got the whole weight 'weight' of unit 'Linear'"]),
    kept_from_before: (
        UnsupportedError,
        ["mul got the whole weight 'last.weight' of unit 'Model'", "released outside of forwards"],
    ),
    method_of_no_unit: (UnsupportedError, ["give the module to fully_shard before"]),
    method_that_is_none: (UnsupportedError, ["nothing of that name", "its class defines"]),
    method_that_is_a_generator: (UnsupportedError, ["hands out a generator", "runs to its end"]),
    replaced_parameter: (
        UnsupportedError,
        ["'last.weight' of unit 'Model' was replaced or removed"],
    ),
    tied_later: (UnsupportedError, ["'0.weight' of unit 'block' was replaced or removed"]),
    added_parameter: (UnsupportedError, ["'scale' came into unit 'block' after fully_shard"]),
    added_layer: (UnsupportedError, ["'2.weight' came into unit 'block' after fully_shard"]),
    replaced_layer: (UnsupportedError, ["'last.weight' came into unit 'Model' after fully_shard"]),
    another_dtype: (UnsupportedError, ["cannot become torch.bfloat16", "compute_dtype"]),
    another_dtype_of_a_layer: (
        UnsupportedError,
        ["cannot become torch.float16", "before fully_sh"],
    ),
    another_device: (UnsupportedError, ["cannot become meta", "before fully_shard"]),
    assigned_data: (UnsupportedError, ["'last.weight' of unit 'Model': assigning .data", "copy_"]),
    assigned_data_while_whole: (UnsupportedError, ["'last.weight' of unit", "given other memory"]),
    assigned_data_in_forward: (UnsupportedError, ["'weight' of unit", "given other memory"]),
    replaced_while_whole: (UnsupportedError, ["'last.weight' of unit", "put in its place"]),
    assigned_state: (UnsupportedError, ["load_state_dict(assign=True)", "Leave assign out"]),
    written_in_forward: (UnsupportedError, ["wrote to its own parameter 'weight'", "max_norm"]),
    no_values: (UnsupportedError, ["'weight' of unit 'Linear' was on meta", "reset_parameters"]),
    early_optimizer: (
        UnsupportedError,
        ["AdamW.step(): it holds 'first.weight'", "after fully_shard"],
    ),
    early_list_of_parameters: (UnsupportedError, ["whole parameter of unit", "model.parameters()"]),
    accumulation_hook: (UnsupportedError, ["register_post_accumulate_grad_hook()", "never run"]),
    derivative_of_a_weight: (UnsupportedError, ["'last.weight' of unit 'Model'", "backward()"]),
    backward_to_a_weight: (UnsupportedError, ["'last.weight' of unit 'Model'", "backward()"]),
    plain_gradient: (UnsupportedError, ["the other operand is a Tensor", "full_tensor()"]),
    no_forward: (UnsupportedError, ["ModuleList has no forward", "its children"]),
    sharded_twice: (UnsupportedError, ["this Model was already given to fully_shard"]),
    parent_first: (UnsupportedError, ["'block.0.weight' of unit 'Model' already", "bottom-up"]),
    tied_over_units: (UnsupportedError, ["'0.weight' of unit", "to a common ancestor"]),
    renormalising: (UnsupportedError, ["'0.weight' of Sequential", "max_norm=0.1", "ignored_para"]),
    nested_parameter: (UnsupportedError, ["'bias' of Linear is a nested tensor", "strided"]),
    quantized_parameter: (UnsupportedError, ["'bias' of Linear is quantized (torch.qint8)"]),
    sparse_parameter: (UnsupportedError, ["'weight' of Linear has layout torch.sparse_coo"]),
    lazy_layer: (UnsupportedError, ["is not initialised", "run the lazy module once"]),
    no_such_axis: (ValueError, ["the mesh has no axis 'data'", "its axes are"]),
    ranks_that_descend: (ValueError, ["has the ranks (1, 0)", "ranks that ascend along each axis"]),
    microbatch_without_units: (UnsupportedError, ["Model has no units", "call fully_shard before"]),
    pickled: (UnsupportedError, ["cannot be pickled", "full_state_dict(module)", "copy.deepcopy"]),
    copied_while_whole: (UnsupportedError, ["inside `with unsharded(...)`", "outside"]),
    loaded_by_other_names: (RuntimeError, ["Unexpected key(s)", "Missing key(s)"]),
}
