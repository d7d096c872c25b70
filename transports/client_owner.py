"""Owns a network client for one event loop and process, with its concurrency limit and time-outs.

Data path: download -> [client_owner: client, slots, scopes] -> server.

The first call opens a client, and `aclose` closes it. Every wait of a call is inside a `Scope`, which sets its
time-out, and by which `aclose` interrupts it: the call then raises TransportClosed.

*After a fork* the child does not use the parent's client. It must not even be garbage-collected there, because its
finalizer would affect the parent's connections. `open_client` either opens another client in the child, or raises.
"""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from asyncloader.process_hooks import in_forked_child
from asyncloader.shielding import shielded
from asyncloader.transports.errors import TransportClosed, TransportError
from asyncloader.transports.request_deadlines import RequestDeadlines

_C = TypeVar("_C")


class ClientOwner(ABC, Generic[_C]):
    """The client of one transport, and its calls in progress.

    Args:
        name: the transport's name for texts, without secrets.
        requests: maximum number of concurrent requests, at least 1.
    """

    def __init__(self, name: str, requests: int) -> None:
        self._name = name
        self._requests = requests
        self._client: _C | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._scopes = RequestDeadlines()
        self._idle: asyncio.Future[None] | None = None
        self._closer: asyncio.Task[None] | None = None
        self.closed = False
        self.slots = asyncio.Semaphore(requests)
        """One slot per concurrent request. Renewed when `use` opens a client for another loop or process."""

    @abstractmethod
    def open_client(self) -> _C:
        """Open a client for the running loop. Its class must be hashable by identity and support weak references.

        Raises:
            TransportError: no client can be opened in this process.
        """

    @abstractmethod
    async def close_client(self, client: _C) -> None:
        """Close a client that has no requests in progress."""

    @staticmethod
    @abstractmethod
    def leave_to_parent(client: Any) -> object:
        """In a forked child: prevent an inherited client from closing anything, now and when the interpreter exits.

        Returns:
            An object that must never be garbage-collected in this process; None: nothing.
        """

    def use(self) -> _C:
        """Return the client of this loop and process.

        Raises:
            TransportClosed: after `aclose`.
            TransportError: the client belongs to another loop that is still open, or cannot be opened.
        """
        if self.closed:
            raise self.closed_error()
        loop = asyncio.get_running_loop()
        client = self._client
        if client is None or self._loop is not loop or self._pid != os.getpid():
            return self._make(loop)
        return client

    def closed_error(self) -> TransportClosed:
        """Make the error that calls raise after the transport was closed."""
        return TransportClosed(f"{self._name} is closed; open another transport")

    def scope(self) -> Scope:
        """Return a context for the waits of one attempt, initially without a time-out."""
        return Scope(self)

    async def sleep(self, seconds: float) -> None:
        """Sleep. Raises TransportClosed at once if the transport is closed during the sleep."""
        async with self.scope():
            await asyncio.sleep(seconds)

    async def aclose(self) -> None:
        """Interrupt the calls in progress, wait for their end, and close the client, like `Transport.aclose`."""
        loop = asyncio.get_running_loop()
        foreign = self._loop is not loop or self._pid != os.getpid()
        if self._client is not None and foreign:
            self._refuse_foreign_loop()
        # Set before the scopes are interrupted: by it, they distinguish a close from a time-out.
        self.closed = True
        if self._client is None or foreign:
            return
        self._scopes.cut_all()
        # Shared by concurrent callers; if one is cancelled, the others continue.
        if self._closer is None or self._closer.cancelled():
            self._closer = loop.create_task(self._close(self._client), name="asyncloader-transport-close")
        await shielded(self._closer)

    def entered(self, scope: Scope) -> None:
        """Note that a scope has begun. Errors as `use`."""
        self.use()
        self._scopes.add(scope)

    def left(self, scope: Scope) -> None:
        """Note that a scope has ended."""
        self._scopes.remove(scope)
        if not self._scopes and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def watch(self, deadline: float) -> None:
        """Have the scopes' deadlines checked at this time, or earlier."""
        self._scopes.watch(deadline)

    def forked(self) -> None:
        """In a forked child: note that the client belongs to another process.

        The pid alone is not enough: a child in a pid namespace of its own can have its parent's pid.
        """
        self._pid = 0

    async def _close(self, client: _C) -> None:
        while self._scopes:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        await self.close_client(client)
        self._client = None

    def _refuse_foreign_loop(self) -> None:
        if self._pid == os.getpid() and self._loop is not None and not self._loop.is_closed():
            raise TransportError(
                f"{self._name} is in use by another event loop; close it there first, or open one transport for each "
                "loop (a pickled copy is a new one)"
            )

    def _make(self, loop: asyncio.AbstractEventLoop) -> _C:
        self._refuse_foreign_loop()
        client = self.open_client()
        # Calls in a parent process, or in a loop that has ended, will never remove their scopes.
        self._scopes = RequestDeadlines()
        self._idle = self._closer = None
        self.slots = asyncio.Semaphore(self._requests)
        self._client, self._loop, self._pid = client, loop, os.getpid()
        _owners.add(self)
        _clients[client] = self.leave_to_parent
        in_forked_child(_leave_all)
        return client


class Scope:
    """The waits of one attempt: ``async with owner.scope() as scope``; `limit` sets their time-out.

    Raises TimeoutError when the time is up, and TransportClosed when the transport is closed, whatever error the close
    caused inside.
    """

    __slots__ = ("_owner", "_timeout", "deadline")

    def __init__(self, owner: ClientOwner[Any]) -> None:
        self.deadline = math.inf
        """In the loop's time."""
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
        # The client may have turned the interruption into an error of its own.
        if self._owner.closed and isinstance(error, Exception) and not isinstance(error, TransportError):
            raise self._owner.closed_error() from None

    def limit(self, seconds: float | None) -> None:
        """Time out in `seconds` from now, None for never."""
        if seconds is None:
            self.deadline = math.inf
        else:
            self.deadline = asyncio.get_running_loop().time() + seconds
            self._owner.watch(self.deadline)

    def cut(self) -> None:
        """Interrupt the waits now."""
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


# ------------------------------------------------------------------------------------------------------- forks

_owners: weakref.WeakSet[ClientOwner[Any]] = weakref.WeakSet()
# With clients that their owners have replaced, because their loop ended, until they are garbage-collected.
_clients: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
_left_in_parent: list[object] = []


def _leave_all() -> None:
    """In a forked child: leave every inherited client to the parent."""
    for client, leave in list(_clients.items()):
        if (kept := leave(client)) is not None:
            _left_in_parent.append(kept)
    _clients.clear()
    for owner in list(_owners):
        owner.forked()
    _owners.clear()
