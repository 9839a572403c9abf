"""The class that a unit's module becomes. Delegates only."""

from __future__ import annotations

import copy
import weakref
from types import new_class
from typing import Any, NoReturn

import torch
from torch import nn

from .context import FsdpContext, context_of, unit_of
from .copying import copy_unit
from .errors import UnsupportedError
from .hooks import interrupted


class FsdpModule:
    """Mixed into the class of every module given to ``fully_shard``.

    The module stays the same object and an instance of its original class. No ``__slots__`` here:
    Python lets an object change its class only between classes that add the same to ``object``,
    and nn.Module adds a ``__dict__``.
    """

    @property
    def fsdp_context(self) -> FsdpContext:
        """What this unit shares with the others that run under the same root."""
        unit = unit_of(self)  # type: ignore[arg-type]
        assert unit is not None
        return context_of(unit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward, after which parameters are sharded however it ended."""
        unit = None if torch.compiler.is_compiling() else unit_of(self)  # type: ignore[arg-type]
        if unit is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        depth = unit.depth
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Exception:
            raise  # hooks were told
        except BaseException:
            interrupted(unit, depth)
            raise

    def __init_subclass__(cls) -> None:
        """Nothing: a module's class that keeps a register of its subclasses is to know the one its
        author wrote, not ours."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A sharded module of its own: equal weights on the same mesh, no gradients."""

        def copy_module(memo: dict[int, Any]) -> nn.Module:
            if hasattr(super(FsdpModule, self), "__deepcopy__"):
                return super(FsdpModule, self).__deepcopy__(memo)  # type: ignore[misc]
            copied = type(self).__new__(type(self))
            memo[id(self)] = copied
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore
            return copied  # type: ignore[return-value]

        if unit_of(self) is None:  # type: ignore[arg-type]
            return copy_module(memo)
        return copy_unit(self, memo, copy_module)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"a sharded {type(self).__name__} cannot be pickled or copied by copy.copy: one rank "
            "holds only its rows. Save `full_state_dict(module)`; copy.deepcopy works."
        )


#: By id of the module's own class, which the made one keeps alive; weak, for a class defined in a
#: function may hold modules.
_classes: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()


def managed_class(original: type) -> type:
    """The class that is both FsdpModule and ``original``; the same while anything is of it.

    Raises:
        UnsupportedError: ``original`` cannot be subclassed.
    """
    made = _classes.get(id(original))
    if made is None:
        try:
            made = new_class(
                original.__name__,
                (FsdpModule, original),
                exec_body=lambda namespace: namespace.update(
                    __module__=original.__module__,
                    __qualname__=original.__qualname__,
                    __doc__=original.__doc__,
                ),
            )
        except Exception as error:
            raise UnsupportedError(
                f"{original.__qualname__} cannot be subclassed, and fully_shard makes a subclass "
                f"of its module's class: {error}. Give fully_shard a module that contains it."
            ) from error
        _classes[id(original)] = made
    return made


def attach_mixin(module: nn.Module) -> None:
    """Give ``module`` a class that is both FsdpModule and its own."""
    module.__class__ = managed_class(type(module))
