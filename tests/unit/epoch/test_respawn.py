"""Requests for replacements of workers, in the iterating thread."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from asyncloader.epoch.respawn import Request, WorkerRespawner


class Clearing(deque[Request]):
    """Is cleared, as by `close` in another thread, just before its first request is read."""

    def __getitem__(self, at: Any) -> Any:
        self.clear()
        return super().__getitem__(at)


def test_requests_that_another_thread_clears_are_not_made() -> None:
    """The iterating thread goes on, and finds that the iterator was closed."""
    respawner = WorkerRespawner(cast("Any", None), lambda: None, None)
    respawner.requests = Clearing([cast("Any", None)])
    respawner.work()
    assert not respawner.requests
