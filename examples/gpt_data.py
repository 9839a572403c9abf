"""Real text that is on every machine: the Python files of the standard library, as bytes.

Knows no model and no process group; a rank is a number that makes its batches differ.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from gpt_errors import UsageError
from torch import Tensor

# One file in this many is kept for validation.
VALIDATION_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """``train`` and ``validation``: 1-D uint8 tensors from different files."""

    train: Tensor
    validation: Tensor
    num_files: int


def load_corpus(directory: Path | None = None, max_bytes: int = 4_000_000) -> Corpus:
    """Read ``directory/*.py`` (default: the standard library) in name order up to ``max_bytes``.

    Raises UsageError where fewer than two files are found.
    """
    directory = directory or Path(sysconfig.get_paths()["stdlib"])
    texts: list[bytes] = []
    num_bytes = 0
    for path in sorted(directory.glob("*.py")):
        if num_bytes >= max_bytes:
            break
        texts.append(path.read_bytes())
        num_bytes += len(texts[-1])
    if len(texts) < 2:
        raise UsageError(f"found {len(texts)} Python files in {directory}; at least 2 are needed.")
    validation = texts[::VALIDATION_EVERY]
    train = [text for i, text in enumerate(texts) if i % VALIDATION_EVERY]
    return Corpus(_as_tensor(train), _as_tensor(validation), len(texts))


def _as_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


class Batches:
    """An endless, reproducible series of random windows; ranks with different ``rank`` differ."""

    def __init__(
        self, text: Tensor, *, batch_size: int, context: int, rank: int, seed: int = 0
    ) -> None:
        self._text = text
        self._batch_size = batch_size
        self._offsets = torch.arange(context + 1)
        # One stream per (seed, rank): no two ranks ever draw the same series.
        self._generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and the bytes that follow them: two ``[batch, context]`` int64 tensors."""
        last_start = len(self._text) - len(self._offsets)
        starts = torch.randint(last_start + 1, (self._batch_size, 1), generator=self._generator)
        windows = self._text[starts + self._offsets].long()
        return windows[:, :-1], windows[:, 1:]
