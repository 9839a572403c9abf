"""What users can choose. Knows no lanes and no process groups."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

from polyshard import BackendError

TIMEOUT_VARIABLE = "POLYSHARD_NCCL_TIMEOUT"


@dataclass(frozen=True)
class Options:
    """Of one communicator, or of a backend as defaults for all of its communicators.

    Args:
        timeout: how long a collective may take, a positive timedelta. None: the environment
            variable POLYSHARD_NCCL_TIMEOUT (seconds), else the timeout of the group's store,
            which is that of ``torch.distributed.init_process_group``.
        high_priority: communication goes before compute where both wait for a place on the GPU.
            It is the priority of the lanes' own streams: NCCL runs on those, so torch's
            ``is_high_priority_stream`` would change nothing.
        shared_stream: one stream for all lanes instead of one each. Less memory at peak, and no
            overlap of gathers with reductions; see clause 3.3 of the contract for what it gives
            up.
        user_buffers: buffers come from memory that NCCL allocated and registered, which it can
            move with fewer copies.
        eager: connect in ``communicator()``, not in the first collective.
        pg_options: a ``torch.distributed.ProcessGroupNCCL.Options`` to start from, for its
            ``config``. Copied, never changed.
    """

    timeout: timedelta | None = None
    high_priority: bool = False
    shared_stream: bool = False
    user_buffers: bool = False
    eager: bool = True
    pg_options: Any = None

    def __post_init__(self) -> None:
        for name in ("high_priority", "shared_stream", "user_buffers", "eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"option {name!r} must be a bool, got {getattr(self, name)!r}.")
        timeout = self.timeout
        if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
            raise ValueError(f"option 'timeout' must be a positive timedelta, got {timeout!r}.")
        if self.user_buffers and not self.eager:
            raise ValueError(
                "option 'user_buffers' needs a connected communicator to register memory with; "
                "leave 'eager' True."
            )
        if getattr(self.pg_options, "is_high_priority_stream", False):
            raise ValueError(
                "option 'pg_options' has is_high_priority_stream, which concerns a stream that is "
                "not used here; give high_priority=True instead."
            )

    def updated(self, given: Mapping[str, Any] | None) -> Options:
        """These with what was ``given``.

        Raises:
            ValueError: an option that does not exist, or a value that makes no sense.
        """
        known = [field.name for field in fields(self)]
        unknown = sorted(str(name) for name in set(given or ()).difference(known))
        if unknown:
            raise ValueError(f"unknown options {unknown}; the NCCL backend has {', '.join(known)}.")
        return replace(self, **given) if given else self

    def timeout_or(self, default: timedelta) -> timedelta:
        """The timeout that holds, where the group's own is ``default``.

        Raises:
            BackendError: the environment variable is no number of seconds.
        """
        if self.timeout is not None:
            return self.timeout
        text = os.environ.get(TIMEOUT_VARIABLE)
        if not text:
            return default
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise BackendError(
                f"{TIMEOUT_VARIABLE}={text!r} is not a number of seconds above 0; correct or unset "
                "it."
            )
        return timedelta(seconds=seconds)
