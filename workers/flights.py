"""Samples in flight: coroutines of several batches, a bounded number of them at a time.

Data path: worker: async_fetch -> [flights] -> collate -> codec -> ring. Also without workers, on the consumer's loop.

The bound is over all batches together, and the oldest batch's samples start first: a sample that takes long occupies
one place, while those of its batch and of the next ones come and go. A sample's task is made when there is a place for
it, in a context of its own; there is no wrapper around it, no group and no semaphore, each of which would cost as much
as the task.

Everything here runs in one loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any

__all__ = ["Flights"]


class Flights:
    """Starts samples as there is room for them.

    Args:
        room: samples in flight at a time, at least 1.
    """

    __slots__ = ("_line", "_room")

    def __init__(self, room: int) -> None:
        self._room = room
        self._line: deque[_Batch] = deque()  # batches with samples that have not started

    async def fly(
        self,
        start: Callable[[int, Context], Coroutine[Any, Any, Any]],
        count: int,
        failed: Callable[[int, BaseException], None] | None = None,
    ) -> list[Any]:
        """The results of ``start(0, context)`` to ``start(count - 1, context)``, in this order.

        Args:
            start: gives the coroutine of one sample, which then runs in `context`. Not called for samples that an
                earlier failure, or cancellation, makes superfluous.
            count: how many.
            failed: told of the sample whose error is about to be raised.

        Raises:
            Exception: the first sample's, by time, that raised. The others are cancelled, and have ended by then.
        """
        if not count:
            return []
        batch = _Batch(self, asyncio.get_running_loop(), start, count)
        self._line.append(batch)
        self._launch()
        try:
            await batch.done
        except asyncio.CancelledError:
            batch.cancel()
            while batch.flying:  # their `finally` blocks belong to this call
                batch.done = batch.loop.create_future()
                try:
                    await batch.done
                except asyncio.CancelledError:
                    batch.cancel()
            raise
        finally:
            batch.start = _nothing  # it refers to the caller's frame
        error = batch.error
        if error is None:
            return [task.result() for task in batch.tasks]
        if failed is not None:
            failed(batch.failed, error)
        try:
            raise error
        finally:
            del error, batch  # they refer to this frame

    def _launch(self) -> None:
        line = self._line
        while self._room and line:
            batch = line[0]
            self._room -= 1
            batch.launch()
            if len(batch.tasks) >= batch.count:
                line.popleft()

    def _landed(self) -> None:
        self._room += 1
        if self._line:
            self._launch()

    def _forget(self, batch: _Batch) -> None:
        if batch in self._line:
            self._line.remove(batch)


class _Batch:
    __slots__ = ("context", "count", "done", "error", "failed", "flights", "flying", "loop", "over", "start", "tasks")

    def __init__(
        self,
        flights: Flights,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[int, Context], Coroutine[Any, Any, Any]],
        count: int,
    ) -> None:
        self.flights = flights
        self.loop = loop
        self.start = start
        self.count = count
        self.context = copy_context()  # a task may be made when another batch's sample lands, in that one's context
        self.tasks: list[asyncio.Task[Any]] = []
        self.flying = 0
        self.over = False  # no more results are wanted: one has failed, or the caller was cancelled
        self.done: asyncio.Future[None] = loop.create_future()
        self.error: BaseException | None = None
        self.failed = -1

    def launch(self) -> None:
        """Start the next sample. There is room for it."""
        context = self.context.copy()
        item = len(self.tasks)
        try:
            coroutine = self.start(item, context)
        except Exception as error:
            coroutine = _raising(error)
        task = self.loop.create_task(coroutine, context=context)
        self.tasks.append(task)
        self.flying += 1
        task.add_done_callback(self.landed, context=self.context)

    def landed(self, task: asyncio.Task[Any]) -> None:
        self.flying -= 1
        if task.cancelled():
            if not self.over:
                self.fail(task, RuntimeError("the sample's code cancelled itself, or let what it awaited be cancelled"))
        elif (error := task.exception()) is not None and not self.over:
            if isinstance(error, StopAsyncIteration):  # it would pass for the end of all batches
                wrapped = RuntimeError("the sample's code raised StopAsyncIteration")
                wrapped.__cause__ = error
                error = wrapped
            self.fail(task, error)
        if not self.flying and len(self.tasks) >= self.count and not self.done.done():
            self.done.set_result(None)
        self.flights._landed()

    def fail(self, task: asyncio.Task[Any], error: BaseException) -> None:
        self.failed, self.error = self.tasks.index(task), error
        self.cancel()

    def cancel(self) -> None:
        """Start no more of its samples, and cancel those in flight."""
        self.over, self.count = True, 0
        self.flights._forget(self)
        for task in self.tasks:
            if not task.done():
                task.cancel()


def _nothing(item: int, _: Context) -> Coroutine[Any, Any, Any]:
    raise AssertionError(f"sample {item} of a batch that is over")


async def _raising(error: Exception) -> Any:
    try:
        raise error
    finally:
        del error  # it refers to this frame
