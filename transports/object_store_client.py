"""Sends requests to one object store through obstore; owns its clients, lists, handles forks, and classifies errors.

Data path: object_store_download -> [object_store_client] -> obstore's threads -> store.

*Errors.* obstore has classes for a few failures; all others are GenericErrors, whose text ends with Rust's debug output
of the error. The HTTP status and the kind of a broken connection are parsed from it. A text that is not recognised
counts as retryable: if a later obstore formats it differently, an error is raised late, but not lost.

*Ownership.* A client belongs to one event loop and one process (`client_owner`). obstore cannot close a client: when it
is dropped, obstore's threads close the idle connections, shortly after `aclose`. The threads themselves, one per CPU,
belong to the process and remain.

*Forks.* obstore starts its threads at the first request of the process. A forked child has the parent's memory, but not
its threads, so every request in the child would wait for ever; a new client does not help. Therefore every use in such
a child raises at once (`note_use`), and inherited clients are never garbage-collected there: their locks may have been
held at the fork. To import obstore and make clients before the fork is harmless, and children of "spawn" or
"forkserver" inherit nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from asyncloader.process_hooks import at_exit, in_forked_child
from asyncloader.telemetry.counters import count
from asyncloader.transports.base import gather_all
from asyncloader.transports.checks import check_path
from asyncloader.transports.client_owner import ClientOwner, Scope
from asyncloader.transports.download import SLOW_S
from asyncloader.transports.errors import AccessDenied, InvalidPath, ObjectNotFound, ReadFailed, TransportError
from asyncloader.transports.object_store_config import BucketLocation, Settings, open_store
from asyncloader.transports.retry import Attempts, RequestFailed, RetryPolicy
from asyncloader.transports.retrying_client import RetryingClient

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

    from asyncloader.transports.object_store_config import Store

# How long the interpreter's exit waits for obstore's threads to release Python objects. See `_settle`.
_SETTLE_S = 0.05


class OpenStore:
    """obstore's clients of a transport in one loop and process.

    Args:
        open_store: makes a client; its argument: whether obstore retries by itself.
    """

    def __init__(self, open_store: Callable[[bool], Store]) -> None:
        self._open_store = open_store
        self.objects = open_store(False)
        self._listings: Store | None = None

    @property
    def listings(self) -> Store:
        """The client for listings: obstore must retry pages by itself, because it provides no request for one page."""
        if self._listings is None:
            self._listings = self._open_store(True)
        return self._listings


class StoreOwner(ClientOwner[OpenStore]):
    """The clients of one transport, and its calls in progress.

    Args:
        name: the transport's name for texts.
        requests: maximum number of concurrent requests, at least 1.
        open_store: as in `OpenStore`.
    """

    def __init__(self, name: str, requests: int, open_store: Callable[[bool], Store]) -> None:
        super().__init__(name, requests)
        self._open_store = open_store

    def open_client(self) -> OpenStore:
        """Make obstore's client.

        Raises:
            TransportError: this process was forked from one that used obstore, or the client cannot be made.
        """
        note_use()
        opened = OpenStore(self._open_store)
        at_exit(_settle)
        return opened

    async def close_client(self, client: OpenStore) -> None:
        """Do nothing: a client can only be dropped."""

    @staticmethod
    def leave_to_parent(client: OpenStore) -> object:
        """Keep the client alive, like `ClientOwner.leave_to_parent`."""
        return client


def _settle() -> None:
    """When the interpreter exits: give obstore's threads time to release the objects of the last requests.

    A thread that requests the GIL during interpreter shutdown is unwound by force, and Rust then aborts the process.
    Measured with obstore 0.12.1 and Python 3.11 on asyncio's own loop: 24 of 60 programs that ended right after the
    last bytes of a stream aborted, and none of 60 with this.

    It sleeps because it has nothing to wait for. Up to obstore 0.12.1:

    - no function or class can close a client or a stream, end or join the runtime, or show whether it is idle, and
    `threading` does not know the threads;
    - no event follows a thread's last use of Python. A request's future is no such event: the thread resolves it by
    `call_soon_threadsafe`, which wakes the loop and releases the GIL while doing so; the thread has to take the GIL
    again after the caller has continued. Another request as a barrier ends in the same way, and the runtime's tasks are
    unordered. `sys._current_frames` shows the threads that execute Python code, but not those that are about to take
    the GIL, as after a cancelled request.

    The remaining work takes microseconds and does not depend on the network. So a bounded sleep without the GIL is
    sufficient: it costs a process that used obstore 50 ms once, and fails only if a thread is not scheduled for that
    long.
    """
    time.sleep(_SETTLE_S)


_R = TypeVar("_R")

_PAGE = 1000  # names per page of a listing


class StoreClient(RetryingClient[OpenStore]):
    """Requests below one root. The arguments are those of `ObjectStoreTransport`."""

    def __init__(
        self, location: BucketLocation, settings: Settings, retry: RetryPolicy, requests: int, min_bytes_per_s: float
    ) -> None:
        def open_one(retries: bool) -> Store:
            return open_store(location, settings, retry if retries else None)

        super().__init__(StoreOwner(f"the transport of {location.url}", requests, open_one), retry, min_bytes_per_s)
        self.location = location
        self._endpoint = settings.endpoint or settings.config.get("endpoint")
        # obstore enforces both limits itself. This limit ends the wait if obstore's threads do not exist.
        self._head_s = settings.connect_s + 2 * settings.stalled_s

    async def get(self, scope: Scope, path: str, options: GetOptions) -> GetResult:
        """Request an object, and wait for the head of the response. The caller holds a slot."""
        from obstore import get_async

        store = self.owner.use().objects
        scope.limit(self.patience(self._head_s))
        result = await get_async(store, path, options=options)
        self.answered()
        scope.limit(None)
        return result

    def slow_s(self, nbytes: int) -> float | None:
        """Return the seconds within which a part of `nbytes` bytes must come; None: no limit."""
        return max(SLOW_S, nbytes / self.min_bytes_per_s) if self.min_bytes_per_s else None

    async def head(self, scope: Scope, path: str) -> ObjectMeta:
        """Request an object's metadata. The caller holds a slot."""
        from obstore import head_async

        store = self.owner.use().objects
        scope.limit(self.patience(self._head_s))
        meta = await head_async(store, path)
        self.answered()
        scope.limit(None)
        return meta

    async def meta(self, path: str) -> ObjectMeta:
        """Request an object's metadata, with retries."""

        async def step(scope: Scope) -> ObjectMeta:
            async with self.owner.slots:
                count("requests")
                return await self.head(scope, path)

        return await self.until_done(path, step)

    async def names(self, prefix: str) -> list[str]:
        """Return the paths of all objects that begin with `prefix`, ascending by code point.

        All are requested before the first is returned, because not every store sorts. obstore lists by whole path
        parts, so all objects in the prefix's last directory are requested.
        """
        sizes = await self.until_done(None, lambda scope: self._pages(scope, prefix))
        names = sorted(sizes)
        # Web consoles create folders as empty objects whose names end with "/". obstore drops the slash, and the name
        # without it cannot be read. Names that may be of a folder are checked.
        suspects = [name for name in names if not sizes[name] and _may_be_folder(name, names)]
        folders = {
            name
            for name, is_folder in zip(suspects, await self._all(self._is_missing, suspects), strict=True)
            if is_folder
        }
        return [name for name in names if name not in folders] if folders else names

    @property
    def server(self) -> str:
        """Return the root's URL and the endpoint, like `RetryingClient.server`."""
        return f"{self.location.url} at {self._endpoint}" if self._endpoint else self.location.url

    def where(self, path: str | None) -> str:  # noqa: ARG002 - the root is enough: texts name the path, too
        """Return the root's URL, for objects as well, like `RetryingClient.where`."""
        return self.location.url

    # --- failures

    def classify_error(self, error: BaseException, path: str | None) -> RequestFailed | None:
        """Classify an error by the function `classify_error`, with the root and the policy's statuses."""
        failed = classify_error(error, path, self.location.url, self._retry.statuses)
        if failed is not None and failed.kind.startswith("status"):
            self.answered(busy=failed.retryable)
        return failed

    async def until_done(self, path: str | None, step: Callable[[Scope], Awaitable[_R]]) -> _R:
        """Repeat `step` until it succeeds, or its failure is final. `path`: the object; None: a listing."""
        loop = asyncio.get_running_loop()
        attempts: Attempts | None = None
        began = loop.time()
        while True:
            try:
                async with self.owner.scope() as scope:
                    return await step(scope)
            except BaseException as error:
                failed = self.classify_error(error, path)
                if failed is None:
                    raise
                # For a listing, obstore has retried the page until the budget was used up.
                attempts = attempts or self.attempts(began, share=1.0 if path is None and self.reached else 0.5)
                delay = self.judge(path, failed, attempts, loop.time())
            await self.owner.sleep(delay)

    # --- listings

    async def _pages(self, scope: Scope, prefix: str) -> dict[str, int]:
        from obstore import list as list_objects

        directory = prefix.rpartition("/")[0]
        opened = self.owner.use()
        sizes: dict[str, int] = {}
        async with self.owner.slots:
            # obstore retries each page until the budget is used up; not before the store has answered.
            limit = 2 * (self._retry.budget_s + self._retry.cap_s) + self._head_s
            store = opened.listings if self.reached else opened.objects
            scope.limit(self.patience(limit))
            async for page in list_objects(store, directory or None, chunk_size=_PAGE):
                count("requests")
                self.answered()
                scope.limit(limit)
                sizes.update({each["path"]: each["size"] for each in page if each["path"].startswith(prefix)})
        return sizes

    async def _is_missing(self, name: str) -> bool:
        try:
            await self.meta(name)
        except ObjectNotFound:
            return True
        return False

    async def _all(self, ask: Callable[[str], Coroutine[Any, Any, _R]], names: list[str]) -> list[_R]:
        """Call `ask` for every name, up to 64 concurrently; results in order."""
        answers: list[_R] = []
        for start in range(0, len(names), 64):
            answers += await gather_all(ask(name) for name in names[start : start + 64])
        return answers


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


def _may_be_folder(name: str, names: list[str]) -> bool:
    """Return whether an empty object may be a folder: other names lie below it, or its name has no suffix."""
    below = name + "/"
    location = bisect_left(names, below)
    if location < len(names) and names[location].startswith(below):
        return True
    return "." not in name.rpartition("/")[2]


_DEBUG = "Debug source:"
_STATUS = re.compile(r"\binner: (?:Status|Response) \{\s*status: ([1-5][0-9]{2}),")
_STATUS_WORDS = re.compile(r"status code: ([1-5][0-9]{2})\b")
_KIND = re.compile(r"\bHttpError \{\s*kind: ([A-Za-z]+)")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,60})</Code>")
_NO_STORE = frozenset({"NoSuchBucket", "ContainerNotFound"})  # a 404 that is not about the object
_ARCHIVED = "InvalidObjectState"  # a 403 that is about the object: it is in an archive, and must be restored first

# Failures without a status that are not retryable. First connections: a certificate, an unknown host, an invalid URL.
_FATAL_TEXTS = (
    "invalid peer certificate",
    "certificate verify failed",
    "Name or service not known",
    "nodename nor servname",
    "URL scheme is not allowed",
    "builder error",
    # Responses that violate the protocol: no range, another range, no length.
    "NotPartial",
    "NoContentRange",
    "ParseContentRange",
    "InvalidContentRange",
    "UnexpectedRange",
    "MissingContentLength",
    "InvalidContentLength",
)

_FATAL_CLASSES = frozenset({"NotSupportedError", "NotImplementedError", "UnknownConfigurationKeyError"})

# Metadata services, from which machines in a cloud get their role's keys; elsewhere they do not answer.
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")

_KINDS = {
    "Connect": ("connection", "no connection"),
    "Request": ("connection", "the connection broke before the answer"),
    "Timeout": ("stalled", "nothing arrived in time"),
    "Interrupted": ("broken body", "the connection broke in the middle of the answer"),
}

# Maximum length of obstore's own text in a message.
_MOST_WORDS = 400


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that `error` is about; None if its text names no status."""
    words, _, debug = str(error).partition(_DEBUG)
    match = _STATUS.search(debug) or _STATUS_WORDS.search(words)
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
    name = type(error).__name__
    theirs = type(error).__module__.startswith("obstore")
    if not theirs and not isinstance(error, FileNotFoundError | ValueError):
        return None  # a bug in this package or in a credential provider
    whole = str(error)
    words = _words(whole)
    subject = repr(path) if path is not None else "the listing"
    if name == "InvalidPathError" or isinstance(error, ValueError):
        text = f"obstore cannot name {subject} in {where}: {words}"
        if path is None:
            text = (
                f"{where} holds an object whose name is no path, and cannot be listed: {words}; name the objects "
                "yourself, or open the transport at a prefix without it"
            )
        return _final("path", words, InvalidPath(text, path=path), error)
    status = status_of(error)
    code = match[1] if (match := _CODE.search(whole)) else ""
    if isinstance(error, FileNotFoundError) or status == 404:
        missing = ObjectNotFound(f"{subject} does not exist in {where}: {words}", path=path)
        missing.about_sample = code not in _NO_STORE
        return _final("status 404", words, missing, error)
    if status in {401, 403, 407} or name in {"PermissionDeniedError", "UnauthenticatedError"}:
        note = f" ({code})" if code else ""
        denied = AccessDenied(
            f"no permission to read {subject} in {where}{note}: {words}. Check the credentials; some stores "
            "answer this for missing objects as well, to those who may not list them",
            path=path,
        )
        denied.about_sample = code == _ARCHIVED
        return _final(f"status {status or 403}", words, denied, error)
    if status is not None:
        retryable = status in statuses
        return RequestFailed(
            f"status {status}", words, retryable=retryable, cause=error, final=_failed(subject, where, words, path)
        )
    if "BareRedirect" in whole:
        words += "; pass region= the bucket's region"
        return _final("redirect", words, _failed(subject, where, words, path), error)
    kind, text = "store", words
    if match := _KIND.search(whole):
        kind, text = _KINDS.get(match[1], ("store", words))
        text = f"{text}: {words}" if text != words else words
    if any(each in whole for each in _METADATA):
        text += "; no credentials were found, so the cloud's metadata service was asked for them: set them in the "
        text += "environment, pass credentials=, or pass skip_signature=True if the bucket is public"
    retryable = name not in _FATAL_CLASSES and not any(each in whole for each in _FATAL_TEXTS)
    return RequestFailed(kind, text, retryable=retryable, cause=error, final=_failed(subject, where, text, path))


def _final(kind: str, text: str, final: TransportError, error: Exception) -> RequestFailed:
    return RequestFailed(kind, text, retryable=False, cause=error, final=final)


def _failed(subject: str, where: str, words: str, path: str | None) -> ReadFailed:
    return ReadFailed(f"reading {subject} failed: {where}: {words}", path=path)


def _words(text: str) -> str:
    """Return the error's own sentence, on one line and shortened."""
    line = " ".join(text.partition(_DEBUG)[0].split())
    return line if len(line) <= _MOST_WORDS else line[: _MOST_WORDS - 3] + "..."


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
