"""A backend of polyshard over Unix-domain sockets, for processes of one machine."""

from .backend import SocketsBackend

__version__ = "0.1.0"

__all__ = ["SocketsBackend", "__version__"]
