"""aiohttp's session, owned by one loop and process. Data path: download -> [session: connections] -> server.

A session is made by the first call and closed by `aclose`. Every wait of a call stands in a `Scope`, which is
its time-out and the handle by which `aclose` ends it: the call then raises TransportClosed.

*After a fork* the child leaves the parent's session alone and makes its own. It must not even be collected
there: the sockets are the parent's as well, and so, with epoll, is the set of what the parent's loop watches.
"""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Self

from asyncloader.transports.errors import TransportClosed, TransportError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Scope", "SessionOwner"]

_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "asyncloader"}
_RESOLUTION = 0.001  # seconds by which a timer of uvloop may fire too early


class SessionOwner:
    """The connections of one transport, and its calls in progress.

    Args:
        name: the transport for texts, without secrets.
        requests: requests that are in progress at the same time at most, at least 1.
        connect_s: seconds that one address may take to accept a connection.
    """

    def __init__(self, name: str, requests: int, connect_s: float) -> None:
        self._name = name
        self._requests = requests
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._scopes: set[Scope] = set()
        self._timer: asyncio.TimerHandle | None = None  # one for all scopes: it looks at their deadlines when it fires
        self._due = math.inf
        self._idle: asyncio.Future[None] | None = None
        self._closer: asyncio.Task[None] | None = None
        self.closed = False

    def use(self) -> tuple[aiohttp.ClientSession, asyncio.Semaphore]:
        """Give this loop's and process's session and its request slots.

        Raises:
            TransportClosed: after `aclose`.
            TransportError: the session belongs to another loop that is still open, or aiohttp is missing.
        """
        if self.closed:
            raise self.closed_error()
        loop = asyncio.get_running_loop()
        if self._session is None or self._slots is None or self._loop is not loop or self._pid != os.getpid():
            return self._make(loop)
        return self._session, self._slots

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
        """End the calls in progress, wait for their end, and close all connections. As `Transport.aclose`."""
        loop = asyncio.get_running_loop()
        foreign = self._loop is not loop or self._pid != os.getpid()
        if self._session is not None and foreign:
            self._refuse_foreign_loop()
        self.closed = True
        if self._session is None or foreign:
            return
        for scope in self._scopes:
            scope.cut()
        if self._closer is None:
            self._closer = loop.create_task(self._close(self._session), name="asyncloader-http-close")
        await asyncio.shield(self._closer)

    def entered(self, scope: Scope) -> None:
        """Note that a scope has begun. Errors as `use`."""
        self.use()
        self._scopes.add(scope)

    def left(self, scope: Scope) -> None:
        """Note that a scope has ended."""
        self._scopes.discard(scope)
        if not self._scopes:
            self._disarm()
        if not self._scopes and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def watch(self, deadline: float) -> None:
        """See to it that somebody looks at the scopes' deadlines at this time, or before."""
        if deadline < self._due:
            self._disarm()
            self._due = deadline
            self._timer = asyncio.get_running_loop().call_at(deadline, self._look)

    def _look(self) -> None:
        self._disarm()
        now = asyncio.get_running_loop().time() + _RESOLUTION
        for scope in self._scopes:
            if scope.deadline <= now:
                scope.cut()
        later = [scope.deadline for scope in self._scopes if scope.deadline > now]
        if later and min(later) < math.inf:
            self.watch(min(later))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, math.inf

    async def _close(self, session: aiohttp.ClientSession) -> None:
        while self._scopes:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        await session.close()

    def _refuse_foreign_loop(self) -> None:
        if self._pid == os.getpid() and self._loop is not None and not self._loop.is_closed():
            raise TransportError(
                f"{self._name} is in use by another event loop; close it there first, or open one transport for each "
                "loop (a pickled copy is a new one)"
            )

    def _make(self, loop: asyncio.AbstractEventLoop) -> tuple[aiohttp.ClientSession, asyncio.Semaphore]:
        self._refuse_foreign_loop()
        try:
            import aiohttp
        except ImportError as error:
            raise TransportError(
                "http and https need aiohttp, which is not installed; install it by: pip install 'asyncloader[http]'"
            ) from error
        # What the calls of a parent process, or of a loop that has ended, left here will never end.
        self._scopes = set()
        self._timer, self._due = None, math.inf
        self._idle = self._closer = None
        self._slots = asyncio.Semaphore(self._requests)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            headers=_HEADERS,
            read_bufsize=1 << 18,
        )
        self._loop, self._pid = loop, os.getpid()
        _sessions.add(self._session)
        _watch_forks()
        return self._session, self._slots


class Scope:
    """The waits of one attempt: ``async with owner.scope() as scope``; `limit` sets when they time out.

    Leaves with TimeoutError when the time was up, and with TransportClosed when the transport was closed,
    whatever error the closing caused inside.
    """

    __slots__ = ("_owner", "_timeout", "deadline")

    def __init__(self, owner: SessionOwner) -> None:
        self.deadline = math.inf
        """By the loop's clock."""
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
        """Time out in `seconds` from now, None for never. Costs no timer of its own: most waits end before."""
        if seconds is None:
            self.deadline = math.inf
        else:
            self.deadline = asyncio.get_running_loop().time() + seconds
            self._owner.watch(self.deadline)

    def cut(self) -> None:
        """End the waits now."""
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


# ------------------------------------------------------------------------------------------------------- forks

_sessions: weakref.WeakSet[aiohttp.ClientSession] = weakref.WeakSet()
_left_in_parent: list[object] = []


@cache  # once a process, by the first session: an import registers nothing
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    """In a forked child: keep every inherited session from closing anything, now and at the interpreter's end."""
    for session in list(_sessions):
        if (connector := session.connector) is not None:
            _left_in_parent.append((session, connector))
            connector._closed = True  # its finalizer would close the parent's connections
            session.detach()
    _sessions.clear()
