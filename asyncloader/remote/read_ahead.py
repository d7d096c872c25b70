"""The bytes of one stream, fetched ahead of whoever parses them. Data path: transport -> [read-ahead] -> reader.

One task reads while the consumer parses, so the network does not wait for the CPU. What was read and not taken yet is
bounded in bytes. The task ends with the stream or with `aclose`, never later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

__all__ = ["ReadAhead"]


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
