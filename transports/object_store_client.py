"""One store's requests, and what becomes of those that fail. Data path: download -> [client] -> session -> obstore."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from asyncloader.transports.checks import check_path
from asyncloader.transports.errors import InvalidPath, ObjectNotFound, ReadFailed, TransportError
from asyncloader.transports.http_trouble import Broken
from asyncloader.transports.object_store_config import Place, Settings, open_store
from asyncloader.transports.object_store_session import Scope, StoreOwner
from asyncloader.transports.object_store_trouble import trouble_of
from asyncloader.transports.retry import Attempts, RetryCounts, RetryPolicy

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

__all__ = ["StoreClient", "check_key"]

_R = TypeVar("_R")

_PAGE = 1000  # names that a store gives at a time


class StoreClient:
    """Requests below one root. The arguments are `ObjectStoreTransport`'s."""

    def __init__(self, place: Place, settings: Settings, retry: RetryPolicy, requests: int) -> None:
        self.place = place
        self.counts = RetryCounts()
        self.owner = StoreOwner(
            f"the transport of {place.url}",
            requests,
            lambda retries: open_store(place, settings, retry if retries else None),
        )
        self._retry = retry
        # obstore keeps the two limits itself. This one ends the wait if its threads should not be there to do it.
        self._head_s = settings.connect_s + 2 * settings.stalled_s

    async def get(self, scope: Scope, path: str, options: GetOptions) -> GetResult:
        """Ask for an object, and wait for the head of the answer. The caller has a slot."""
        from obstore import get_async

        store = self.owner.use().objects
        scope.limit(self._head_s)
        result = await get_async(store, path, options=options)
        scope.limit(None)
        return result

    async def head(self, scope: Scope, path: str) -> ObjectMeta:
        """Ask what an object is. The caller has a slot."""
        from obstore import head_async

        store = self.owner.use().objects
        scope.limit(self._head_s)
        meta = await head_async(store, path)
        scope.limit(None)
        return meta

    async def meta(self, path: str) -> ObjectMeta:
        """Ask what an object is, until it is answered."""

        async def step(scope: Scope) -> ObjectMeta:
            async with self.owner.use().slots:
                return await self.head(scope, path)

        return await self._until_done(path, step)

    async def names(self, prefix: str) -> list[str]:
        """Give the paths of all objects that begin with `prefix`, ascending by code point.

        Everything is asked for before anything is given, since not every store sorts. obstore lists by whole
        parts of paths, so all that lies in the prefix's last directory is asked for.
        """
        sizes = await self._until_done(None, lambda scope: self._pages(scope, prefix))
        names = sorted(sizes)
        # Consoles make folders as empty objects whose names end with "/". obstore drops the slash, and then they
        # are names that nobody can read. Those that look like one are asked for.
        suspects = [name for name in names if not sizes[name] and _may_be_folder(name, names)]
        folders = {
            name
            for name, is_folder in zip(suspects, await self._all(self._is_missing, suspects), strict=True)
            if is_folder
        }
        return [name for name in names if name not in folders] if folders else names

    # --- failures

    def trouble(self, error: BaseException, path: str | None) -> Broken | None:
        """As `trouble_of`."""
        return trouble_of(error, path, self.place.url, self._retry.statuses)

    def attempts(self, began: float) -> Attempts:
        """Begin to keep account of an operation that has failed once."""
        return Attempts(self._retry, began)

    def judge(self, path: str | None, broken: Broken, attempts: Attempts, now: float) -> float:
        """Give the seconds to wait before the next attempt, and count it; raise the error if there is none."""
        if not broken.heals:
            raise broken.final or self.failure(path, broken) from broken.cause
        verdict = attempts.failed(now, broken.retry_after)
        if verdict.delay is None:
            self.counts.give_up()
            times = "once" if attempts.failures == 1 else f"{attempts.failures} times"
            raise self.failure(path, broken, f"tried {times}: {verdict.reason}") from broken.cause
        self.counts.retry(broken.kind, verdict.delay)
        return verdict.delay

    def failure(self, path: str | None, broken: Broken, note: str = "") -> TransportError:
        """Make the error of a request that failed for good."""
        subject = "the listing" if path is None else repr(path)
        text = f"reading {subject} failed: {self.place.url}: {broken.text}{'; ' + note if note else ''}"
        return ReadFailed(text, path=path)

    async def _until_done(self, path: str | None, step: Callable[[Scope], Awaitable[_R]]) -> _R:
        loop = asyncio.get_running_loop()
        attempts: Attempts | None = None
        began = loop.time()
        while True:
            try:
                async with self.owner.scope() as scope:
                    return await step(scope)
            except BaseException as error:
                broken = self.trouble(error, path)
                if broken is None:
                    raise
                attempts = attempts or self.attempts(began)
                delay = self.judge(path, broken, attempts, loop.time())
            await self.owner.sleep(delay)

    # --- listings

    async def _pages(self, scope: Scope, prefix: str) -> dict[str, int]:
        from obstore import list as list_objects

        directory = prefix.rpartition("/")[0]
        opened = self.owner.use()
        sizes: dict[str, int] = {}
        async with opened.slots:
            # obstore tries each page again for as long as the budget is.
            limit = 2 * (self._retry.budget_s + self._retry.cap_s) + self._head_s
            scope.limit(limit)
            async for page in list_objects(opened.listings, directory or None, chunk_size=_PAGE):
                scope.limit(limit)
                sizes.update({each["path"]: each["size"] for each in page if each["path"].startswith(prefix)})
        return sizes

    async def _is_missing(self, name: str) -> bool:
        try:
            await self.meta(name)
        except ObjectNotFound:
            return True
        return False

    async def _all(self, ask: Callable[[str], Awaitable[_R]], names: list[str]) -> list[_R]:
        """Ask about every name, some at a time; in order."""
        answers: list[_R] = []
        for start in range(0, len(names), 64):
            answers += await self._together(ask, names[start : start + 64])
        return answers

    @staticmethod
    async def _together(ask: Callable[[str], Awaitable[_R]], names: list[str]) -> list[_R]:
        async def one(name: str) -> _R:
            return await ask(name)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(name)) for name in names]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        return [task.result() for task in tasks]


def check_key(path: str) -> None:
    """Refuse a path that is not canonical, or holds a control character, which obstore does not allow.

    Raises:
        InvalidPath: it is one of these.
    """
    check_path(path)
    if not path.isprintable() and any(each < " " or each == "\x7f" for each in path):
        raise InvalidPath(
            f"{path!r} holds a control character, which obstore cannot read; rename the object", path=path
        )


def _may_be_folder(name: str, names: list[str]) -> bool:
    """Whether an empty object looks like a folder: something lies below its name, or the name has no suffix."""
    below = name + "/"
    place = bisect_left(names, below)
    if place < len(names) and names[place].startswith(below):
        return True
    return "." not in name.rpartition("/")[2]
