"""A gloo backend that stages tensors of the host as if they lay on a GPU, on recorded streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polyshard_gloo import GlooBackend
from polyshard_gloo.streams import Streams


class Stream:
    """In order by itself, for the host does everything at once; ``log`` is shared by all."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: Event) -> None:
        assert event.place is not None, f"{self.name} waits for an event that nobody recorded"
        self.log.append(f"{self.name} waits for {event.place}")


class Event:
    def __init__(self) -> None:
        self.place: str | None = None

    def record(self, stream: Stream) -> None:
        self.place = stream.name
        stream.log.append(f"{stream.name} records")

    def query(self) -> bool:
        return self.place is not None


class RecordedStreams(Streams):
    """One that threads compute on, and those that are made, by number."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._main, self._made = Stream("main", self.log), 0
        self._here = threading.local()

    def new_stream(self, device: torch.device) -> Any:
        self._made += 1
        return Stream(f"stream {self._made}", self.log)

    def current_stream(self, device: torch.device) -> Any:
        return getattr(self._here, "stream", self._main)

    def new_event(self) -> Any:
        return Event()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.current_stream(torch.device("cpu"))
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before


class StagedOnHost(GlooBackend):
    """Everything as for CUDA devices, with CPU tensors."""

    name = "gloo"

    def __init__(self) -> None:
        super().__init__()
        self._streams = RecordedStreams()

    def _is_staged(self, device: torch.device) -> bool:
        return True
