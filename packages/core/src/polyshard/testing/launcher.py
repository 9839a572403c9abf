"""run_ranks: a function on every rank of a warm world, for tests.

Owns the pool of worlds. Knows nothing of how a world works.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, TypeVar

from .world import World, one_call_at_a_time

T = TypeVar("T")

# Processes that are kept warm; worlds of 1, 2, 4 and 8 fit side by side.
MAX_WARM_PROCESSES = 16


def run_ranks(
    world_size: int,
    body: Callable[..., T],
    /,
    *args: Any,
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[T]:
    """Run ``body(rank, *args, **kwargs)`` on every rank of a warm world; results by rank.

    ``body`` is a function at module level; arguments and results travel as pickles, tensors by
    value. Every rank is a process of its own in which a gloo process group of ``world_size``
    ranks is initialised, torch computes with one thread, and the generators of torch, random
    and numpy are seeded with 0. It has this process's working directory, ``sys.path`` and
    environment, as they are now. Nothing that a body changed in those, in torch's defaults or
    in the warning filters reaches the next one. What it prints is printed here, by rank.

    Worlds are cached by size and end with this process. The first call takes seconds, later
    ones milliseconds. Calls from several threads run one after another.

    Raises RankFailure where a rank raised, died, or had not returned after ``timeout`` seconds;
    the world is then replaced at the next call. Raises ValueError, before anything runs, for
    arguments that cannot be sent or a world that cannot be.
    """
    with one_call_at_a_time():
        return _pool.world(world_size).run(body, *args, timeout=timeout, **kwargs)


class _Pool:
    """Worlds by size, the least recently used first."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def world(self, world_size: int) -> World:
        """The world of this size, after room was made for it. Not started here."""
        wanted = self._worlds.pop(world_size, None) or World(world_size)
        for size in list(self._worlds):
            if sum(self._worlds) + world_size > MAX_WARM_PROCESSES:
                self._worlds.pop(size).close()
        self._worlds[world_size] = wanted
        return wanted

    def let_go(self) -> None:
        """At the end of this process, which the zygote and with it the worlds do not outlive."""
        for world in self._worlds.values():
            world.let_go()


_pool = _Pool()
atexit.register(_pool.let_go)
