"""The errors users meet, all of them RuntimeErrors or ValueErrors. Knows nothing else."""

from __future__ import annotations


class BackendError(RuntimeError):
    """A backend is missing, broken, incompatible or unusable here, or its communication failed."""


class PlacementError(ValueError):
    """Placements, mesh or axes that do not fit together; names the axis, what came, what fits."""


class UnsupportedError(RuntimeError):
    """A request that is understood but not offered; says what to do instead."""
