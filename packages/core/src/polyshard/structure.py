"""What the modules of a unit were made of when it was made, to notice what came since.

Holds modules weakly; knows no buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from .errors import UnsupportedError
from .parameter import owner_of

Named = Sequence[tuple[str, nn.Module]]


#: Where a module that is a unit holds it.
UNIT = "_polyshard_unit"


def own_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) of ``module`` and all below it that are in no nested unit, each once, parents
    first."""
    found: dict[nn.Module, str] = {}
    waiting = [("", module)]
    while waiting:
        path, current = waiting.pop()
        if current in found:
            continue
        found[current] = path
        waiting += [
            (f"{path}.{name}" if path else name, child)
            for name, child in reversed(list(current.named_children()))
            if UNIT not in vars(child)
        ]
    return [(path, child) for child, path in found.items()]


class Structure:
    """The modules of one unit, those of nested units left out.

    Args:
        named_modules: (path inside the unit, module).
    """

    def __init__(self, named_modules: Named) -> None:
        self._unmanaged = {
            id(parameter)
            for _, module in named_modules
            for parameter in module._parameters.values()
            if parameter is not None and owner_of(parameter) is None
        }
        self._take(named_modules)

    def _take(self, named_modules: Named) -> None:
        self._known: list[tuple[weakref.ref[nn.Module], int, list[Any]]] = []
        for _, module in named_modules:
            present, children = _contents(module)
            # By reference, for another module may come to lie where one was that is gone.
            known = [None if child is None else weakref.ref(child) for child in children]
            self._known.append((weakref.ref(module), present, known))

    @property
    def is_unchanged(self) -> bool:
        """No module of the unit got or lost a parameter or a child."""
        for reference, known_present, known in self._known:
            module = reference()
            if module is None:
                continue
            present, children = _contents(module)
            if present != known_present or len(children) != len(known):
                return False
            for child, before in zip(children, known, strict=True):
                # What a dead reference gives is no child either.
                if (child is None) != (before is None) or (before and child is not before()):
                    return False
        return True

    def accept(self, module: nn.Module, *, unit: str) -> None:
        """Go on with the modules as they are now.

        Args:
            module: the unit's.
            unit: its name, for the message.

        Raises:
            UnsupportedError: one has a parameter that wants gradients and that nobody looks after.
        """
        named_modules = own_modules(module)
        for path, module in named_modules:
            for name, parameter in module._parameters.items():
                if parameter is None or owner_of(parameter) is not None:
                    continue
                if parameter.requires_grad and id(parameter) not in self._unmanaged:
                    raise UnsupportedError(
                        f"parameter {f'{path}.{name}'.lstrip('.')!r} came into unit {unit!r} after "
                        "fully_shard, so nothing would average its gradient over the ranks. Add it "
                        "before fully_shard, freeze it, or give the module that holds it to "
                        "fully_shard as a unit of its own."
                    )
        self._take(named_modules)


def _contents(module: nn.Module) -> tuple[int, list[nn.Module | None]]:
    parameters = module._parameters
    present = sum([parameter is not None for parameter in parameters.values()])
    return present, list(module._modules.values())
