"""The error for what a user asked for and cannot have. Knows nothing else."""

from __future__ import annotations


class UsageError(ValueError):
    """Shown by its text alone, once. Raised on all ranks alike, before anything heavy."""
