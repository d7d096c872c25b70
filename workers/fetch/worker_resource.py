"""Keeps the handles and decoders that a worker has opened, up to a number of them, for the samples that need them next.

Data path: worker: [worker_resource] in the dataset's code.

A resource is an attribute of the dataset, and travels with it to the workers, without the open objects. Where it is
used, the current `ResourceScope` says whose they are. Each `DatasetReader` has one, which is the current one while its
dataset's code runs: what is opened then belongs to that worker, or without workers to that iterator. What is opened
outside of any loader belongs to the process.

Objects are never shared over a fork: the child opens its own. Those of its parent it must not even free, because their
finalizers would act on files, threads and connections that are the parent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar, cast, overload

from asyncloader.bridge import in_thread
from asyncloader.errors import warn_aside
from asyncloader.process_hooks import at_exit, in_forked_child
from asyncloader.shielding import shielded
from asyncloader.workers.fetch.error_notes import add_note, index_text
from asyncloader.workers.fetch.plain_calls import is_awaited
from asyncloader.workers.fetch.sample import run_blocking
from asyncloader.workers.memory.live_objects import LiveObjects

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

CLOSE_SECONDS = 1.5
"""How long the end of an asynchronous worker waits for ``async`` closes: as long as for `__aexit__`."""


@overload
def worker_resource(  # type: ignore[overload-overlap]
    open: Callable[[K], Coroutine[Any, Any, R]],
    close: Callable[[R], Any] | None = None,
    max: int = 16,
    *,
    shared: bool = False,
) -> AsyncWorkerResource[K, R]: ...


@overload
def worker_resource(
    open: Callable[[K], R],
    close: Callable[[R], Any] | None = None,
    max: int = 16,
    *,
    shared: bool = False,
) -> WorkerResource[K, R]: ...


def worker_resource(
    open: Callable[[K], Any],
    close: Callable[[Any], Any] | None = None,
    max: int = 16,
    *,
    shared: bool = False,
) -> Any:
    """Keep a bounded number of open files, decoders or connections in each worker, opened on first use by key.

        self.videos = worker_resource(open_video, max=8)   # in the dataset's __init__
        with self.videos(path) as video: ...               # in __getitem__

    An object is open until `max` others were used more recently; it is closed at the worker's end at the latest. It is
    never closed while it is in use: where more than `max` are in use, so many are open. It can be pickled and copied
    with the dataset, without the open objects, and a forked process opens its own.

    Args:
        open: called with the key; an ``async def`` for datasets whose samples are awaited, which write ``async with``.
            With spawned workers it must be picklable, as the dataset.
        close: called with the object, and awaited if it is asynchronous; None: the object's own ``aclose`` (if `open`
            is asynchronous) or ``close``, if it has one. What it raises is a `RuntimeWarning`.
        max: objects to keep open for each worker, at least 1.
        shared: several users of a key have the same object at a time. By default each has its own, as files and
            decoders with a position need: a second user of a key opens a second object.

    Raises:
        ValueError: `max` is less than 1.
        TypeError: `open` or `close` cannot be called.
    """
    for name, function in (("open", open), ("close", close)):
        if not callable(function) and not (name == "close" and function is None):
            raise TypeError(f"{name} must be a function, not {function!r}")
    if isinstance(max, bool) or not isinstance(max, int) or max < 1:
        raise ValueError(f"max must be a number of objects, at least 1, not {max!r}")
    kind: Any = AsyncWorkerResource if is_awaited(open) or is_awaited(close) else WorkerResource
    return kind(open, close, max, shared)


class _Resource(Generic[K, R]):
    def __init__(self, open: Callable[[K], Any], close: Callable[[R], Any] | None, max: int, shared: bool) -> None:
        self._options = open, close, max, shared
        self._handles: weakref.WeakKeyDictionary[ResourceScope, _Handles[R]] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), self._options

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {_name_of(self._options[0])}, max={self._options[2]}>"

    def _here(self, loop: asyncio.AbstractEventLoop | None) -> _Handles[R]:
        """Return the objects of the current scope; in this loop, if they are asynchronous."""
        scope = current_scope.get() or _OF_PROCESS
        found = self._handles.get(scope)
        if found is None or found.over:
            made = _Handles[R](loop, *self._options)
            if found is not None:
                self._handles.pop(scope, None)
            found = self._handles.setdefault(scope, made)  # two threads may come at the same time
            if found is made:
                scope.add(made)
        return found


class WorkerResource(_Resource[K, R]):
    """Objects that are opened by plain functions. Made by `worker_resource`."""

    @contextlib.contextmanager
    def __call__(self, key: K) -> Generator[R]:
        """Return a context with the open object of this key, which is not closed within it. Any thread.

        Raises (on entering):
            Exception: what `open` raised, with a note that names the key.
        """
        handles = self._here(None)
        handle = run_blocking(handles.acquire(key))
        try:
            yield cast("R", handle.value)
        finally:
            handles.release(handle)


class AsyncWorkerResource(_Resource[K, R]):
    """Objects that are opened or closed by coroutine functions. Made by `worker_resource`."""

    @contextlib.asynccontextmanager
    async def __call__(self, key: K) -> AsyncGenerator[R]:
        """Return an asynchronous context with the open object of this key, which is not closed within it.

        Raises (on entering):
            Exception: what `open` raised, with a note that names the key.
            RuntimeError: the objects belong to another event loop, which still runs.
        """
        handles = self._here(asyncio.get_running_loop())
        handle = await handles.acquire(key)
        try:
            yield cast("R", handle.value)
        finally:
            closings = handles.release(handle)
            # A coroutine that is dropped, by the collector above all, can wait for nothing: the loop closes them.
            for closing in closings if not isinstance(sys.exception(), GeneratorExit) else ():
                await shielded(closing)


class _Handle(Generic[R]):
    """One open object, or one that is being opened: `ready` is set once that is over."""

    __slots__ = ("key", "ready", "users", "value")

    def __init__(self, key: Hashable, ready: Any) -> None:
        self.key, self.ready, self.users = key, ready, 1
        self.value: R | None = None


class _Handles(Generic[R]):
    """The open objects of one resource in one scope.

    At most ``max(most, in use)`` are open at any time: an object in use is never closed, and an object that is not in
    use is closed before another is opened, or when its user gives it back, where there are too many.

    A garbage generator gives its object back wherever the collector runs, perhaps in the middle of a change, in the
    same thread. So giving back, and the end, wait for no lock: they leave a note, which the holder of the lock reads
    after it has released the lock.

    Args:
        loop: in whose tasks they are opened and closed, if they are asynchronous; None: in any threads.
        open, close, most, shared: of `worker_resource`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        open: Callable[[Any], Any],
        close: Callable[[Any], Any] | None,
        most: int,
        shared: bool,
    ) -> None:
        self.loop, self._open, self._close, self._shared = loop, open, close, shared
        self._most = most  # 0 once nothing is kept any more
        self._inherited = False
        self.closings: set[asyncio.Task[None]] = set()
        """The tasks that close objects now."""
        self._begin()
        in_forked_child(_leave_all)
        if loop is None:
            at_exit(_close_all)
        _all.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._every: set[_Handle[R]] = set()  # open, being opened, or in use
        self._idle: dict[Hashable, list[_Handle[R]]] = {}  # by key, the least recently used first
        self._common: dict[Hashable, _Handle[R]] = {}  # those that all users of a key have, if they are shared
        self._returned: deque[_Handle[R]] = deque()

    @property
    def over(self) -> bool:
        """Whether others are to be used in place of these."""
        return self._inherited or (self.loop is not None and self.loop.is_closed())

    def leave_to_parent(self) -> None:
        """In a forked child: forget all objects, without freeing them here."""
        self._inherited = True
        _left_in_parent.append((self._every, self._returned))
        self._begin()  # also another lock: the old one may be held by a thread that does not exist here

    async def acquire(self, key: Hashable) -> _Handle[R]:
        """Return the open object of this key, for one user more. Never suspends without a loop.

        Raises:
            Exception: what `open` raised.
            RuntimeError: they belong to another loop, which still runs.
        """
        if self.loop is not None and asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(
                f"the objects of {_name_of(self._open)} belong to another event loop, which still runs: make a "
                "resource for each loop"
            )
        while True:
            handle, expired, mine = self._take(key)
            try:
                for closing in self._start_closing(expired + self._settle()):
                    await shielded(closing)
                if mine:
                    handle.value = await self._call_open(key)
                    handle.ready.set()
                elif not handle.ready.is_set():
                    waiting = handle.ready.wait()
                    if self.loop is not None:
                        await waiting
                if handle in self._every:  # else it could not be opened: each waiting user tries for itself
                    return handle
            except BaseException:
                if mine:
                    self._failed(handle)
                else:
                    self.release(handle)
                raise
            self.release(handle)

    def _take(self, key: Hashable) -> tuple[_Handle[R], list[_Handle[R]], bool]:
        """Return an object for this key, the objects to close, and whether the caller must open it."""
        with self._lock:
            expired = self._take_returned()
            idle = self._idle.pop(key, [])
            found = self._common.get(key) if self._shared else idle.pop() if idle else None
            if found is not None:
                if idle and not self._shared:
                    self._idle[key] = idle
                found.users += 1
                return found, expired, False
            made = _Handle[R](key, threading.Event() if self.loop is None else asyncio.Event())
            self._every.add(made)
            if self._shared:
                self._common[key] = made
            return made, expired + self._take_returned(), True

    def _take_returned(self) -> list[_Handle[R]]:
        """With the lock: note what was given back. Returns the objects to close: those not in use, as far as there are
        too many.
        """
        while self._returned:
            handle = self._returned.popleft()
            handle.users -= 1
            # Otherwise it was opened before a fork, or opening it failed while another user waited for it.
            if not handle.users and handle in self._every:
                self._idle[handle.key] = [*self._idle.pop(handle.key, ()), handle]
        expired: list[_Handle[R]] = []
        while self._idle and len(self._every) > self._most:
            key, idle = next(iter(self._idle.items()))
            expired.append(idle.pop(0))
            self._every.discard(expired[-1])
            self._common.pop(key, None)
            if not idle:
                del self._idle[key]
        return expired

    def _settle(self) -> list[_Handle[R]]:
        """Carry out the notes that were left, unless another thread has the lock: it will. Returns the objects to
        close.
        """
        expired: list[_Handle[R]] = []
        while (self._returned or (not self._most and self._idle)) and self._lock.acquire(blocking=False):
            try:
                expired += self._take_returned()
            finally:
                self._lock.release()
        return expired

    def _failed(self, handle: _Handle[R]) -> None:
        """Forget an object that could not be opened."""
        with self._lock:
            self._every.discard(handle)
            self._common.pop(handle.key, None)
        handle.ready.set()

    def release(self, handle: _Handle[R]) -> list[asyncio.Task[None]]:
        """Give an object back, in any thread. Returns the tasks that close objects, if any were started here."""
        self._returned.append(handle)
        return self._start_closing(self._settle())

    def end(self) -> None:
        """Close the objects that are not in use, and each other when it is given back. Begins it, with a loop."""
        self._most = 0  # first: the holder of the lock reads it after the release
        self._start_closing(self._settle())

    async def _call_open(self, key: Hashable) -> Any:
        try:
            value = self._open(key)
            if self.loop is not None:
                return await value if inspect.isawaitable(value) else value
            if inspect.iscoroutine(value):
                value.close()  # otherwise Python would warn that it was never awaited
                raise TypeError(
                    f"{_name_of(self._open)} returned a coroutine, but is no `async def` function itself: give "
                    "worker_resource an `async def`"
                )
        except BaseException as error:
            add_note(error, f"while opening {index_text(key)} by {_name_of(self._open)}")
            raise
        return value

    def _start_closing(self, expired: list[_Handle[R]]) -> list[asyncio.Task[None]]:
        if self.loop is None:
            for handle in expired:
                run_blocking(self._close_one(handle))
        elif expired and not self.loop.is_closed():
            if asyncio._get_running_loop() is self.loop:
                tasks = [self.loop.create_task(self._close_one(handle)) for handle in expired]
                self.closings.update(tasks)
                for task in tasks:
                    task.add_done_callback(self.closings.discard)
                return tasks
            self.loop.call_soon_threadsafe(self._start_closing, expired)
        return []

    async def _close_one(self, handle: _Handle[R]) -> None:
        try:
            if self._close is not None:
                closing = self._close(cast("R", handle.value))
            else:
                names = ("close",) if self.loop is None else ("aclose", "close")
                own = (getattr(handle.value, name, None) for name in names)
                closing = next(filter(callable, own), _nothing)()
            if self.loop is not None and inspect.isawaitable(closing):
                await closing
        except Exception as error:
            warn_aside(
                f"closing {index_text(handle.key)}, which {_name_of(self._open)} had opened, raised "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )


class ResourceScope:
    """The open objects of one worker, or of one iterator without workers, of all its resources."""

    def __init__(self) -> None:
        # Weakly: they belong to the resources, which end with the dataset. A `close` that is a method of the dataset
        # would otherwise keep that alive.
        self._members: LiveObjects[_Handles[Any]] = LiveObjects()

    @contextlib.contextmanager
    def here(self) -> Generator[None]:
        """Context in which this scope is the current one."""
        token = current_scope.set(self)
        try:
            yield
        finally:
            current_scope.reset(token)

    def add(self, handles: _Handles[Any]) -> None:
        """Have this scope's end be theirs."""
        self._members.add(handles)

    @property
    def used(self) -> bool:
        """Whether anything was opened."""
        return any(True for _ in self._members)

    def close(self) -> None:
        """End: close the objects that are not in use, and each other when it is given back. Waits for no lock, but for
        the user's `close`. Idempotent.

        Asynchronous objects are left open: `aclose` closes them.
        """
        _end_each(self._members)

    async def aclose(self, stream: Any) -> None:
        """`close`, of asynchronous objects, too: in the loop that opened them. Each step takes `CLOSE_SECONDS` at most.

        Args:
            stream: the iterator that is read, if any. A generator may have stopped where it uses an object.
        """
        if not self.used:
            return
        if isinstance(stream, AsyncGenerator):
            ending = asyncio.ensure_future(stream.aclose())
            await asyncio.wait([ending], timeout=CLOSE_SECONDS)
            if ending.done() and not ending.cancelled():
                ending.exception()  # marked as retrieved: the dataset is not read any more
            ending.cancel()
        blocking = [each for each in self._members if each.loop is None]
        if blocking:
            await in_thread(partial(_end_each, blocking))
        self.close()
        pending = [task for handles in self._members for task in handles.closings]
        if pending:
            await asyncio.wait(pending, timeout=CLOSE_SECONDS)
        for task in pending:
            task.cancel()


_OF_PROCESS = ResourceScope()  # of code outside of any loader

current_scope: ContextVar[ResourceScope | None] = ContextVar("asyncloader_resource_scope", default=None)
"""The scope of the code that runs; None outside of any loader."""


def _end_each(every: Iterable[_Handles[Any]]) -> None:
    for handles in every:
        handles.end()


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _nothing() -> None:
    """Close an object that has no method for it: it is dropped."""


# ------------------------------------------------------------------------------------------------- forks, and exit

_all: LiveObjects[_Handles[Any]] = LiveObjects()
_left_in_parent: list[object] = []


def _leave_all() -> None:
    for handles in _all:
        handles.leave_to_parent()


def _close_all() -> None:
    _end_each([each for each in _all if each.loop is None])
