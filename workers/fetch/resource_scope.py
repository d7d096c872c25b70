"""Says to which worker the objects belong that a dataset's code opens, and closes them at its end.

Data path: worker: [resource_scope] around fetch. Without workers it runs in the consumer's process.

Each `DatasetReader` has a `ResourceScope`, which is the current one while its dataset's code runs: what is opened then
belongs to that worker, or without workers to that iterator. What is opened outside of any loader belongs to the
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextvars import ContextVar
from functools import partial
from typing import Any

from asyncloader.bridge import in_thread
from asyncloader.plain_context import plain_context
from asyncloader.workers.fetch.open_handles import Handles, SyncHandles, close_all_of
from asyncloader.workers.memory.live_objects import LiveObjects

CLOSE_SECONDS = 1.5
"""How long the end of an asynchronous worker waits for ``async`` closes: as long as for `__aexit__`."""


class ResourceScope:
    """The open objects of one worker, or of one iterator without workers, of all its resources."""

    def __init__(self) -> None:
        # Weakly: they belong to the resources, which end with the dataset. A `close` that is a method of the dataset
        # would otherwise keep that alive.
        self._members: LiveObjects[Handles[Any]] = LiveObjects()

    @plain_context
    def here(self) -> Generator[None]:
        """Context in which this scope is the current one."""
        token = current_scope.set(self)
        try:
            yield
        finally:
            current_scope.reset(token)

    def add(self, handles: Handles[Any]) -> None:
        """Have this scope's end be theirs."""
        self._members.add(handles)

    @property
    def used(self) -> bool:
        """Whether anything was opened."""
        return any(True for _ in self._members)

    def close(self) -> None:
        """End: close the objects that are not in use, and each other when it is given back. Waits for no lock, but for
        the user's `close`. Idempotent.

        Asynchronous objects are left open: `aclose` closes them.
        """
        for handles in self._members:
            handles.close()

    async def aclose(self, stream: Any) -> None:
        """`close`, of asynchronous objects, too: in the loop that opened them. Each step takes `CLOSE_SECONDS` at most.

        Args:
            stream: the iterator that is read, if any. A generator may have stopped where it uses an object.
        """
        if not self.used:
            return
        if isinstance(stream, AsyncGenerator):
            ending = asyncio.ensure_future(stream.aclose())
            await asyncio.wait([ending], timeout=CLOSE_SECONDS)
            if ending.done() and not ending.cancelled():
                ending.exception()  # marked as retrieved: the dataset is not read any more
            ending.cancel()
        blocking = [each for each in self._members if isinstance(each, SyncHandles)]
        if blocking:
            await in_thread(partial(close_all_of, blocking))
        pending: list[asyncio.Task[None]] = []
        for handles in self._members:
            handles.close()
            pending += handles.closings()
        if pending:
            await asyncio.wait(pending, timeout=CLOSE_SECONDS)
        for task in pending:
            task.cancel()


OF_PROCESS = ResourceScope()
"""That of code outside of any loader."""

current_scope: ContextVar[ResourceScope | None] = ContextVar("asyncloader_resource_scope", default=None)
"""The scope of the code that runs; None outside of any loader."""
