"""Helpers to end stages in tests."""

from __future__ import annotations

import threading

from asyncloader.delivery.stage import Stage
from tests.delivery.fake import PATIENCE_S


def closing(stage: Stage) -> threading.Thread:
    """Close the stage in another thread. When this returns, that thread waits for the batch in hand."""
    joined = threading.Event()
    join = stage._thread.join

    def announce(timeout: float | None = None) -> None:
        joined.set()
        join(timeout)

    stage._thread.join = announce  # type: ignore[method-assign]
    thread = threading.Thread(target=stage.close)
    thread.start()
    assert joined.wait(PATIENCE_S)
    return thread
