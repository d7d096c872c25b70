"""Stops the worker pools of this process when it exits.

Data path: none; every pool is known here from before its first process on.
"""

from __future__ import annotations

import contextlib
from typing import Any

from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.process_hooks import at_exit

_pools: LiveObjects[Any] = LiveObjects()  # of `WorkerPool`s


def stop_at_exit(pool: Any) -> None:
    """Stop this pool at exit, if it still exists."""
    # Before multiprocessing's own hook, which would end the workers, its daemonic children, by SIGTERM.
    at_exit(stop_all_pools)
    _pools.add(pool)


def stop_all_pools() -> None:
    """Stop all pools of this process, and wait for that: a hook for `at_exit`."""
    pools = list(_pools)
    # All are asked before the first is waited for, so that their workers end at the same time.
    for pool in pools:
        # A pool that cannot be asked is ended below, like the others.
        with contextlib.suppress(Exception):
            pool.detach()
            pool.request_stop()
    for pool in pools:
        pool.stop()  # also waits for a `stop` in progress
