"""Where a check runs, and how it says what it found. Imports torch only where it is asked to."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class Skip(Exception):
    """What a check, or a step of it, cannot show here, and why."""


class CheckFailed(Exception):
    """A check found what should not be."""


class Site:
    """What a check is given: a device, and a place for what it finds.

    Args:
        dry_run: on a CPU, over gloo and with tiny models, to see that the check itself works.
            Such a run shows nothing of a GPU.

    Attributes:
        figures: numbers for the report, by name; what JSON can hold.
    """

    def __init__(self, *, dry_run: bool = False) -> None:
        self.dry_run = dry_run
        self.figures: dict[str, Any] = {}
        self.steps: dict[str, str] = {}

    @property
    def device_type(self) -> str:
        """``cuda``, or ``cpu`` in a dry run."""
        return "cpu" if self.dry_run else "cuda"

    @property
    def device(self) -> torch.device:
        """The one GPU; in a dry run the CPU."""
        import torch

        return torch.device("cpu") if self.dry_run else torch.device("cuda", 0)

    @property
    def backend(self) -> str:
        """The backend that serves the device, by name."""
        return "gloo" if self.dry_run else "nccl"

    def require_cuda(self, what: str) -> None:
        """Skip where there is no GPU."""
        if self.dry_run:
            raise Skip(f"{what} needs a GPU")

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        if not self.dry_run:
            torch.cuda.synchronize()

    def world(self) -> DeviceMesh:
        """Make this process the only rank of a job; the mesh of its one axis, ``dp``."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            if not self.dry_run:
                torch.cuda.set_device(0)
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
            kind = "gloo" if self.dry_run else "cpu:gloo,cuda:nccl"
            dist.init_process_group(kind, store=store, rank=0, world_size=1)
        return init_device_mesh(self.device_type, (1,), mesh_dim_names=("dp",))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A part of the check: what goes wrong in it is noted and does not stop the next one."""
        began = time.perf_counter()
        try:
            yield
        except Skip as reason:
            self.steps[name] = f"skipped: {reason}"
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip() or "no message").splitlines()[0]
            self.steps[name] = f"failed: {type(error).__name__}: {first}"
        else:
            self.steps[name] = "passed"
        print(f"{name}: {self.steps[name]} ({time.perf_counter() - began:.1f} s)", flush=True)

    def conclude(self) -> None:
        """Raise CheckFailed where a step failed, Skip where every one was skipped."""
        failed = [name for name, outcome in self.steps.items() if outcome.startswith("failed")]
        if failed:
            raise CheckFailed(f"{len(failed)} of {len(self.steps)} steps: {', '.join(failed)}")
        skipped = [outcome for outcome in self.steps.values() if outcome.startswith("skipped")]
        if skipped and len(skipped) == len(self.steps):
            raise Skip("; ".join(dict.fromkeys(each.partition(": ")[2] for each in skipped)))


def require(condition: bool, what: str) -> None:
    """Raise CheckFailed unless ``condition``."""
    if not condition:
        raise CheckFailed(what)
