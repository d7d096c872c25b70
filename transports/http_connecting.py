"""Opens the connections to a web server a few at a time, and more at a time as it answers.

Data path: none; used by `http_session`.

A server that is sent more connections than its accept queue takes, such as the five of Python's ``http.server``, drops
them without a word, and TCP tries again only after a second, two seconds, and so on up to a minute.
"""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf

_FIRST = 5  # the shortest accept queue of a server in use
_SLOW_CONNECT_S = 0.5  # a connection that took longer was dropped once: TCP tries again after a second
_MORE = 2  # connections that may be opened besides, for each answer
_PER_S = 1000  # connections a second: no server gains by more, and one that answers soon needs no more at a time


class Connecting:
    """The connections to one server that are being opened, until their first answer. In one event loop."""

    def __init__(self) -> None:
        self.most = _FIRST
        """Connections that may be opened at a time."""
        self._opening = self._answers = 0
        self._least_s = inf  # for a first answer
        self._halved = -inf  # the time of the last slow connection
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def full(self) -> bool:
        """Whether no more connections may be opened now."""
        return self._opening >= self.most

    async def change(self) -> None:
        """Wait until a connection may be opened, or was given back to the pool."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.wake()  # cancelled just when it was woken: another request may go on
            raise

    def wake(self) -> None:
        """Let one waiting request look again."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def begin(self) -> None:
        """Note that a connection is being opened."""
        self._opening += 1

    def opened(self, began: float, now: float) -> None:
        """Note that a connection, begun at the first time, is established."""
        # Those that were begun before the last slow one belong to the same crowd, for which the number was halved.
        if now - began > _SLOW_CONNECT_S and began > self._halved:
            self._halved = now
            self.most = max(1, self.most // 2)

    def end(self, answered_s: float | None) -> None:
        """Note that a new connection has had its first answer after this time; None: it has failed."""
        self._opening -= 1
        if answered_s is not None:
            self._answers += 1
            # The first take long whatever the server does: this process begins many requests at that moment.
            if self._answers > _FIRST:
                self._least_s = min(self._least_s, answered_s)
                most = max(_FIRST, int(_PER_S * self._least_s))
                self.most = min(self.most + _MORE * bool(self._waiting), most)
        for _ in range(self.most - self._opening):
            self.wake()
