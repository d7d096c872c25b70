"""obstore's client, owned by one loop and process. Data path: download -> [session] -> obstore's threads -> store.

A client is made by the first call and dropped by `aclose`. Every wait of a call stands in a `Scope`, which is its
time-out and the handle by which `aclose` ends it: the call then raises TransportClosed.

obstore cannot close a client: dropped, its threads close the idle connections, a moment after `aclose`. The
threads themselves, as many as the machine has CPUs, belong to the process and stay. *After a fork* they are the
parent's alone: every use in the child raises at once (`fork_hazard`), and the clients inherited by it are never
collected there, because their locks may have been held at the fork.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
import weakref
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Self

from asyncloader.transports.errors import TransportClosed, TransportError
from asyncloader.transports.fork_hazard import note_use

if TYPE_CHECKING:
    from asyncloader.transports.object_store_config import Store

__all__ = ["OpenStore", "Scope", "StoreOwner"]

# How long the interpreter's end waits for obstore's threads to let go of Python. See `_settle`.
_SETTLE_S = 0.05


class OpenStore:
    """What a transport has open in one loop and process.

    Args:
        open_store: makes obstore's client; its argument says whether obstore shall retry by itself.
        requests: requests in progress at most.
    """

    def __init__(self, open_store: Callable[[bool], Store], requests: int) -> None:
        self._open_store = open_store
        self.objects = open_store(False)
        self.slots = asyncio.Semaphore(requests)
        self._listings: Store | None = None

    @property
    def listings(self) -> Store:
        """The client for listings: obstore retries their pages itself, since nobody else could ask for one again."""
        if self._listings is None:
            self._listings = self._open_store(True)
        return self._listings


class StoreOwner:
    """The client of one transport, and its calls in progress.

    Args:
        name: the transport for texts.
        requests: requests in progress at the same time at most, at least 1.
        open_store: as in `OpenStore`.
    """

    def __init__(self, name: str, requests: int, open_store: Callable[[bool], Store]) -> None:
        self._name = name
        self._requests = requests
        self._open_store = open_store
        self._opened: OpenStore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._scopes: set[Scope] = set()
        self._idle: asyncio.Future[None] | None = None
        self.closed = False

    def use(self) -> OpenStore:
        """Give this loop's client.

        Raises:
            TransportClosed: after `aclose`.
            TransportError: this process was forked from one that used obstore; or the client belongs to another
                loop that is still open, or cannot be made.
        """
        if self.closed:
            raise self.closed_error()
        note_use()
        loop = asyncio.get_running_loop()
        if self._opened is None or self._loop is not loop or self._pid != os.getpid():
            return self._make(loop)
        return self._opened

    def closed_error(self) -> TransportClosed:
        """Make the error of a call that meets the end of the transport."""
        return TransportClosed(f"{self._name} is closed; open another transport")

    def scope(self) -> Scope:
        """Give a context for the waits of one attempt, without a limit as yet."""
        return Scope(self)

    async def sleep(self, seconds: float) -> None:
        """Sleep. Raises TransportClosed when the transport is closed meanwhile."""
        async with self.scope():
            await asyncio.sleep(seconds)

    async def aclose(self) -> None:
        """End the calls in progress, wait for their end, and drop the client. As `Transport.aclose`."""
        loop = asyncio.get_running_loop()
        foreign = self._loop is not loop or self._pid != os.getpid()
        if self._opened is not None and foreign:
            self._refuse_foreign_loop()
        self.closed = True
        if foreign:
            return
        for scope in self._scopes:
            scope.cut()
        while self._scopes:
            # Shared by all who close at once; a cancelled one leaves it to the others.
            if self._idle is None or self._idle.done():
                self._idle = loop.create_future()
            await asyncio.shield(self._idle)
        self._opened = None

    def entered(self, scope: Scope) -> None:
        """Note that a scope has begun. Errors as `use`."""
        self.use()
        self._scopes.add(scope)

    def left(self, scope: Scope) -> None:
        """Note that a scope has ended."""
        self._scopes.discard(scope)
        if not self._scopes and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _refuse_foreign_loop(self) -> None:
        if self._pid == os.getpid() and self._loop is not None and not self._loop.is_closed():
            raise TransportError(
                f"{self._name} is in use by another event loop; close it there first, or open one transport for each "
                "loop (a pickled copy is a new one)"
            )

    def _make(self, loop: asyncio.AbstractEventLoop) -> OpenStore:
        self._refuse_foreign_loop()
        opened = OpenStore(self._open_store, self._requests)
        # What the calls of a loop that has ended left here will never end.
        self._scopes = set()
        self._idle = None
        self._opened, self._loop, self._pid = opened, loop, os.getpid()
        _opened.add(opened)
        _watch_process()
        return opened


class Scope:
    """The waits of one attempt: ``async with owner.scope() as scope``; `limit` sets when they time out.

    Leaves with TimeoutError when the time was up, and with TransportClosed when the transport was closed,
    whatever error the closing caused inside.
    """

    __slots__ = ("_owner", "_timeout")

    def __init__(self, owner: StoreOwner) -> None:
        self._owner = owner
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        self._owner.entered(self)
        await self._timeout.__aenter__()  # does not wait
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.left(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._owner.closed:
                raise self._owner.closed_error() from None
            raise
        if self._owner.closed and isinstance(error, Exception) and not isinstance(error, TransportError):
            raise self._owner.closed_error() from None

    def limit(self, seconds: float | None) -> None:
        """Time out in `seconds` from now, None for never."""
        if not self._timeout.expired() and not self._owner.closed:
            loop = asyncio.get_running_loop()
            self._timeout.reschedule(None if seconds is None else loop.time() + seconds)

    def cut(self) -> None:
        """End the waits now."""
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


# ----------------------------------------------------------------------------------------------- the process

_opened: weakref.WeakSet[OpenStore] = weakref.WeakSet()
_left_in_parent: list[OpenStore] = []


@cache  # once a process, by the first client: an import registers nothing
def _watch_process() -> None:
    atexit.register(_settle, os.getpid())
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    """In a forked child: keep every inherited client."""
    _left_in_parent.extend(_opened)
    _opened.clear()


def _settle(pid: int) -> None:
    """At the interpreter's end: give obstore's threads time to let go of the objects of the last requests.

    One that asks for Python's lock while the interpreter goes down aborts the process: measured, one program in
    six that ended right behind its last request, and none with this. Whether a thread still has something to drop
    cannot be asked, and it takes microseconds, so a short sleep without the lock has to do.
    """
    if pid == os.getpid():
        time.sleep(_SETTLE_S)
