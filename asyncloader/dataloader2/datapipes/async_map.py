"""The form `amap`, and datapipes that define ``__aiter__``: coroutines in a graph that is read by a plain ``for``.

Data path: graph -> [async_map: event loop in a thread, calls in flight] -> graph.

The event loop has a thread (`base.bridge`) as long as the datapipe is read, in the main process or in a worker.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from asyncloader.base.bridge import Bridge
from asyncloader.dataloader2.graph.utils import DataPipe, end_of, parts_of, replace_dp, traverse_dps

_END = object()


def needs_await(datapipe: Any) -> bool:
    """Whether a datapipe can only be read with ``async for``: it defines ``__aiter__`` and no ``__iter__``."""
    kind = type(datapipe)
    return hasattr(kind, "__aiter__") and getattr(kind, "__iter__", None) is IterDataPipe.__iter__


def await_parts(datapipe: DataPipe) -> DataPipe:
    """Put an `Awaited` after each part that can only be read with ``async for``. Returns the end of the graph."""
    parts = parts_of(datapipe)
    readers = {id(each.source_datapipe) for each in parts if isinstance(each, Awaited)}
    for part in parts:
        if needs_await(part) and id(part) not in readers:
            datapipe = end_of(replace_dp(traverse_dps(datapipe), part, Awaited(part)))
    return datapipe


class Awaited(IterDataPipe[Any]):
    """Lets a plain ``for`` read a datapipe that defines ``__aiter__``. `DataLoader2` adds it where it is needed.

    Args:
        source_datapipe: is awaited item by item, in the loop's thread.
    """

    def __init__(self, source_datapipe: Any) -> None:
        self.source_datapipe = source_datapipe

    def __iter__(self) -> Iterator[Any]:
        exiting = sys.is_finalizing
        bridge = Bridge()
        bridge.acquire()
        try:
            iterator: AsyncIterator[Any] = bridge.run(_begin(self.source_datapipe))
            try:
                while (item := bridge.run(_next(iterator))) is not _END:
                    yield item
            finally:
                # An interpreter that is exiting has stopped the loop's thread: waiting for it would never end. And a
                # forked child has no such thread.
                if not exiting() and bridge.running:
                    bridge.run(_close(iterator))
        finally:
            if not exiting():
                bridge.release()

    def __len__(self) -> int:
        return len(self.source_datapipe)


async def _begin(source: Any) -> AsyncIterator[Any]:
    return aiter(source)


async def _next(iterator: AsyncIterator[Any]) -> Any:
    try:
        return await anext(iterator, _END)
    except asyncio.CancelledError as error:  # of the user's code: it would look like a cancellation of the reader
        raise RuntimeError("a datapipe's `__aiter__` raised CancelledError") from error


async def _close(iterator: Any) -> None:
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


class AsyncMapper(IterDataPipe[Any]):
    """Form ``amap``. Awaits a coroutine function for each item, several calls at a time; results in the items' order.

    An error of a call is raised where its result would have come.

    Args:
        datapipe: is read in the reader's thread, at most `concurrency` items ahead.
        fn: coroutine function of one item.
        concurrency: calls in flight at a time, from 1; default 16.

    Raises:
        ValueError: the concurrency is less than 1.
    """

    def __init__(self, datapipe: Any, fn: Callable[[Any], Awaitable[Any]], concurrency: int = 16) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self.datapipe = datapipe
        self.fn = fn
        self.concurrency = concurrency

    def __iter__(self) -> Iterator[Any]:
        bridge = Bridge()
        bridge.acquire()
        exiting = sys.is_finalizing
        calls: deque[asyncio.Task[Any]] = deque()
        failure: Exception | None = None
        try:
            items = iter(self.datapipe)  # here, because it may raise
            while True:
                try:
                    item = next(items)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error  # raised below, after the results of the items before it
                    break
                calls.append(bridge.run(_start(self.fn, item)))
                if len(calls) >= self.concurrency:
                    yield bridge.run(_wait_for(calls.popleft()))
            while calls:
                yield bridge.run(_wait_for(calls.popleft()))
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback refers to this frame
            calls.clear()
            if not exiting():  # as in `Awaited`
                bridge.release()  # cancels the calls in flight

    def __len__(self) -> int:
        return len(self.datapipe)


async def _start(fn: Callable[[Any], Awaitable[Any]], item: Any) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(_call(fn, item))
    task.add_done_callback(_retrieve_error)
    return task


async def _call(fn: Callable[[Any], Awaitable[Any]], item: Any) -> Any:
    made: Any = fn(item)
    if not inspect.isawaitable(made):
        raise TypeError(f"`amap` needs a coroutine function, and {fn!r} returned {type(made).__name__}: use `map`")
    return await made


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    # asyncio logs an error that no code has retrieved, and the reader may stop before the turn of this call.
    if not task.cancelled():
        task.exception()


async def _wait_for(task: asyncio.Task[Any]) -> Any:
    # Not ``await task``: a CancelledError of the call would then cancel this coroutine.
    await asyncio.wait([task])
    if task.cancelled():
        raise RuntimeError("a call of `amap` raised CancelledError")
    return task.result()
