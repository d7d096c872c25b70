"""Passes lines on to all connections that follow them, and makes none while no connection does.

Data path: feed -> [broadcast] -> terminal views, pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

_log = logging.getLogger("asyncloader")

_MOST_MISSED = 30  # lines in a row that a connection was too slow for; then it is closed


class Framing(NamedTuple):
    """How lines are written to a connection: each between `before` and `after`, and `end` when no more come."""

    before: bytes
    after: bytes
    end: bytes


LINES = Framing(b"", b"\n", b"")
EVENTS = Framing(b"data: ", b"\n\n", b"event: end\ndata: \n\n")


class Broadcast:
    """Runs a feed while connections follow it.

    Args:
        feed: begins to make lines. It is closed when the last connection leaves, and called again for the next.
    """

    def __init__(self, feed: Callable[[], AsyncGenerator[bytes]]) -> None:
        self._feed = feed
        self._followers: dict[asyncio.StreamWriter, _Follower] = {}
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._latest = b""
        self.over = asyncio.Event()
        """Set once the feed has ended by itself, or `close` was called: no more lines come."""

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, framing: Framing) -> None:
        """Write lines to a connection until the other end closes it or the feed ends."""
        follower = self._followers[writer] = _Follower(writer, framing)
        try:
            if self.over.is_set():
                follower.end()
                return
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._run())
            elif self._latest:
                follower.write(self._latest)
            # Nothing has to be read: the first byte, or the end, ends the connection.
            leaving = asyncio.get_running_loop().create_task(reader.read(1))
            try:
                ends: list[asyncio.Future[Any]] = [leaving, follower.done]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await leaving
        finally:
            del self._followers[writer]
            if not self._followers and self._task is not None:
                self._stop()

    def _stop(self) -> None:
        task, self._task = self._task, None
        assert task is not None
        self._latest = b""
        # A task that is cancelled may still run for a while: `close` waits for it.
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    async def _run(self) -> None:
        try:
            async with aclosing(self._feed()) as lines:
                async for line in lines:
                    self._latest = line
                    for follower in list(self._followers.values()):
                        follower.write(line)
        except Exception:
            _log.exception("the view of a loader ends")
        self._end()

    def _end(self) -> None:
        self.over.set()
        for follower in self._followers.values():
            follower.end()

    async def close(self) -> None:
        """End all connections' lines. Idempotent."""
        self._end()
        if self._task is not None:
            self._stop()
        if self._ending:
            await asyncio.wait(self._ending)


class _Follower:
    def __init__(self, writer: asyncio.StreamWriter, framing: Framing) -> None:
        self._writer, self._framing = writer, framing
        self._missed = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, line: bytes) -> None:
        """Write a line, unless the line before has not left yet: a slow reader gets fewer lines, and no old ones."""
        if self.done.done() or self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size():
            self._missed += 1
            if self._missed >= _MOST_MISSED:
                self.done.set_result(None)
            return
        self._missed = 0
        self._writer.write(self._framing.before + line + self._framing.after)

    def end(self) -> None:
        if not self.done.done():
            if not self._writer.is_closing() and not self._writer.transport.get_write_buffer_size():
                self._writer.write(self._framing.end)
            self.done.set_result(None)
