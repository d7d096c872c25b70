"""Pieces being read: the one that samples are taken from, and those behind it, whose first bytes are on their way.

Data path: lease -> [piece_reading: reading, look-ahead] -> lane. Opening a shard takes a round trip or two; a lane that
opened the next one only when it needed it would wait that long at the end of each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from asyncloader.formats import Located, OnBad, ShardError
from asyncloader.remote.catalogue import Piece, Shard, bytes_left

__all__ = ["LOOK_AHEAD", "LookAhead", "Open", "PieceReading"]

Open = Callable[[Shard, Piece, OnBad], AsyncGenerator[list[Located], None]]
"""Reads a piece; tells of bad samples that were stepped over."""

LOOK_AHEAD = 4
"""Pieces behind the present one that are opened before their time, at most."""


class PieceReading:
    """One piece being read.

    Args:
        open: reads it.
        shard: that it is of.
        piece: the part of the shard.
    """

    def __init__(self, open: Open, shard: Shard, piece: Piece) -> None:
        self.piece = piece
        self.found: deque[Located] = deque()
        """Samples that were read and not taken."""
        self.bad: deque[ShardError] = deque()
        """Bad samples before, among and behind them; they come with the list that has the samples around them."""
        self._told: list[ShardError] = []
        self._stream = open(shard, piece, self._told.append)
        self._begun: asyncio.Task[list[Located]] | None = None

    def begin(self) -> None:
        """Read the first samples, before anybody asks for them."""
        self._begun = asyncio.ensure_future(anext(self._stream))
        self._begun.add_done_callback(_heard)

    async def more(self) -> None:
        """Read on: `found` and `bad` have more afterwards.

        Raises:
            StopAsyncIteration: the piece is read.
            Exception: it cannot be read on.
        """
        begun, self._begun = self._begun, None
        try:
            self.found.extend(await (anext(self._stream) if begun is None else begun))
        finally:  # not before: those of a list that is read ahead must not overtake its samples
            self.bad.extend(self._told)
            self._told.clear()

    async def aclose(self) -> None:
        """Stop reading."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.cancel()
            await asyncio.wait([begun])
        await self._stream.aclose()


def _heard(begun: asyncio.Future[list[Located]]) -> None:
    """What it raised comes at its place, or is nobody's business."""
    if not begun.cancelled():
        begun.exception()


class LookAhead:
    """Readings of the pieces behind the present one, in order.

    Args:
        shards: the catalogue that pieces refer to.
        open: reads a piece.
        enough: bytes behind the present place that are open; no further piece is opened then. Of pieces whose sizes are
            not known, one is open behind the present one.
    """

    def __init__(self, shards: Sequence[Shard], open: Open, enough: int) -> None:
        self._shards = shards
        self._open = open
        self._enough = enough
        self._readings: deque[PieceReading] = deque()

    def look(self, present: Piece, behind: Iterable[Piece]) -> None:
        """Open what may be opened of the pieces behind the present one; those that are open are the first of them."""
        near = self._bytes(present) or 0
        for number, piece in enumerate(behind):
            if number == LOOK_AHEAD or near >= self._enough:
                return
            size = self._bytes(piece)
            near += self._enough if size is None else size
            if number == len(self._readings):
                reading = PieceReading(self._open, self._shards[piece.shard], piece)
                reading.begin()
                self._readings.append(reading)

    def open(self, piece: Piece) -> PieceReading:
        """The reading of the next piece: the first that was opened, or a new one."""
        if self._readings and self._readings[0].piece == piece:
            return self._readings.popleft()
        return PieceReading(self._open, self._shards[piece.shard], piece)

    async def aclose(self) -> None:
        """Stop reading."""
        async with contextlib.AsyncExitStack() as stack:  # all of them, whatever one raises
            while self._readings:
                stack.push_async_callback(self._readings.pop().aclose)

    def _bytes(self, piece: Piece) -> int | None:
        return bytes_left(self._shards[piece.shard], piece)
