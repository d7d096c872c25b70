"""Keeps handles and decoders that a process has opened, up to a number of them, for the samples that need them next.

Data path: worker: [worker_resource] in the dataset's code.

A resource is an attribute of the dataset, and travels with it to the workers, without the open objects. What is opened
belongs to the process that opened it. The objects that are not in use are closed when a worker ends, or without workers
an iterator: whoever needs them after that opens them anew.

Objects are never shared over a fork: the child opens its own. Those of its parent it must not even free, because their
finalizers would act on files, threads and connections that are the parent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Hashable
from typing import Any, Generic, TypeAlias, TypeVar

from asyncloader.base.bridge import in_thread
from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.process_hooks import at_exit, in_forked_child
from asyncloader.errors import warn_aside
from asyncloader.workers.fetch.dataset_kinds import is_awaited
from asyncloader.workers.fetch.error_notes import add_note, index_text

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

CLOSE_SECONDS = 1.5
"""How long the end of an asynchronous worker waits for a generator that it reads: as long as for `__aexit__`."""

_Idle: TypeAlias = "deque[_Opened]"
"""Objects that are not in use; the least recently used first."""


def worker_resource(
    open: Callable[[K], R], close: Callable[[R], Any] | None = None, max: int = 16, *, shared: bool = False
) -> WorkerResource[K, R]:
    """Keep a bounded number of open files or decoders in each worker, opened on first use by key.

        self.videos = worker_resource(open_video, max=8)   # in the dataset's __init__
        with self.videos(path) as video: ...               # in __getitem__

    An object has one user at a time, and is never closed while it is in use. After that it stays open until `max`
    others were used more recently, or the worker ends. A resource can be pickled and copied with the dataset, without
    the open objects, and a forked process opens its own.

    Args:
        open: called with the key. With spawned workers it must be picklable, as the dataset.
        close: called with the object; None: the object's own ``close``, if it has one. What it raises is a
            `RuntimeWarning`.
        max: objects to keep open for later samples in each process, at least 1.
        shared: is gone; True is an error.

    Raises:
        ValueError: `max` is less than 1.
        TypeError: `open` or `close` cannot be called, or would have to be awaited; or `shared` is given.
    """
    for name, function in (("open", open), ("close", close)):
        if not callable(function) and not (name == "close" and function is None):
            raise TypeError(f"{name} must be a function, not {function!r}")
        if is_awaited(function):
            raise TypeError(f"{name} is a coroutine function, {_ADVICE}")
    if isinstance(max, bool) or not isinstance(max, int) or max < 1:
        raise ValueError(f"max must be a number of objects, at least 1, not {max!r}")
    if shared:
        raise TypeError(
            "worker_resource() no longer takes shared=True: open what all samples of a process may share once, in "
            "worker_init_fn, in the dataset's __aenter__, or at the first sample"
        )
    return WorkerResource(open, close, max)


_ADVICE = (
    "which worker_resource() no longer awaits: open clients in the dataset's `__aenter__`, and close them in its "
    "`__aexit__`"
)


class _Opened:
    """An open object. Compared by identity: the object itself may have an ``==`` of any meaning."""

    __slots__ = ("key", "value")

    def __init__(self, key: Hashable, value: Any) -> None:
        self.key, self.value = key, value


class WorkerResource(Generic[K, R]):
    """Objects that are opened by key. Made by `worker_resource`.

    A garbage generator gives its object back wherever the collector runs, in any thread. So there is no lock: each
    change of the idle objects is one call of their deque.
    """

    def __init__(self, open: Callable[[K], R], close: Callable[[R], Any] | None, max: int) -> None:
        self._options = open, close, max
        self._name: str = getattr(open, "__qualname__", None) or repr(open)
        self._idle: _Idle = deque()

    def __reduce__(self) -> Any:
        return type(self), self._options

    def __repr__(self) -> str:
        return f"<WorkerResource of {self._name}, max={self._options[2]}>"

    @contextlib.contextmanager
    def __call__(self, key: K) -> Generator[R]:
        """Return a context with an open object of this key, which is not closed within it. Any thread.

        Raises (on entering):
            Exception: what `open` raised, with a note that names the key.
        """
        idle = self._idle
        opened = self._take(key, idle)
        try:
            yield opened.value
        finally:
            # Appended first: whatever ends the worker meanwhile, one of the two sees it.
            idle.append(opened)
            if not any(idle is each for each in _parents):
                self._close_all_but(self._options[2] if idle is self._idle else 0, idle)

    def _take(self, key: K, idle: _Idle) -> _Opened:
        for at in reversed(range(len(idle))):
            with contextlib.suppress(IndexError, ValueError):  # another thread was quicker
                opened = idle[at]
                if opened.key == key:
                    idle.remove(opened)
                    return opened
        at_exit(close_idle)
        in_forked_child(_leave_in_parent)
        _all.add(self)
        # Before another is opened: with one user `max` objects are open at most.
        self._close_all_but(self._options[2] - 1, idle)
        try:
            value = self._options[0](key)
            if inspect.iscoroutine(value):
                value.close()  # otherwise Python would warn that it was never awaited
                raise TypeError(f"{self._name} returned a coroutine, {_ADVICE}")
        except BaseException as error:
            add_note(error, f"while opening {index_text(key)} by {self._name}")
            raise
        return _Opened(key, value)

    def _close_all_but(self, most: int, idle: _Idle) -> None:
        """Close idle objects, the least recently used first, until this number is left."""
        while len(idle) > most:
            try:
                opened = idle.popleft()
            except IndexError:
                return
            try:
                close = self._options[1]
                if close is not None:
                    close(opened.value)
                elif callable(own := getattr(opened.value, "close", None)):
                    own()
            except Exception as error:
                text = f"closing {index_text(opened.key)}, which {self._name} had opened, raised {type(error).__name__}"
                warn_aside(f"{text}: {error}", RuntimeWarning, stacklevel=4)

    def end(self) -> None:
        """Close the objects that are not in use, and have each other closed when it is given back."""
        idle, self._idle = self._idle, deque()
        self._close_all_but(0, idle)

    def leave_in_parent(self) -> None:
        """In a forked child: keep the parent's objects, and neither use nor close them."""
        _parents.append(self._idle)
        self._idle = deque()


# ------------------------------------------------------------------------- the ends of workers, iterators and processes

_all: LiveObjects[WorkerResource[Any, Any]] = LiveObjects()
_parents: list[_Idle] = []


def _leave_in_parent() -> None:
    for resource in _all:
        resource.leave_in_parent()


def any_open() -> bool:
    """Whether any resource was used in this process."""
    return any(True for _ in _all)


def close_idle() -> None:
    """Close the objects that are not in use, and have each other closed when it is given back. Waits for no lock, but
    for the user's `close`.
    """
    for resource in _all:
        resource.end()


async def aclose_idle(stream: Any) -> None:
    """`close_idle`, once a generator that is read has ended, which may have stopped where it uses an object."""
    if not any_open():
        return
    if isinstance(stream, AsyncGenerator):
        ending = asyncio.ensure_future(stream.aclose())
        await asyncio.wait([ending], timeout=CLOSE_SECONDS)
        if ending.done() and not ending.cancelled():
            ending.exception()  # marked as retrieved: the dataset is not read any more
        ending.cancel()
    await in_thread(close_idle)
