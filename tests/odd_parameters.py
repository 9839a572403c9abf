"""Modules with parameters of odd shapes, dtypes and numbers of owners."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor], Tensor]


class Holder(nn.Module):
    """Parameters by name; its forward is a loss of them and of an input of 3 columns."""

    def __init__(self, loss: Loss, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            trained = value.is_floating_point() or value.is_complex()
            self.register_parameter(name, nn.Parameter(value, requires_grad=trained))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x)


def scalars() -> nn.Module:
    """0-D parameters and one of a single element."""
    return Holder(
        lambda m, x: (x * m.gain + m.one.sum() + m.row * m.small).square().mean(),
        gain=torch.tensor(1.5),
        one=torch.randn(1),
        row=torch.randn(3),
        small=torch.tensor(0.3),
    )


def one_scalar() -> nn.Module:
    """All but one rank hold nothing."""
    return Holder(lambda m, x: (x * m.gain).square().mean(), gain=torch.tensor(1.5))


def nothing() -> nn.Module:
    """Parameters without elements beside one that has some."""
    return Holder(
        lambda m, x: (x * m.row).square().mean() + m.flat.sum() + m.rows.sum() + m.columns.sum(),
        flat=torch.empty(0),
        rows=torch.empty(0, 3),
        columns=torch.empty(2, 0),
        row=torch.randn(3),
    )


def all_dtypes() -> nn.Module:
    """Eight dtypes in one unit, of which five are not trained."""

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y = (
            x @ m.single
        ).double() * m.double_ * m.count + m.long.sum() * m.byte.double().sum() / 50
        y = y.sum() + (m.complex_.sum() * m.wide.sum()).abs()
        return (y.square() * m.mask.double().sum() * m.flag / 100).float()

    return Holder(
        loss,
        single=torch.randn(3, 2),
        double_=torch.randn(2, dtype=torch.float64),
        complex_=torch.randn(5, 2, dtype=torch.complex64),
        wide=torch.randn(3, dtype=torch.complex128),
        long=torch.arange(7),
        byte=torch.arange(3, dtype=torch.uint8),
        mask=torch.tensor([True, False, True]),
        count=torch.tensor(3),
        flag=torch.tensor(True),
    )


def odd_strides() -> nn.Module:
    """Transposed, channels last, strided, and three that share one storage."""
    flat = torch.randn(9)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y = (x @ m.turned).sum() * m.image.sum() + m.stepped.square().sum() + (m.image**3).sum()
        return ((y + (x * m.first + m.second).square().sum()) * m.third.sum()).square() / 1000

    return Holder(
        loss,
        turned=torch.randn(5, 3).t(),
        image=torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        stepped=torch.randn(8)[::2],
        first=flat[:3],
        second=flat[3:6],
        third=flat[6:],
    )


class Lists(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.randn(3) for _ in range(3)])
        self.named = nn.ParameterDict({"row": torch.randn(3), "gain": torch.tensor(2.0)})

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return (x * self.named["row"] * self.named["gain"]).square().mean()


class Recurrent(nn.Module):
    """Layers that keep a second list of their weights."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(3, 4, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unsqueeze(0))[0].square().mean()


MAKE: dict[str, Callable[[], nn.Module]] = {
    "scalars": scalars,
    "one scalar": one_scalar,
    "nothing": nothing,
    "all dtypes": all_dtypes,
    "odd strides": odd_strides,
    "lists": Lists,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
}


class Tied(nn.Module):
    """An embedding, a head that shares its weight, and a body that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.body = nn.Linear(4, 4)
        self.again = self.body
        self.bodies = nn.ModuleList([self.body, nn.Linear(4, 4)])
        self.mixing = self.bodies[1].weight
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.tanh(self.body(self.embedding(tokens)))))
        logits = self.head(self.bodies[1](self.bodies[0](x)) @ self.mixing)
        return nn.functional.cross_entropy(logits, tokens.roll(1))
