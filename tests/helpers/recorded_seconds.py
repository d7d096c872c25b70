"""The time that a page's recording takes, which passes when a test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from asyncloader.live import page_trace
from tests.helpers.running import PATIENCE_S


class Seconds:
    """Stands for the waits of all recordings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.left = threading.Semaphore(0)
        self._wakes: list[Callable[[], object]] = []
        monkeypatch.setattr(page_trace, "sleep", self._sleep)

    async def _sleep(self, _: float) -> None:
        over = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
        self._wakes.append(wake)
        self.begun.release()
        try:
            await over.wait()
        except asyncio.CancelledError:
            self._wakes.remove(wake)
            raise
        finally:
            self.left.release()

    def began(self) -> None:
        """Wait until a recording has begun."""
        assert self.begun.acquire(timeout=PATIENCE_S)

    def ended(self) -> None:
        """Wait until a recording's time has passed, or its page has left."""
        assert self.left.acquire(timeout=PATIENCE_S)

    def passed(self) -> None:
        """End the first wait."""
        self._wakes.pop(0)()
