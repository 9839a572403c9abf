"""A small model of three units, and its loss on every rank's own data."""

from __future__ import annotations

import torch
from behaving import Side
from torch import Tensor, nn

WIDTH = 5


class Net(nn.Module):
    """Rows that do not divide by the ranks, a 0-D parameter, and two inner layers."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 7)
        self.narrow = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.narrow(torch.tanh(self.widen(x))) * self.scale)


def make_net(side: Side, dtype: torch.dtype = torch.float32, **options: object) -> Net:
    """Three units of which one holds the others."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    side.shard(net.widen, net.narrow, net, **options)
    return net


def mean_square(side: Side, net: nn.Module, seed: int) -> Tensor:
    data = side.data(seed, 4, WIDTH)
    return side.mean(lambda rank: net(data[rank]).square().mean())


def note_grads(side: Side, net: nn.Module) -> None:
    """Compare the gradients, None included."""
    for name, parameter in net.named_parameters():
        side.note(f"{name}.grad", parameter.grad)
