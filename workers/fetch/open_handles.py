"""Opens and closes the objects of one resource in one worker, for any number of threads or tasks.

Data path: worker: [open_handles] in the dataset's code. `HandleTable` decides what is kept; here it is opened and
closed, in the user's thread or task, and outside any lock.

Objects are never shared over a fork: the child opens its own. Those of its parent it must not even free, because their
finalizers would act on files, threads and connections that are the parent's.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from asyncloader.errors import warn_aside
from asyncloader.process_hooks import at_exit, in_forked_child
from asyncloader.shielding import shielded
from asyncloader.workers.fetch.error_notes import add_note, index_text
from asyncloader.workers.fetch.handle_table import Handle, HandleTable
from asyncloader.workers.memory.live_objects import LiveObjects

R = TypeVar("R")


class Handles(ABC, Generic[R]):
    """The open objects of one resource in one scope.

    A garbage generator gives its object back wherever the collector runs, perhaps in the middle of a change of the
    table, in the same thread. So giving back, and the end, wait for no lock: they leave a note, which the holder
    of the lock reads after it has released the lock.
    """

    def __init__(self, open: Callable[[Any], Any], close: Callable[[Any], Any] | None, max: int, shared: bool) -> None:
        self._open, self._close = open, close
        self._shared = shared
        self._table: HandleTable[R] = HandleTable(max, shared=shared)
        self._lock = threading.Lock()
        self._returned: deque[Handle[R]] = deque()
        self._inherited = False
        in_forked_child(_leave_all)
        _all.add(self)

    @property
    def over(self) -> bool:
        """Whether others are to be used in place of these."""
        return self._inherited

    @abstractmethod
    def close(self) -> None:
        """End: close all objects, those in use when they are given back. See `ResourceScope.close`."""

    def closings(self) -> list[asyncio.Task[None]]:
        """Return the tasks that close objects now."""
        return []

    def leave_to_parent(self) -> None:
        """In a forked child: forget all objects, without freeing them here."""
        self._inherited = True
        _left_in_parent.append((self._table, self._returned))
        self._table = HandleTable(self._table.most, shared=self._shared)
        self._lock = threading.Lock()  # the old one may be held by a thread that does not exist here
        self._returned = deque()

    def _take(self, key: Hashable, user: Any) -> tuple[Handle[R], list[Handle[R]], bool]:
        """Return an object for this key, the objects to close, and whether the caller must open it."""
        with self._lock:
            expired = self._take_returned()
            handle = self._table.take(key)
            if handle is not None:
                return handle, expired, False
            handle, more = self._table.reserve(key, user, self._event() if self._shared else None)
            return handle, expired + more, True

    @abstractmethod
    def _event(self) -> Any: ...

    def _take_returned(self) -> list[Handle[R]]:
        expired: list[Handle[R]] = []
        while self._returned:
            expired += self._table.give_back(self._returned.popleft())
        return expired + self._table.excess()

    def _settle(self) -> list[Handle[R]]:
        """Carry out the notes that were left, unless another thread has the lock: it will. Returns the objects to
        close.
        """
        expired: list[Handle[R]] = []
        while (self._returned or (self._ended and self._table.idle)) and self._lock.acquire(blocking=False):
            try:
                expired += self._take_returned()
            finally:
                self._lock.release()
        return expired

    @property
    def _ended(self) -> bool:
        return not self._table.most

    def _give_back(self, handle: Handle[R]) -> list[Handle[R]]:
        self._returned.append(handle)
        return self._settle()

    def _opened(self, handle: Handle[R], value: Any) -> None:
        handle.value, handle.opener = value, None
        if handle.ready is not None:
            handle.ready.set()

    def _failed(self, handle: Handle[R]) -> None:
        """Forget an object that could not be opened; each waiting user tries for itself."""
        with self._lock:
            self._table.remove(handle)
        handle.opener = None
        if handle.ready is not None:
            handle.ready.set()

    def _is_open(self, handle: Handle[R]) -> bool:
        return handle in self._table.every

    def _note(self, error: BaseException, handle: Handle[R]) -> None:
        add_note(error, f"while opening {index_text(handle.key)} by {name_of(self._open)}")

    def _closer(self, handle: Handle[R], names: tuple[str, ...]) -> Callable[[], Any] | None:
        if self._close is not None:
            close, value = self._close, handle.value
            return lambda: close(value)
        return next((found for name in names if callable(found := getattr(handle.value, name, None))), None)

    def _warn(self, error: Exception, handle: Handle[R]) -> None:
        warn_aside(
            f"closing {index_text(handle.key)}, which {name_of(self._open)} had opened, raised "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _own_wait(self, handle: Handle[R]) -> RuntimeError:
        return RuntimeError(
            f"{name_of(self._open)}({index_text(handle.key)}) uses the resource that it opens an object of, with the "
            "same key: with shared=True it would wait for itself"
        )


class SyncHandles(Handles[R]):
    """Objects that are opened and closed by plain functions, in any thread."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        at_exit(_close_all)

    def acquire(self, key: Hashable) -> Handle[R]:
        """Return the open object of this key, for one user more.

        Raises:
            Exception: what `open` raised.
        """
        while True:
            user = threading.get_ident()
            handle, expired, mine = self._take(key, user)
            try:
                self._close_each(expired + self._settle())
                if mine:
                    self._opened(handle, self._call_open(handle))
                    return handle
                if handle.opener is not None:
                    if handle.opener == user:
                        raise self._own_wait(handle)
                    handle.ready.wait()
                if self._is_open(handle):
                    return handle
            except BaseException:
                if mine:
                    self._failed(handle)
                else:
                    self.release(handle)
                raise
            self.release(handle)

    def release(self, handle: Handle[R]) -> None:
        """Give an object back."""
        self._close_each(self._give_back(handle))

    def close(self) -> None:
        """End: close the objects that are not in use, and the rest when they are given back."""
        self._table.most = 0  # first: the holder of the lock reads it after the release
        self._close_each(self._settle())

    def _event(self) -> threading.Event:
        return threading.Event()

    def _call_open(self, handle: Handle[R]) -> Any:
        try:
            value = self._open(handle.key)
        except BaseException as error:
            self._note(error, handle)
            raise
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python would warn that it was never awaited
            raise TypeError(
                f"{name_of(self._open)} returned a coroutine, but is no `async def` function itself: give "
                "worker_resource an `async def`"
            )
        return value

    def _close_each(self, expired: list[Handle[R]]) -> None:
        for handle in expired:
            try:
                close = self._closer(handle, ("close",))
                if close is not None:
                    close()
            except Exception as error:
                self._warn(error, handle)


class AsyncHandles(Handles[R]):
    """Objects that are opened or closed by coroutine functions, in tasks of one loop."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self._loop = asyncio.get_running_loop()
        self._closings: set[asyncio.Task[None]] = set()

    @property
    def over(self) -> bool:
        """Whether others are to be used in place of these, because their loop has ended, and they with it."""
        return self._inherited or self._loop.is_closed()

    async def acquire(self, key: Hashable) -> Handle[R]:
        """Return the open object of this key, for one user more; see `SyncHandles.acquire`.

        Raises:
            RuntimeError: they belong to another loop, which still runs.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"the objects of {name_of(self._open)} belong to another event loop, which still runs: make a resource "
                "for each loop"
            )
        while True:
            user = asyncio.current_task()
            handle, expired, mine = self._take(key, user)
            try:
                for closing in self._start_closing(expired + self._settle()):
                    await shielded(closing)
                if mine:
                    self._opened(handle, await self._call_open(handle))
                    return handle
                if handle.opener is not None:
                    if handle.opener is user:
                        raise self._own_wait(handle)
                    await handle.ready.wait()
                if self._is_open(handle):
                    return handle
            except BaseException:
                if mine:
                    self._failed(handle)
                else:
                    self.release(handle)
                raise
            self.release(handle)

    def release(self, handle: Handle[R]) -> list[asyncio.Task[None]]:
        """Give an object back, in any thread. Returns the tasks that close objects; none in another thread, which has
        the loop start them.
        """
        expired = self._give_back(handle)
        return self._start_closing(expired) if expired else []

    def close(self) -> None:
        """Begin to end, without waiting."""
        self._table.most = 0
        self._start_closing(self._settle())

    def closings(self) -> list[asyncio.Task[None]]:
        """Return the tasks that close objects now."""
        return list(self._closings)

    def _event(self) -> asyncio.Event:
        return asyncio.Event()

    async def _call_open(self, handle: Handle[R]) -> Any:
        try:
            value = self._open(handle.key)
            return await value if inspect.isawaitable(value) else value
        except BaseException as error:
            self._note(error, handle)
            raise

    def _start_closing(self, expired: list[Handle[R]]) -> list[asyncio.Task[None]]:
        if not expired or self._loop.is_closed():
            return []
        if asyncio._get_running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._start_closing, expired)
            return []
        tasks = [self._loop.create_task(self._close_one(handle)) for handle in expired]
        self._closings.update(tasks)
        for task in tasks:
            task.add_done_callback(self._closings.discard)
        return tasks

    async def _close_one(self, handle: Handle[R]) -> None:
        try:
            close = self._closer(handle, ("aclose", "close"))
            closing = None if close is None else close()
            if inspect.isawaitable(closing):
                await closing
        except Exception as error:
            self._warn(error, handle)


def close_all_of(every: Iterable[Handles[Any]]) -> None:
    """End all of these."""
    for handles in every:
        handles.close()


def name_of(function: Any) -> str:
    """Return a function's name, for texts."""
    return getattr(function, "__qualname__", None) or repr(function)


# ------------------------------------------------------------------------------------------------- forks, and exit

_all: LiveObjects[Handles[Any]] = LiveObjects()
_left_in_parent: list[object] = []


def _leave_all() -> None:
    """In a forked child: leave all open objects to the parent."""
    for handles in _all:
        handles.leave_to_parent()


def _close_all() -> None:
    """At exit: close the objects that are not in use."""
    close_all_of([each for each in _all if isinstance(each, SyncHandles)])
