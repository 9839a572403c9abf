"""The errors users meet. Knows nothing else; every error derives from RuntimeError or ValueError."""

from __future__ import annotations


class BackendError(RuntimeError):
    """A backend is missing, broken, incompatible or unusable here, or its communication failed."""


class PlacementError(ValueError):
    """Placements, mesh or axes that do not fit together; names the axis, what came and what fits."""


class UnsupportedError(RuntimeError):
    """A request that is understood but not offered; says what to do instead."""
