"""An event loop whose clock jumps to the next timer: coroutines run as they are, and a simulated hour takes no time.

Data path: none. Nothing in such a loop may wait for a thread, a file or a socket: no event from outside ever comes.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits for another, and no timer is left: an error in the simulated program."""


class _SkippingSelector(selectors.SelectSelector):
    """Instead of waiting for files, moves the clock on by the time that it was to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing will ever happen: all tasks wait, and no timer is set")
        # A bit more than asked for: the loop runs a timer once the clock is beyond its time, and after months of time
        # the resolution that it adds itself is lost in rounding.
        self.now = math.nextafter(self.now + max(0.0, timeout), math.inf)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in which time passes only while all tasks wait; it begins at 0."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Seconds of simulated time."""
        return self._skipping.now


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a loop of its own. The calling thread must run no other loop.

    Raises:
        Deadlock: the coroutine waits for something that nothing in the loop will do.
        Exception: whatever the coroutine raises.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
