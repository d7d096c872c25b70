"""obstore's clients, owned by one loop and process. Data path: download -> [session] -> obstore's threads -> store.

What an owner does is in `client_owner`; here is what is obstore's. It cannot close a client: dropped, its threads
close the idle connections, a moment after `aclose`. The threads themselves, as many as the machine has CPUs,
belong to the process and stay. *After a fork* they are the parent's alone: every use in the child raises at once
(`fork_hazard`), and the clients inherited by it are never collected there, because their locks may have been held
at the fork.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from asyncloader.transports.client_owner import ClientOwner
from asyncloader.transports.fork_hazard import note_use

if TYPE_CHECKING:
    from asyncloader.transports.object_store_config import Store

__all__ = ["OpenStore", "StoreOwner"]

# How long the interpreter's end waits for obstore's threads to let go of Python. See `_settle`.
_SETTLE_S = 0.05


class OpenStore:
    """What a transport has open in one loop and process.

    Args:
        open_store: makes obstore's client; its argument says whether obstore shall retry by itself.
    """

    def __init__(self, open_store: Callable[[bool], Store]) -> None:
        self._open_store = open_store
        self.objects = open_store(False)
        self._listings: Store | None = None

    @property
    def listings(self) -> Store:
        """The client for listings: obstore retries their pages itself, since nobody else could ask for one again."""
        if self._listings is None:
            self._listings = self._open_store(True)
        return self._listings


class StoreOwner(ClientOwner[OpenStore]):
    """The clients of one transport, and its calls in progress.

    Args:
        name: the transport for texts.
        requests: requests in progress at the same time at most, at least 1.
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
        _settle_at_exit()
        return opened

    async def close_client(self, client: OpenStore) -> None:
        """Do nothing: that it is dropped is all that can be done."""

    @staticmethod
    def leave_to_parent(client: OpenStore) -> object:
        """Keep the client. As `ClientOwner.leave_to_parent`."""
        return client


@cache  # once a process, by the first client: an import registers nothing
def _settle_at_exit() -> None:
    atexit.register(_settle, os.getpid())


def _settle(pid: int) -> None:
    """At the interpreter's end: give obstore's threads time to let go of the objects of the last requests.

    One that asks for Python's lock while the interpreter goes down is unwound by force, and Rust then aborts the
    process. Measured with obstore 0.12.1 and Python 3.11 on asyncio's own loop: 24 of 60 programs that ended right
    behind the last bytes of a stream, and none of 60 with this.

    It sleeps because there is nothing to wait for. Looked for and not found, up to obstore 0.12.1:

    - a way to close a client or a stream, to end or join the runtime, or to learn that it is idle: neither the
      functions nor the classes have one, and `threading` does not know the threads;
    - an event behind the last touch of Python. The future of a request is none: the thread resolves it by
      `call_soon_threadsafe`, which wakes the loop and lets go of the lock in doing so; it has to take the lock
      again after the caller went on. One more request as a barrier ends in the same way, and the tasks of the
      runtime have no order. `sys._current_frames` shows the threads that stand in Python code, and not those
      that come for the lock, as for a cancelled request.

    What they have left to do takes microseconds and waits for no network. So a bounded sleep, in which the lock is
    free, is right: it costs a process that used obstore 50 ms once, and errs only where a thread does not run for
    as long.
    """
    if pid == os.getpid():
        time.sleep(_SETTLE_S)
