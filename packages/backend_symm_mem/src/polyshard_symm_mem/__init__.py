"""The symmetric-memory backend of polyshard. The core finds it by the name `symm_mem`."""

from .backend import SymmMemBackend

__all__ = ["SymmMemBackend"]
