"""torch.cuda without a card: which thread stands on which device, and on which devices the process has a context.

torch's own `device` and `stream` run over it. It behaves as CUDA does: a thread begins on device 0; setting a thread's
device, or a call that names no device, opens a context on the thread's device.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from asyncloader.delivery import cuda
from asyncloader.delivery.cuda import Driver
from tests.delivery.fake_library import FakeLibrary


class FakeStream:
    """A stream that records the events that it waits for."""

    def __init__(self, device: torch.device, handle: int = 0) -> None:
        self.device = device
        self.handle = handle
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class FakeCuda(threading.local):
    """torch.cuda with two devices."""

    def __init__(self) -> None:  # once in each thread
        self.device = 0
        self.streams = [FakeStream(torch.device("cuda", index)) for index in range(2)]

    contexts: set[int]
    events: list[Any]
    external: list[FakeStream]

    def install(self, monkeypatch: pytest.MonkeyPatch, library: FakeLibrary | None = None) -> None:
        """Replace torch.cuda's functions until the test's end."""
        kind = type(self)
        kind.contexts, kind.events, kind.external = set(), [], []
        drivers = [Driver(library or FakeLibrary(), index) for index in range(2)]
        cuda._kept.cache_clear()
        monkeypatch.setattr(cuda, "open_driver", drivers.__getitem__)
        fake = self

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking
                fake.events.append(self)
                self.recorded: FakeStream | None = None

            def record(self, stream: FakeStream) -> None:
                self.recorded = stream

            def synchronize(self) -> None:
                fake.contexts.add(fake.device)

        names: dict[str, Any] = {
            "Event": Event,
            "ExternalStream": self._external,
            "current_device": lambda: self.device,
            "current_stream": self._current_stream,
            "device_count": lambda: 2,
            "is_available": lambda: True,
            "set_stream": self._set_stream,
            "_exchange_device": self._exchange,
            "_maybe_exchange_device": self._maybe_exchange,
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def _set(self, index: int) -> None:
        if index != self.device:
            self.device = index
            self.contexts.add(index)

    def _exchange(self, index: int) -> int:
        before = self.device
        self._set(index)
        return before

    def _maybe_exchange(self, index: int) -> int:
        before, self.device = self.device, index  # opens nothing
        return before

    def _external(self, handle: int, device: torch.device) -> FakeStream:
        self.external.append(FakeStream(device, handle))
        return self.external[-1]

    def _current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self.streams[self.device if device is None else device.index]

    def _set_stream(self, stream: FakeStream) -> None:
        if stream.device.index != self.device:
            self.contexts.add(stream.device.index)
        self.device = stream.device.index
        self.streams[self.device] = stream
