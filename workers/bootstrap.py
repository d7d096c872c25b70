"""The first code of ours that runs in a worker process.

Data path: pool start-up -> [bootstrap] -> worker.

A forked worker is born with its parent's garbage, and must not collect it: what a finalizer does is meant for the
process that it was set up in (a tensor that was handed to a CUDA stream aborts when it is freed in a forked child). So
the collector rests while a worker is forked, and what is there is frozen in the child before the collector goes on.

A spawned worker imports torch, which takes most of a second; a tenth of that goes to the garbage collector, which looks
again and again at objects that will live as long as the process. So it rests until the worker's arguments are there.

This module imports nothing heavy: it is unpickled, and with it the collector stopped, before the arguments are.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Generator
from typing import Any

__all__ = ["Bootstrap", "gc_paused"]


class Bootstrap:
    """The target of a worker's `Process`."""

    def __init__(self, gc_stopped: bool = False) -> None:
        self._gc_stopped = gc_stopped

    def __call__(self, *arguments: Any) -> None:
        """`worker_main` with its arguments, the collector being what it was."""
        from asyncloader.workers.worker import worker_main

        if self._gc_stopped:
            gc.freeze()
            gc.enable()
        worker_main(*arguments)

    def __reduce__(self) -> Any:
        return _unpickled, ()


def _unpickled() -> Bootstrap:
    """In the new process. Under a fork server, or a user's site that has stopped the collector, it stays as it was."""
    gc_stopped = gc.isenabled()
    gc.disable()
    return Bootstrap(gc_stopped)


@contextlib.contextmanager
def gc_paused() -> Generator[None]:
    """Around the fork of a worker: garbage that is there at the fork is never collected in the child."""
    _install_fork_hook()
    with _pause.lock:
        if _pause.enabled is not None:  # a signal handler forks in the middle of another fork
            yield
            return
        _pause.enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            enabled, _pause.enabled = _pause.enabled, None
            if enabled:
                gc.enable()


class _GcPause:
    """The collector's, while a worker is forked; by one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.enabled: bool | None = None
        """Whether the collector was on before; None while nobody forks."""

    def end_in_child(self) -> None:
        """Also in a child that another thread forks meanwhile, where nobody else would end it."""
        if self.enabled is None:
            return
        gc.freeze()
        if self.enabled:
            gc.enable()
        self.enabled = None
        self.lock = threading.RLock()  # of a thread that is not here


_pause = _GcPause()


@functools.cache
def _install_fork_hook() -> None:
    os.register_at_fork(after_in_child=_pause.end_in_child)
