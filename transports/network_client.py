"""Owns a network client for one event loop and process, and decides whether a failed request is sent again.

Data path: download -> [network_client: client, slots, scopes, retries] -> server.

The first call opens a client, and `aclose` closes it. Every wait of a call is inside a `Scope`, which sets its
time-out, and by which `aclose` interrupts it: the call then raises TransportClosed.

*After a fork* the child does not use the parent's client. It must not even be garbage-collected there, because its
finalizer would affect the parent's connections. `open_client` either opens another client in the child, or raises.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from asyncloader.base.process_hooks import in_forked_child
from asyncloader.base.shielding import shielded
from asyncloader.transports.errors import ReadFailed, TransportClosed, TransportError
from asyncloader.transports.retry import Attempts, RequestFailed, RetryCounts, RetryPolicy

_log = logging.getLogger("asyncloader")
_SILENT_S = 5.0  # seconds without progress after which a warning is logged

_C = TypeVar("_C")
_R = TypeVar("_R")


@dataclass(slots=True)
class _Contact:
    """Whether a server answers this process, whichever client asks."""

    answered: bool = False
    silent: bool = False  # the log has a warning that it does not answer


_contacts: dict[str, _Contact] = {}


def silent_servers() -> list[str]:
    """Return the servers that were logged as not answering this process, and that have not answered since."""
    return [server for server, contact in [*_contacts.items()] if contact.silent]


class NetworkClient(ABC, Generic[_C]):
    """Sends requests below one root and handles their failures. Subclasses add the requests themselves.

    Args:
        name: the transport's name for texts, without secrets.
        requests: maximum number of concurrent requests, at least 1.
        retry: which failures are retried and for how long.
        min_bytes_per_s: the rate below which a response is given up; 0: no least rate.
    """

    first_requests: ClassVar[int | None] = None
    """Concurrent requests until the server has answered; one more with each answer (`widen`). None: all at once."""

    def __init__(self, name: str, requests: int, retry: RetryPolicy, min_bytes_per_s: float = 0.0) -> None:
        self.min_bytes_per_s = min_bytes_per_s
        self.counts = RetryCounts()
        self.closed = False
        self.slots = asyncio.Semaphore(requests)
        """One slot per concurrent request. Renewed when `use` opens a client for another loop or process."""
        self._name = name
        self._requests = requests
        self._granted = 0  # slots, up to `requests`
        self._retry = retry
        self._client: _C | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._scopes: set[Scope] = set()
        self._idle: asyncio.Future[None] | None = None
        self._closer: asyncio.Task[None] | None = None

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
            An object that is not garbage-collected before the interpreter exits.
        """

    @abstractmethod
    def where(self, path: str | None) -> str:
        """Return the URL of an object, or the nearest known URL, without secrets, for texts. None: of the root."""

    @property
    def server(self) -> str:
        """The name of the server. Clients of one server share the record of whether it answers."""
        return self.where(None)

    # --- the client and its calls

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
        for scope in self._scopes:
            scope.cut()
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
        self._scopes.discard(scope)
        if not self._scopes and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def widen(self) -> None:
        """Allow one more concurrent request, because the server has answered one."""
        if self._granted < self._requests:
            self._granted += 1
            self.slots.release()

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
        self._scopes = set()
        self._idle = self._closer = None
        self._granted = min(self._requests, self.first_requests or self._requests)
        self.slots = asyncio.Semaphore(self._granted)
        self._client, self._loop, self._pid = client, loop, os.getpid()
        _users.add(self)
        _clients[client] = self.leave_to_parent
        in_forked_child(_leave_all)
        return client

    # --- retries

    @cached_property
    def _contact(self) -> _Contact:
        return _contacts.setdefault(self.server, _Contact())

    @property
    def reached(self) -> bool:
        """Whether the store has answered this process, if only with an error."""
        return self._contact.answered

    def answered(self, *, busy: bool = False) -> None:
        """Note that the store has answered. `busy`: it answered that it cannot serve the request now."""
        contact = self._contact
        contact.answered = True
        if contact.silent and not busy:
            contact.silent = False
            _log.warning("%s answers again", self.where(None), extra={"store": self.server, "silent": False})

    def patience(self, seconds: float) -> float:
        """Return how long to wait for an answer: `seconds`, but less before the store's first answer."""
        return seconds if self.reached else min(seconds, self._retry.first_contact_s or seconds)

    @property
    def _policy(self) -> RetryPolicy:
        return self._retry if self.reached else self._retry.at_first_contact

    async def until_done(
        self,
        path: str | None,
        step: Callable[[Scope], Awaitable[_R]],
        classify: Callable[[BaseException], RequestFailed | None],
        *,
        recover: Callable[[RequestFailed, Attempts], bool] | None = None,
        attempts: Attempts | None = None,
        share: float = 0.5,
    ) -> _R:
        """Repeat `step` until it succeeds, or its failure is final.

        Args:
            path: the object; None: a listing.
            step: sends the request.
            classify: describes an error; None: it is not of a request, and is raised.
            recover: called with each failure before it is judged; True: the next request follows at once.
            attempts: those of the operation's earlier steps; None: it begins.
            share: as in `Attempts`.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                async with self.scope() as scope:
                    return await step(scope)
            except BaseException as error:
                failed = classify(error)
                if failed is None:
                    raise
                attempts = attempts or Attempts(self._policy, began, share=share)
                if recover is not None and recover(failed, attempts):
                    continue
                delay = self.judge(path, failed, attempts, loop.time())
            await self.sleep(delay)

    def judge(self, path: str | None, failed: RequestFailed, attempts: Attempts, now: float) -> float:
        """Return the seconds to wait before the next attempt, and count it.

        Raises:
            TransportError: the failure must not be retried, or the time is up.
        """
        if not failed.retryable:
            try:
                raise failed.final or self.failure(path, failed) from failed.cause
            finally:
                failed.final = None  # its traceback refers to `failed`: only the garbage collector would free both
        contact, policy = self._contact, self._policy
        # The store may have answered another operation since: then the whole budget applies here, too.
        attempts.follow(policy)
        verdict = attempts.failed(now, failed.retry_after)
        if verdict.delay is None:
            self.counts.give_up()
            reason = verdict.reason
            if not contact.answered and policy.budget_s:
                reason = (
                    f"no answer at all within {policy.budget_s:g} s. Is the address right? "
                    "RetryPolicy(first_contact_s=) is how long to try"
                )
            times = "once" if attempts.failures == 1 else f"{attempts.failures} times"
            raise self.failure(path, failed, f"tried {times}: {reason}") from failed.cause
        if not contact.silent and attempts.seconds_without_progress(now) > _SILENT_S:
            contact.silent = True
            _log.warning(
                "%s has not answered for %.0f s (%s); it is tried for %g s, then the read fails",
                *(self.where(None), attempts.seconds_without_progress(now), failed.text, policy.budget_s),
                extra={"store": self.server, "silent": True},
            )
        self.counts.retry(failed.kind, verdict.delay)
        return verdict.delay

    def failure(self, path: str | None, failed: RequestFailed, note: str = "") -> ReadFailed:
        """Make the error of a request that is not retried any more; `path` None: of a listing."""
        subject = "the listing" if path is None else repr(path)
        text = f"reading {subject} failed: {self.where(path)}: {failed.text}{'; ' + note if note else ''}"
        error = ReadFailed(text, path=path)
        if isinstance(failed.cause, OSError):
            error.errno = failed.cause.errno
        return error


class Scope:
    """The waits of one attempt: ``async with client.scope() as scope``; `limit` sets their time-out.

    Raises TimeoutError when the time is up, and TransportClosed when the transport is closed, whatever error the close
    caused inside.
    """

    __slots__ = ("_client", "_timeout")

    def __init__(self, client: NetworkClient[Any]) -> None:
        self._client = client
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        self._client.entered(self)
        await self._timeout.__aenter__()  # does not wait
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.left(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._client.closed:
                raise self._client.closed_error() from None
            raise
        # The client may have turned the interruption into an error of its own.
        if self._client.closed and isinstance(error, Exception) and not isinstance(error, TransportError):
            raise self._client.closed_error() from None

    def limit(self, seconds: float | None) -> None:
        """Time out in `seconds` from now, None for never; at once if the client is closed."""
        if self._client.closed:
            seconds = 0.0
        if not self._timeout.expired():
            self._timeout.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def cut(self) -> None:
        """Interrupt the waits now."""
        self.limit(0)


# ------------------------------------------------------------------------------------------------------- forks

_users: weakref.WeakSet[NetworkClient[Any]] = weakref.WeakSet()
# With clients that have been replaced, because their loop ended, until they are garbage-collected.
_clients: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
_left_in_parent: list[object] = []


def _leave_all() -> None:
    """In a forked child: leave every inherited client to the parent."""
    for client, leave in list(_clients.items()):
        _left_in_parent.append(leave(client))
    _clients.clear()
    for user in list(_users):
        user.forked()
    _users.clear()
