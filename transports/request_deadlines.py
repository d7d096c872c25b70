"""Times out the waits of one client's requests, with one timer for all of them.

Data path: none; used by `client_owner`.

While a loop is blocked, or its process stopped, nothing is read, so a server may have answered in time: a timer that
fires late extends the deadlines a little, before any request times out.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

_RESOLUTION = 0.001  # seconds; a timer of uvloop may fire this much too early

# A timer that is this many seconds late shows that the process was stopped or its loop was blocked. The deadlines are
# then extended by the same number of seconds, in which data that has arrived can be read.
_STOOD_STILL = 1.0


class Timed(Protocol):
    """Waits that can time out."""

    deadline: float
    """In the loop's time; infinity: no time-out."""

    def cut(self) -> None:
        """Interrupt the waits now."""


class RequestDeadlines:
    """The waits in progress of one client, in one loop. One timer for all: most waits end long before their deadline,
    and would cost a timer each.
    """

    def __init__(self) -> None:
        self._waits: set[Timed] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._extended = False  # the last check was late, and extended all deadlines

    def __bool__(self) -> bool:
        return bool(self._waits)

    def add(self, waits: Timed) -> None:
        """Note that these waits have begun."""
        self._waits.add(waits)

    def remove(self, waits: Timed) -> None:
        """Note that these waits have ended."""
        self._waits.discard(waits)
        if not self._waits:
            self._disarm()
            self._extended = False

    def watch(self, deadline: float) -> None:
        """Check all deadlines at this time, or earlier."""
        if deadline < self._due:
            self._disarm()
            self._due = deadline
            self._timer = asyncio.get_running_loop().call_at(deadline, self._check)

    def cut_all(self) -> None:
        """Interrupt all waits now."""
        for waits in self._waits:
            waits.cut()

    def _check(self) -> None:
        now = asyncio.get_running_loop().time() + _RESOLUTION
        # Not twice in a row: a loop that is blocked again and again would never time out.
        self._extended = not self._extended and now - self._due > _STOOD_STILL
        self._disarm()
        if self._extended:
            self.watch(now + _STOOD_STILL)
            return
        for waits in self._waits:
            if waits.deadline <= now:
                waits.cut()
        later = [waits.deadline for waits in self._waits if waits.deadline > now]
        if later and min(later) < math.inf:
            self.watch(min(later))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, math.inf
