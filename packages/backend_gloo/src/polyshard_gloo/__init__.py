"""The gloo backend of polyshard: sharded training on CPUs."""

from .backend import GlooBackend

__version__ = "0.1.0"

__all__ = ["GlooBackend", "__version__"]
