"""Keeps the handles and decoders that a worker has opened, up to a number of them, for the samples that need them next.

Data path: worker: [worker_resource] in the dataset's code.

A resource is an attribute of the dataset, and travels with it to the workers, without the open objects
(`open_handles.py`). Where it is used, the current scope says whose they are (`resource_scope.py`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Coroutine, Hashable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar, cast, overload

from asyncloader.shielding import shielded
from asyncloader.workers.fetch.handle_table import Handle
from asyncloader.workers.fetch.open_handles import AsyncHandles, Handles, SyncHandles, name_of
from asyncloader.workers.fetch.resource_scope import OF_PROCESS, ResourceScope, current_scope

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


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
    asynchronous = inspect.iscoroutinefunction(open) or inspect.iscoroutinefunction(close)
    kind: Any = AsyncWorkerResource if asynchronous else WorkerResource
    return kind(open, close, max, shared)


class _Resource(Generic[K, R]):
    def __init__(self, open: Callable[[K], Any], close: Callable[[R], Any] | None, max: int, shared: bool) -> None:
        self._options = open, close, max, shared
        self._handles: weakref.WeakKeyDictionary[ResourceScope, Handles[R]] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return type(self), self._options

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {name_of(self._options[0])}, max={self._options[2]}>"

    def _of(self, kind: Callable[..., Handles[R]]) -> Handles[R]:
        scope = current_scope.get() or OF_PROCESS
        found = self._handles.get(scope)
        if found is None or found.over:
            made = kind(*self._options)
            if found is not None:
                self._handles.pop(scope, None)
            found = self._handles.setdefault(scope, made)  # two threads may come at the same time
            if found is made:
                scope.add(made)
        return found


class WorkerResource(_Resource[K, R]):
    """Objects that are opened by plain functions. Made by `worker_resource`."""

    def __call__(self, key: K) -> AbstractContextManager[R]:
        """Return a context with the open object of this key, which is not closed within it. Any thread.

        Raises (on entering):
            Exception: what `open` raised, with a note that names the key.
        """
        return _Lease(self, key)

    def handles(self) -> SyncHandles[R]:
        """Return the objects of the current scope."""
        return cast("SyncHandles[R]", self._of(SyncHandles))


class AsyncWorkerResource(_Resource[K, R]):
    """Objects that are opened or closed by coroutine functions. Made by `worker_resource`."""

    def __call__(self, key: K) -> AbstractAsyncContextManager[R]:
        """Return an asynchronous context with the open object of this key, which is not closed within it.

        Raises (on entering):
            Exception: what `open` raised, with a note that names the key.
            RuntimeError: the objects belong to another event loop, which still runs.
        """
        return _AsyncLease(self, key)

    def handles(self) -> AsyncHandles[R]:
        """Return the objects of the current scope, in the running loop."""
        return cast("AsyncHandles[R]", self._of(AsyncHandles))


class _Lease(AbstractContextManager[R]):
    __slots__ = ("_handle", "_handles", "_key", "_resource")

    def __init__(self, resource: WorkerResource[Any, R], key: Hashable) -> None:
        self._resource, self._key = resource, key
        self._handle: Handle[R] | None = None

    def __enter__(self) -> R:
        if self._handle is not None:
            raise RuntimeError("this context is in use; call the resource for another one")
        self._handles = self._resource.handles()
        self._handle = self._handles.acquire(self._key)
        return cast("R", self._handle.value)

    def __exit__(self, *_: object) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._handles.release(handle)


class _AsyncLease(AbstractAsyncContextManager[R]):
    __slots__ = ("_handle", "_handles", "_key", "_resource")

    def __init__(self, resource: AsyncWorkerResource[Any, R], key: Hashable) -> None:
        self._resource, self._key = resource, key
        self._handle: Handle[R] | None = None

    async def __aenter__(self) -> R:
        if self._handle is not None:
            raise RuntimeError("this context is in use; call the resource for another one")
        self._handles = self._resource.handles()
        self._handle = await self._handles.acquire(self._key)
        return cast("R", self._handle.value)

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, at: TracebackType | None
    ) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        closings = self._handles.release(handle)
        # A coroutine that is dropped, by the collector above all, can wait for nothing: the loop closes them.
        if closings and kind is not GeneratorExit:
            for closing in closings:
                await shielded(closing)
