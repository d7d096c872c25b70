"""Pieces being read: the one that samples are taken from, and those behind it, whose first bytes are on their way.

Data path: lease -> [piece_reading: reading, look-ahead] -> lane. Opening a shard takes a round trip or two; a lane that
opened the next one only when it needed it would wait that long at the end of each.

The bytes of one stream, fetched ahead of whoever parses them. Data path: transport -> [read-ahead] -> reader.

One task reads while the consumer parses, so the network does not wait for the CPU. What was read and not taken yet is
bounded in bytes. The task ends with the stream or with `aclose`, never later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

from asyncloader.formats import Located, OnBad, ShardError
from asyncloader.remote.catalog import Piece, Shard, bytes_left

__all__ = [
    "LOOK_AHEAD",
    "LookAhead",
    "Open",
    "PieceReading",
    "ReadAhead",
]

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


class ReadAhead:
    """Begins at once to read `stream`, on the running loop; for one consumer, who calls `aclose` in the end.

    Args:
        stream: what to read; it is closed here.
        most: bytes that may lie here, at least 1; one chunk more may be on its way.
        wanted: bytes that the consumer needs in any case. Beyond them a chunk is fetched only when it is asked for.
            None: the whole stream is wanted.
    """

    def __init__(self, stream: AsyncGenerator[bytes, None], *, most: int, wanted: int | None = None) -> None:
        if most < 1:
            raise ValueError(f"read_ahead must be at least 1 byte, got {most}")
        self._most = most
        self._wanted = wanted
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._read = 0
        self._asked = False  # the consumer waits for a chunk
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run(stream), name="asyncloader-read-ahead")
        self._task.add_done_callback(lambda _: self._news.set())

    @property
    def held(self) -> int:
        """Bytes that were read and not taken yet."""
        return self._held

    async def next(self) -> bytes | None:
        """Give the next chunk, None at the end of the stream.

        Raises:
            Exception: what the stream raised, after all the chunks before it.
        """
        while not self._chunks:
            if self._task.done():
                self._task.result()
                return None
            self._asked = True
            self._room.set()
            self._news.clear()
            await self._news.wait()
        chunk = self._chunks.popleft()
        self._held -= len(chunk)
        self._room.set()
        return chunk

    async def aclose(self) -> None:
        """End the task, close the stream, and wait until that is done; also when the caller is cancelled."""
        self._task.cancel()
        interrupted: asyncio.CancelledError | None = None
        while not self._task.done():
            try:
                await asyncio.wait([self._task])
            except asyncio.CancelledError as error:
                interrupted = error
        if not self._task.cancelled():
            self._task.exception()  # it is nobody's business any more
        self._chunks.clear()
        self._held = 0
        if interrupted is not None:
            raise interrupted

    async def _run(self, stream: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                self._chunks.append(chunk)
                self._held += len(chunk)
                self._read += len(chunk)
                self._asked = False
                self._news.set()
                while not self._may_read():
                    self._room.clear()
                    await self._room.wait()

    def _may_read(self) -> bool:
        if self._asked:
            return True
        return self._held < self._most and (self._wanted is None or self._read < self._wanted)
