"""CUDA tensors by way of host memory: collectives that copy to the host, and back.

For tests of several ranks on one GPU, where NCCL takes one rank only. Knows no lanes: work already
runs on the stream of its lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard.spi import Communicator, Op

from .communicator import GlooCommunicator


class StagedCommunicator(Communicator):
    """A communicator of host memory, for tensors on ``device``.

    Every copy blocks the calling thread until the device has done it, and with it all that its
    current stream had to do before. So when a collective returns, inputs were read and outputs
    are there.
    """

    def __init__(self, host: GlooCommunicator, device: torch.device) -> None:
        super().__init__(host.rank, host.size, device, reduce_dtypes=host.reduce_dtypes)
        self._host = host

    def settle(self) -> None:
        self._host.settle()

    def close(self) -> None:
        self._host.close()

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        results = [_on_host_like(output) for output in outputs]
        self._host._all_gather(results, _on_host(shards), label=label)
        _back(results, outputs)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        results = [_on_host_like(output) for output in outputs]
        self._host._reduce_scatter(results, _on_host(inputs), op, label=label)
        _back(results, outputs)

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        results = _on_host(buffers)
        self._host._all_reduce(results, op, label=label)
        _back(results, buffers)

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        results = _on_host(buffers)
        self._host._broadcast(results, source, label=label)
        _back(results, buffers)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, also of what lies on the host."""
    return [torch.empty_like(tensor, device="cpu").copy_(tensor) for tensor in tensors]


def _on_host_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


def _back(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for tensor, result in zip(tensors, results, strict=True):
        # To autograd a refilled buffer is unchanged.
        tensor.data.copy_(result)
