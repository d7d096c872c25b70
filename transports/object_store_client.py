"""One store's requests, and what becomes of those that fail. Data path: download -> [client] -> session -> obstore."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from asyncloader.transports.broken import Broken
from asyncloader.transports.checks import check_path
from asyncloader.transports.client_owner import Scope
from asyncloader.transports.errors import InvalidPath, ObjectNotFound
from asyncloader.transports.object_store_config import Place, Settings, open_store
from asyncloader.transports.object_store_session import OpenStore, StoreOwner
from asyncloader.transports.object_store_trouble import trouble_of
from asyncloader.transports.retry import Attempts, RetryPolicy
from asyncloader.transports.retrying_client import RetryingClient
from asyncloader.transports.together import together

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

    from asyncloader.transports.object_store_config import Store

__all__ = ["StoreClient", "check_key"]

_R = TypeVar("_R")

_PAGE = 1000  # names that a store gives at a time


class StoreClient(RetryingClient[OpenStore]):
    """Requests below one root. The arguments are `ObjectStoreTransport`'s."""

    def __init__(self, place: Place, settings: Settings, retry: RetryPolicy, requests: int) -> None:
        def open_one(retries: bool) -> Store:
            return open_store(place, settings, retry if retries else None)

        super().__init__(StoreOwner(f"the transport of {place.url}", requests, open_one), retry)
        self.place = place
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
            async with self.owner.slots:
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

    def where(self, path: str | None) -> str:  # noqa: ARG002 - the root says enough: texts name the path, too
        """Give the root's URL, for an object as well. As `RetryingClient.where`."""
        return self.place.url

    # --- failures

    def trouble(self, error: BaseException, path: str | None) -> Broken | None:
        """As `trouble_of`."""
        return trouble_of(error, path, self.place.url, self._retry.statuses)

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
                # obstore has tried the pages of a listing again for as long as the budget is.
                attempts = attempts or self.attempts(began, share=1.0 if path is None else 0.5)
                delay = self.judge(path, broken, attempts, loop.time())
            await self.owner.sleep(delay)

    # --- listings

    async def _pages(self, scope: Scope, prefix: str) -> dict[str, int]:
        from obstore import list as list_objects

        directory = prefix.rpartition("/")[0]
        opened = self.owner.use()
        sizes: dict[str, int] = {}
        async with self.owner.slots:
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

    async def _all(self, ask: Callable[[str], Coroutine[Any, Any, _R]], names: list[str]) -> list[_R]:
        """Ask about every name, some at a time; in order."""
        answers: list[_R] = []
        for start in range(0, len(names), 64):
            answers += await together(ask(name) for name in names[start : start + 64])
        return answers


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
