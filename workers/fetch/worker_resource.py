"""Keeps handles and decoders that a process has opened, up to a number of them, for the samples that need them next.

Data path: worker: [worker_resource] in the dataset's code.

A resource is an attribute of the dataset, and travels with it to the workers, without the open objects. What is opened
belongs to the process that opened it, and if it is asynchronous to the event loop. The objects that are not in use are
closed when a worker ends, or without workers an iterator: whoever needs them after that opens them anew.

Objects are never shared over a fork: the child opens its own. Those of its parent it must not even free, because their
finalizers would act on files, threads and connections that are the parent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable
from typing import Any, Generic, TypeVar, cast, overload

from asyncloader.base.bridge import in_thread
from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.process_hooks import at_exit
from asyncloader.base.shielding import shielded
from asyncloader.errors import warn_aside
from asyncloader.workers.fetch.error_notes import add_note, index_text
from asyncloader.workers.fetch.plain_calls import is_awaited
from asyncloader.workers.fetch.sample import run_blocking

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

CLOSE_SECONDS = 1.5
"""How long the end of an asynchronous worker waits for ``async`` closes: as long as for `__aexit__`."""


@overload
def worker_resource(  # type: ignore[overload-overlap]
    open: Callable[[K], Coroutine[Any, Any, R]],
    close: Callable[[R], Any] | None = None,
    max: int = 16,
) -> AsyncWorkerResource[K, R]: ...


@overload
def worker_resource(
    open: Callable[[K], R],
    close: Callable[[R], Any] | None = None,
    max: int = 16,
) -> WorkerResource[K, R]: ...


def worker_resource(
    open: Callable[[K], Any], close: Callable[[Any], Any] | None = None, max: int = 16, *, shared: bool = False
) -> Any:
    """Keep a bounded number of open files, decoders or connections in each worker, opened on first use by key.

        self.videos = worker_resource(open_video, max=8)   # in the dataset's __init__
        with self.videos(path) as video: ...               # in __getitem__

    An object has one user at a time, and is open until `max` others were used more recently; it is closed at the
    worker's end at the latest. It is never closed while it is in use: where more than `max` are in use, so many are
    open. It can be pickled and copied with the dataset, without the open objects, and a forked process opens its own.

    Args:
        open: called with the key; an ``async def`` for datasets whose samples are awaited, which write ``async with``.
            With spawned workers it must be picklable, as the dataset.
        close: called with the object, and awaited if it is asynchronous; None: the object's own ``aclose`` (if `open`
            is asynchronous) or ``close``, if it has one. What it raises is a `RuntimeWarning`.
        max: objects to keep open in each process, at least 1.
        shared: is gone; True is an error.

    Raises:
        ValueError: `max` is less than 1.
        TypeError: `open` or `close` cannot be called, or `shared` is given.
    """
    for name, function in (("open", open), ("close", close)):
        if not callable(function) and not (name == "close" and function is None):
            raise TypeError(f"{name} must be a function, not {function!r}")
    if isinstance(max, bool) or not isinstance(max, int) or max < 1:
        raise ValueError(f"max must be a number of objects, at least 1, not {max!r}")
    if shared:
        raise TypeError(
            "worker_resource() no longer takes shared=True: open what all samples of a process may share once, in "
            "worker_init_fn, in the dataset's __aenter__, or at the first sample"
        )
    kind: Any = AsyncWorkerResource if is_awaited(open) or is_awaited(close) else WorkerResource
    return kind(open, close, max)


class _Handle(Generic[R]):
    """An object, or the place of one that is to be opened."""

    __slots__ = ("is_open", "key", "period", "value")

    def __init__(self, key: Hashable) -> None:
        self.key, self.is_open, self.period = key, False, 0
        self.value: R | None = None


class _Table(Generic[R]):
    """The open objects of one resource in one process, or in one of its event loops.

    A garbage generator gives its object back wherever the collector runs, perhaps in the middle of a change, in the
    same thread. So giving back, and the end, wait for no lock: they leave a note, which the holder of the lock reads
    after it has released the lock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None, most: int) -> None:
        self.loop, self.pid = loop, os.getpid()
        self.closings: set[asyncio.Task[None]] = set()
        """The tasks that close objects now."""
        self._most, self._open = most, 0
        self._period = self._swept = 0  # objects of an earlier period are closed when they are given back
        self._lock = threading.Lock()
        self._idle: list[_Handle[R]] = []  # the least recently used first
        self._returned: deque[_Handle[R]] = deque()

    def take(self, key: Hashable) -> tuple[_Handle[R], list[_Handle[R]]]:
        """Return an object of this key, or the place for a new one, and the objects to close before it is opened."""
        with self._lock:
            expired = self._sweep()
            at = next((at for at in reversed(range(len(self._idle))) if self._idle[at].key == key), -1)
            handle = _Handle[R](key) if at < 0 else self._idle.pop(at)
            handle.period = self._period
            if at < 0:
                self._open += 1
                expired += self._sweep()
        return handle, expired + self.settle()

    def give(self, handle: _Handle[R]) -> list[_Handle[R]]:
        """Give an object back, in any thread. Returns the objects to close."""
        if self.pid != os.getpid():
            _left_in_parent.append(handle)
            return []
        self._returned.append(handle)
        return self.settle()

    def settle(self) -> list[_Handle[R]]:
        """Carry out the notes that were left, unless another thread has the lock: it will. Returns the objects to
        close.
        """
        expired: list[_Handle[R]] = []
        while (self._returned or self._swept != self._period) and self._lock.acquire(blocking=False):
            try:
                expired += self._sweep()
            finally:
                self._lock.release()
        return expired

    def end(self) -> list[_Handle[R]]:
        """Return the objects that are not in use, to be closed. The others are closed when they are given back."""
        self._period += 1  # the holder of the lock reads it after the release
        return self.settle() if self.pid == os.getpid() else []

    def _sweep(self) -> list[_Handle[R]]:
        """With the lock: note what was given back. Returns the objects to close."""
        self._swept = self._period
        while self._returned:
            handle = self._returned.popleft()
            if handle.is_open:
                self._idle.append(handle)
            else:  # opening it failed
                self._open -= 1
        expired = [each for each in self._idle if each.period != self._period]
        self._idle = [each for each in self._idle if each.period == self._period]
        while self._idle and self._open - len(expired) > self._most:
            expired.append(self._idle.pop(0))
        self._open -= len(expired)
        return expired


class _Resource(Generic[K, R]):
    _awaits: bool
    """Whether the objects are opened or closed by coroutine functions."""

    def __init__(self, open: Callable[[K], Any], close: Callable[[R], Any] | None, max: int) -> None:
        self._options = open, close, max
        self._name: str = getattr(open, "__qualname__", None) or repr(open)
        self.tables: dict[tuple[int, asyncio.AbstractEventLoop | None], _Table[R]] = {}

    def __reduce__(self) -> Any:
        return type(self), self._options

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._name}, max={self._options[2]}>"

    def _table(self, loop: asyncio.AbstractEventLoop | None) -> _Table[R]:
        """Return the objects of this process; in this loop, if they are asynchronous."""
        pid = os.getpid()
        found = self.tables.get((pid, loop))
        if found is None:
            # Those of loops that are closed, and of the process that this is a fork of.
            for key in [key for key in list(self.tables) if key[0] != pid or (key[1] and key[1].is_closed())]:
                before = self.tables.pop(key, None)
                if key[0] != pid:
                    _left_in_parent.append(before)
            at_exit(close_idle)
            _all.add(self)
            # Two threads may come at the same time.
            found = self.tables.setdefault((pid, loop), _Table(loop, self._options[2]))
        return found

    async def _opened(self, key: K) -> Any:
        try:
            value = self._options[0](key)
            if not inspect.isawaitable(value):
                return value
            if self._awaits:
                return await value
            if inspect.iscoroutine(value):
                value.close()  # otherwise Python would warn that it was never awaited
                raise TypeError(
                    f"{self._name} returned a coroutine, but is no `async def` function itself: give worker_resource "
                    "an `async def`"
                )
        except BaseException as error:
            add_note(error, f"while opening {index_text(key)} by {self._name}")
            raise
        return value

    async def _close_one(self, handle: _Handle[R]) -> None:
        try:
            close = self._options[1]
            if close is not None:
                closing = close(cast("R", handle.value))
            else:
                own = (getattr(handle.value, name, None) for name in ("aclose", "close")[not self._awaits :])
                closing = next(filter(callable, own), _nothing)()
            if self._awaits and inspect.isawaitable(closing):
                await closing
        except Exception as error:
            warn_aside(
                f"closing {index_text(handle.key)}, which {self._name} had opened, raised "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )

    def close_each(self, table: _Table[R], expired: list[_Handle[R]]) -> list[asyncio.Task[None]]:
        """Close these objects. Returns the tasks that do it, in the loop's thread; any other has the loop do it."""
        loop = table.loop
        if loop is None:
            for handle in expired:
                run_blocking(self._close_one(handle))
        elif expired and not loop.is_closed():
            if asyncio._get_running_loop() is loop:
                tasks = [loop.create_task(self._close_one(handle)) for handle in expired]
                table.closings.update(tasks)
                for task in tasks:
                    task.add_done_callback(table.closings.discard)
                return tasks
            loop.call_soon_threadsafe(self.close_each, table, expired)
        return []


class WorkerResource(_Resource[K, R]):
    """Objects that are opened by plain functions. Made by `worker_resource`."""

    _awaits = False

    @contextlib.contextmanager
    def __call__(self, key: K) -> Generator[R]:
        """Return a context with an open object of this key, which is not closed within it. Any thread.

        Raises (on entering):
            Exception: what `open` raised, with a note that names the key.
        """
        table = self._table(None)
        handle, expired = table.take(key)
        try:
            self.close_each(table, expired)
            if not handle.is_open:
                handle.value = run_blocking(self._opened(key))
                handle.is_open = True
            yield cast("R", handle.value)
        finally:
            self.close_each(table, table.give(handle))


class AsyncWorkerResource(_Resource[K, R]):
    """Objects that are opened or closed by coroutine functions. Made by `worker_resource`."""

    _awaits = True

    @contextlib.asynccontextmanager
    async def __call__(self, key: K) -> AsyncGenerator[R]:
        """Return an asynchronous context with an open object of this key, which is not closed within it.

        Raises (on entering):
            Exception: what `open` raised, with a note that names the key.
        """
        table = self._table(asyncio.get_running_loop())
        handle, expired = table.take(key)
        try:
            for closing in self.close_each(table, expired):
                await shielded(closing)
            if not handle.is_open:
                handle.value = await self._opened(key)
                handle.is_open = True
            yield cast("R", handle.value)
        finally:
            closings = self.close_each(table, table.give(handle))
            # A coroutine that is dropped, by the collector above all, can wait for nothing: the loop closes them.
            for closing in closings if not isinstance(sys.exception(), GeneratorExit) else ():
                await shielded(closing)


def _nothing() -> None:
    """Close an object that has no method for it: it is dropped."""


# ------------------------------------------------------------------------- the ends of workers, iterators and processes

_all: LiveObjects[_Resource[Any, Any]] = LiveObjects()
_left_in_parent: list[object] = []


def any_open() -> bool:
    """Whether any resource was used in this process."""
    return any(True for _ in _all)


def close_idle(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Close the objects that are not in use, and have each other closed when it is given back. Waits for no lock, but
    for the user's `close`; of asynchronous objects, those of this loop, it begins the closing.
    """
    for resource in _all:
        for table in list(resource.tables.values()):
            if table.loop is loop:
                resource.close_each(table, table.end())


async def aclose_idle(stream: Any) -> None:
    """`close_idle`, of the asynchronous objects of this loop, too. Each step takes `CLOSE_SECONDS` at most.

    Args:
        stream: the iterator that is read, if any. A generator may have stopped where it uses an object.
    """
    if not any_open():
        return
    if isinstance(stream, AsyncGenerator):
        ending = asyncio.ensure_future(stream.aclose())
        await asyncio.wait([ending], timeout=CLOSE_SECONDS)
        if ending.done() and not ending.cancelled():
            ending.exception()  # marked as retrieved: the dataset is not read any more
        ending.cancel()
    await in_thread(close_idle)
    loop = asyncio.get_running_loop()
    close_idle(loop)
    tables = [table for resource in _all for table in list(resource.tables.values()) if table.loop is loop]
    pending = [task for table in tables for task in table.closings]
    if pending:
        await asyncio.wait(pending, timeout=CLOSE_SECONDS)
    for task in pending:
        task.cancel()
