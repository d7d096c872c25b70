"""Sends requests to one object store through obstore: reads, writes, lists, handles forks, and classifies errors.

Data path: object_store -> [object_store_client] -> obstore's threads -> store.

*Errors.* obstore has classes for a few failures; all others are GenericErrors, whose sentence names the HTTP status if
the store has answered with one. A GenericError without a status counts as retryable, whatever caused it: if a later
obstore words it differently, an error is raised late, but not lost.

*Ownership.* A client belongs to one event loop and one process (`network_client`). obstore cannot close a client: when
it is dropped, obstore's threads close the idle connections, shortly after `aclose`. The threads themselves, one per
CPU, belong to the process and remain.

*Forks.* obstore starts its threads at the first request of the process. A forked child has the parent's memory, but not
its threads, so every request in the child would wait for ever; a new client does not help. Therefore every use in such
a child raises at once (`note_use`), and inherited clients are never garbage-collected there: their locks may have been
held at the fork. To import obstore and make clients before the fork is harmless, and children of "spawn" or
"forkserver" inherit nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Buffer

from asyncloader.base.process_hooks import at_exit, in_forked_child
from asyncloader.telemetry.counters import count
from asyncloader.transports.checks import check_path
from asyncloader.transports.download import SLOW_S
from asyncloader.transports.errors import (
    AccessDenied,
    InvalidPath,
    ObjectNotFound,
    ReadFailed,
    TransportError,
    WriteFailed,
)
from asyncloader.transports.network_client import NetworkClient, Scope
from asyncloader.transports.object_store_config import BucketLocation, open_store
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import RequestFailed

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

    from asyncloader.transports.object_store_config import Store

_R = TypeVar("_R")

_PAGE = 1000  # names per page of a listing

PART_BYTES = 8 << 20
"""Bytes of a part of a multipart upload; an object that has no more is written by one request."""

MOST_PARTS = 10_000  # that S3 allows
PARTS_AT_ONCE = 8  # per object


class OpenStore:
    """obstore's clients of a transport in one loop and process.

    Args:
        open_store: makes a client; its argument: whether obstore retries by itself.
    """

    def __init__(self, open_store: Callable[[bool], Store]) -> None:
        self._open_store = open_store
        self.objects = open_store(False)
        self._retrying: Store | None = None

    @property
    def retrying(self) -> Store:
        """The client for listings and uploads: obstore must retry pages and parts by itself, because it provides no
        request for one of them.
        """
        if self._retrying is None:
            self._retrying = self._open_store(True)
        return self._retrying


class StoreClient(NetworkClient[OpenStore]):
    """Requests below one root. The options are those of `ObjectStoreTransport`, by name."""

    def __init__(self, location: BucketLocation, options: Mapping[str, Any]) -> None:
        name = f"the transport of {location.url}"
        super().__init__(name, options["requests"], options["retry"], options["min_bytes_per_s"])
        self.location = location
        self._options = options
        self._endpoint = options["endpoint"] or options["config"].get("endpoint")
        # obstore enforces both limits itself. This limit ends the wait if obstore's threads do not exist.
        self._head_s: float = options["connect_s"] + 2 * options["stalled_s"]

    def open_client(self) -> OpenStore:
        """Make obstore's client.

        Raises:
            TransportError: this process was forked from one that used obstore, or the client cannot be made.
        """
        note_use()
        opened = OpenStore(lambda retries: open_store(self.location, self._options, self._retry if retries else None))
        at_exit(_settle)
        return opened

    async def close_client(self, client: OpenStore) -> None:
        """Do nothing: a client can only be dropped."""

    @staticmethod
    def leave_to_parent(client: OpenStore) -> object:
        """Keep the client alive, like `NetworkClient.leave_to_parent`."""
        return client

    @property
    def server(self) -> str:
        """Return the root's URL and the endpoint, like `NetworkClient.server`."""
        return f"{self.location.url} at {self._endpoint}" if self._endpoint else self.location.url

    def where(self, path: str | None) -> str:  # noqa: ARG002 - the root is enough: texts name the path, too
        """Return the root's URL, for objects as well, like `NetworkClient.where`."""
        return self.location.url

    # --- objects

    async def get(self, scope: Scope, path: str, options: GetOptions) -> GetResult:
        """Request an object, and wait for the head of the response. The caller holds a slot."""
        from obstore import get_async

        return await self._ask(scope, lambda store: get_async(store, path, options=options))

    async def head(self, scope: Scope, path: str) -> ObjectMeta:
        """Request an object's metadata. The caller holds a slot."""
        from obstore import head_async

        return await self._ask(scope, lambda store: head_async(store, path))

    async def _ask(self, scope: Scope, request: Callable[[Store], Awaitable[_R]]) -> _R:
        store = self.use().objects
        scope.limit(self.patience(self._head_s))
        result = await request(store)  # in no variable: an error's traceback would keep its connection open
        self.answered()
        scope.limit(None)
        return result

    def slow_s(self, nbytes: int) -> float | None:
        """Return the seconds within which a part of `nbytes` bytes must come; None: no limit."""
        return max(SLOW_S, nbytes / self.min_bytes_per_s) if self.min_bytes_per_s else None

    async def meta(self, path: str) -> ObjectMeta:
        """Request an object's metadata, with retries."""

        async def step(scope: Scope) -> ObjectMeta:
            async with self.slots:
                count("requests")
                return await self.head(scope, path)

        return await self.until_done(path, step, partial(self.classify_error, path=path))

    async def upload(self, path: str, pieces: Sequence[Buffer]) -> Version:
        """Write an object: by one request, or by a multipart upload that is completed at its end."""
        from obstore import put_async

        size = sum(memoryview(piece).nbytes for piece in pieces)
        part = max(PART_BYTES, -(-size // MOST_PARTS))

        async def step(scope: Scope) -> Version:  # noqa: ARG001 - obstore limits each request
            async with self.slots:
                opened = self.use()
                # obstore retries the parts by itself; not before the store has answered.
                store = opened.retrying if self.reached else opened.objects
                count("requests")
                data = b"".join(pieces) if size <= part else iter(pieces)
                result = await put_async(store, path, data, chunk_size=part, max_concurrency=PARTS_AT_ONCE)
                self.answered()
                return Version(result["e_tag"], size=size)

        return await self._write(path, step, "writing")

    async def delete(self, path: str) -> None:
        """Delete an object, if it exists."""
        from obstore import delete_async

        async def step(scope: Scope) -> None:  # noqa: ARG001 - as above
            async with self.slots:
                store = self.use().objects
                count("requests")
                with suppress(FileNotFoundError):
                    await delete_async(store, path)
                self.answered()

        await self._write(path, step, "deleting")

    async def _write(self, path: str, step: Callable[[Scope], Awaitable[_R]], action: str) -> _R:
        """Like `until_done`, whose errors say that an object could not be read."""
        try:
            return await self.until_done(path, step, partial(self.classify_error, path=path))
        except AccessDenied as error:
            text = str(error).replace("no permission to read", f"no permission for {action}", 1)
            raise AccessDenied(text, path=path) from error.__cause__
        except ReadFailed as error:
            failed = WriteFailed(action + str(error).removeprefix("reading"), path=path)
            failed.errno = error.errno
            raise failed from error.__cause__

    # --- listings

    async def names(self, prefix: str) -> list[str]:
        """Return the paths of all objects that begin with `prefix`, ascending by code point.

        All are requested before the first is returned, because not every store sorts. obstore lists by whole path
        parts, so all objects in the prefix's last directory are requested.
        """
        # obstore has retried a page until the budget was used up.
        sizes = await self.until_done(
            None,
            lambda scope: self._pages(scope, prefix),
            partial(self.classify_error, path=None),
            share=1.0 if self.reached else 0.5,
        )
        # Web consoles create folders as empty objects whose names end with "/". obstore drops the slash, and the name
        # without it cannot be read.
        folders = {name.rpartition("/")[0] for name in sizes}
        return sorted(name for name, size in sizes.items() if size or name not in folders)

    async def _pages(self, scope: Scope, prefix: str) -> dict[str, int]:
        from obstore import list as list_objects

        directory = prefix.rpartition("/")[0]
        opened = self.use()
        sizes: dict[str, int] = {}
        async with self.slots:
            # obstore retries each page until the budget is used up; not before the store has answered.
            limit = 2 * (self._retry.budget_s + self._retry.cap_s) + self._head_s
            store = opened.retrying if self.reached else opened.objects
            scope.limit(self.patience(limit))
            async for page in list_objects(store, directory or None, chunk_size=_PAGE):
                count("requests")
                self.answered()
                scope.limit(limit)
                sizes.update({each["path"]: each["size"] for each in page if each["path"].startswith(prefix)})
        return sizes

    # --- failures

    def classify_error(self, error: BaseException, path: str | None) -> RequestFailed | None:
        """Classify an error by the function `classify_error`, with the root and the policy's statuses."""
        failed = classify_error(error, path, self.location.url, self._retry.statuses)
        if failed is not None and failed.kind.startswith("status"):
            self.answered(busy=failed.retryable)
        return failed


def check_key(path: str) -> None:
    """Refuse a path that is not canonical, or contains a control character, which obstore does not allow.

    Raises:
        InvalidPath: the path is refused.
    """
    check_path(path)
    if not path.isprintable() and any(each < " " or each == "\x7f" for each in path):
        raise InvalidPath(
            f"{path!r} holds a control character, which obstore cannot read; rename the object", path=path
        )


_STATUS = re.compile(r"status code: ([1-5][0-9]{2})\b")
_NO_STORE = ("NoSuchBucket", "ContainerNotFound")  # the store's codes of a 404 that is not about the object
_ARCHIVED = "InvalidObjectState"  # its code of a 403 that is about the object: it must be restored from an archive

# Metadata services, from which machines in a cloud get their role's keys; elsewhere they do not answer.
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_NO_CREDENTIALS = (
    "; no credentials were found, so the cloud's metadata service was asked for them: set them in the environment, "
    "pass credentials=, or pass skip_signature=True if the bucket is public"
)

_MOST_WORDS = 400  # of obstore's own text in a message


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that obstore's sentence names; None if it names none."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def classify_error(
    error: BaseException, path: str | None, where: str, statuses: frozenset[int]
) -> RequestFailed | None:
    """Translate an error of a request; None if it does not come from the store.

    Args:
        error: the error of an attempt.
        path: the object, None for a listing.
        where: the root's URL.
        statuses: the retryable statuses.
    """
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, TransportError) or not isinstance(error, Exception):
        return None
    if isinstance(error, TimeoutError):
        return RequestFailed("no answer", "no answer came in time", cause=error)
    from obstore import exceptions as obstore

    if not isinstance(error, obstore.BaseError | FileNotFoundError | ValueError):
        return None  # a bug in this package or in a credential provider
    text = str(error)
    words = text.partition("\n")[0][:_MOST_WORDS]
    subject = repr(path) if path is not None else "the listing"
    status = status_of(error)
    final: TransportError | None = None
    if isinstance(error, obstore.InvalidPathError | ValueError):
        final = InvalidPath(f"obstore cannot name {subject} in {where}: {words}", path=path)
        if path is None:
            note = "name the objects yourself, or open the transport at a prefix without it"
            final.args = (f"{where} holds an object whose name is no path, and cannot be listed: {words}; {note}",)
    elif isinstance(error, FileNotFoundError) or status == 404:
        status = 404
        final = ObjectNotFound(f"{subject} does not exist in {where}: {words}", path=path)
        final.about_sample = not any(code in text for code in _NO_STORE)
    elif isinstance(error, obstore.PermissionDeniedError | obstore.UnauthenticatedError) or status in {401, 403, 407}:
        status = status or 403
        note = "Check the credentials; some stores answer this for missing objects, too, to those who may not list them"
        final = AccessDenied(f"no permission to read {subject} in {where}: {words}. {note}", path=path)
        final.about_sample = _ARCHIVED in text
    unable = isinstance(error, obstore.NotSupportedError | obstore.UnknownConfigurationKeyError)
    retryable = final is None and not unable and (status is None or status in statuses)
    if any(each in words for each in _METADATA):
        words += _NO_CREDENTIALS
    kind = "store" if status is None else f"status {status}"
    return RequestFailed(kind, words, retryable=retryable, cause=error, final=final)


# ------------------------------------------------------------------------------------------------------- threads

# How long the interpreter's exit waits for obstore's threads to release Python objects. See `_settle`.
_SETTLE_S = 0.05


def _settle() -> None:
    """When the interpreter exits: give obstore's threads time to release the objects of the last requests.

    A thread that requests the GIL during interpreter shutdown is unwound by force, and Rust then aborts the process.
    Measured with obstore 0.12.1 and Python 3.11 on asyncio's own loop: 24 of 60 programs that ended right after the
    last bytes of a stream aborted, and none of 60 with this.

    It sleeps because it has nothing to wait for: up to obstore 0.12.1 nothing ends or joins its threads, or shows
    whether they are idle, and a request's future is resolved before its thread has taken the GIL for the last time. The
    remaining work takes microseconds and does not depend on the network: this fails only if a thread is not scheduled
    for that long.
    """
    time.sleep(_SETTLE_S)


_NEVER = 0
_BY_ANCESTOR = -1

# The pid of the process that has used obstore, or one of the two constants above.
_user = _NEVER


def note_use() -> None:
    """Note that this process is about to send a request; must be called before each.

    Raises:
        TransportError: the process was forked after an ancestor sent one, so this request would never end.
    """
    global _user  # noqa: PLW0603 - one fact about one process
    pid = os.getpid()
    if _user == pid:
        return
    if _user == _NEVER:
        _user = pid
        in_forked_child(_forked)
        return
    # Also found by the pid, in case a fork did not run Python's hooks.
    raise TransportError(
        "this process was forked from one that had already read an object store (s3://, gs://, az://), and "
        "obstore's threads exist only there: a request made here would hang for ever. Start the workers with "
        'multiprocessing_context="forkserver" or "spawn", or read nothing from object stores before the fork'
    )


def _forked() -> None:
    # A child in a pid namespace of its own can have its parent's pid, so the pid alone is not enough.
    global _user  # noqa: PLW0603 - as above
    _user = _BY_ANCESTOR
