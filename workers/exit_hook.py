"""At exit, pools that still have workers are stopped, before multiprocessing ends its daemonic children itself.

Data path: none.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from typing import Protocol

__all__ = ["install", "stop_at_exit"]


class Stoppable(Protocol):
    """A pool of workers."""

    def detach(self) -> None:
        """Stop listening."""
        ...

    def request_stop(self) -> None:
        """Ask all workers to leave, without waiting."""
        ...

    def stop(self) -> None:
        """Wait until they have."""
        ...


_pools: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def stop_at_exit(pool: Stoppable) -> None:
    """Have this pool stopped, if it is still there."""
    install()
    _pools.add(pool)


@functools.cache
def install() -> None:
    """Register the hook, once: what is registered later is called before it."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    pools = list(_pools)
    for pool in pools:
        with contextlib.suppress(Exception):
            pool.detach()
            pool.request_stop()
    for pool in pools:
        pool.stop()  # waits for one in progress, too
