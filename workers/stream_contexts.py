"""Enters the async contexts of all streams' datasets before the first sample, and exits them after the last.

Data path: worker: [stream_contexts] around fetch. Without workers it runs in the consumer's process.

Each stream has a copy of the dataset, whose `__aenter__` runs as the stream's code, as in a worker that has it alone.
All are entered at the same time: connecting takes as long as for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from asyncloader.workers.fetch.context import EXIT_SECONDS, DatasetContext


class StreamContexts(DatasetContext):
    """The contexts of several streams, which are entered and exited together.

    Args:
        contexts: that of each stream, by the stream's number.
        identify: makes the process's code that of a stream.
    """

    def __init__(
        self, contexts: Mapping[int, DatasetContext], identify: Callable[[int], AbstractContextManager[Any]]
    ) -> None:
        super().__init__(None)
        self._contexts = {stream: context for stream, context in contexts.items() if context.needed}
        self._identify = identify
        self._entered = False

    @property
    def needed(self) -> bool:
        """Whether there is anything to await."""
        return bool(self._contexts)

    @property
    def uninitialized(self) -> bool:
        """Whether `worker_init_fn` failed in one of the streams. Entering raises the same again."""
        return any(context.uninitialized for context in self._contexts.values())

    async def open(self) -> None:
        """Enter the contexts, once. If one fails, all are exited, and the next call tries again. Several tasks may wait
        here, and go on in the order in which they came.

        Raises:
            Exception: what entering the first of those that failed raised.
        """
        if not self._contexts:
            return
        # Also once they are entered: a task that comes now must not overtake those that waited.
        async with self._order:
            if self._entered:
                return
            errors = await self._each(self._open_one)
            if errors:
                await self._close_all(EXIT_SECONDS)
                try:
                    raise errors[0]
                finally:
                    errors.clear()  # they refer to this frame
            self._entered = True

    async def close(self, seconds: float = EXIT_SECONDS) -> BaseException | None:
        """Exit the contexts, at the same time. See `DatasetContext.close`."""
        self._entered = False
        return await self._close_all(seconds)

    async def _close_all(self, seconds: float) -> BaseException | None:
        found: list[BaseException | None] = []

        async def close_one(stream: int) -> None:
            found.append(await self._contexts[stream].close(seconds))

        await self._each(close_one)
        return next(filter(None, found), None)

    def close_soon(self) -> None:
        """Have the loop exit the contexts. See `DatasetContext.close_soon`."""
        for context in self._contexts.values():
            context.close_soon()

    async def _open_one(self, stream: int) -> None:
        await self._contexts[stream].open()

    async def _each(self, call: Callable[[int], Any]) -> list[BaseException]:
        """Await this for each stream, as its code, at the same time. Returns the errors."""

        async def one(stream: int) -> None:
            with self._identify(stream):
                await call(stream)

        results = await asyncio.gather(*map(one, self._contexts), return_exceptions=True)
        return [result for result in results if result is not None]
