"""The task watchdog on real event loops, whose timers have a finite resolution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from asyncloader.workers.watchdog import TaskWatchdog


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("seconds", [0.0001, 0.0004, 0.0011, 0.003])
def test_short_deadlines_come_on_real_loops(make: Callable[[], asyncio.AbstractEventLoop], seconds: float) -> None:
    """uvloop counts in milliseconds, with another kind of handle for less than one: every deadline is met."""
    loop = make()
    found: list[int] = []

    def on_timeout(worker: int, taken: float) -> None:
        found.append(worker)
        if len(found) == 2:
            loop.stop()

    watchdog = TaskWatchdog(loop, seconds, 2, concurrent=False, catch_up=lambda worker: None, on_timeout=on_timeout)

    def begin() -> None:
        for worker in (1, 0):
            watchdog.starts(worker)
            watchdog.started(worker)
            watchdog.assigned(worker, worker)

    loop.call_soon(begin)
    try:
        loop.run_forever()
    finally:
        watchdog.close()
        loop.close()
    assert sorted(found) == [0, 1]
