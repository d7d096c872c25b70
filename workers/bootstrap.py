"""The entry point of a new worker process: handles the garbage collector, then calls `worker_main`.

Data path: pool start-up -> [bootstrap] -> worker.

The collector is paused while a worker is forked, and in a spawned worker until its arguments have been unpickled.

This module imports nothing heavy: it is unpickled, and pauses the collector, before the arguments are.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator
from time import perf_counter
from typing import Any

from asyncloader.base.process_hooks import in_forked_child


class Bootstrap:
    """The target of a worker's `Process`: called in the new process.

    Args:
        started: when the main process began to start this process. All times are those of `perf_counter`, which is the
            same clock in all processes of a machine.
        entered: when this process began; None: with the call, as it was forked.
        gc_stopped: whether the collector was paused then.
    """

    def __init__(self, started: float, entered: float | None = None, gc_stopped: bool = False) -> None:
        self._started = started
        self._entered = entered
        self._gc_stopped = gc_stopped

    def __call__(self, *arguments: Any) -> None:
        """Resume the collector if it was paused, and run `worker_main`."""
        entered = perf_counter() if self._entered is None else self._entered
        # Not at the top of the module: this imports torch, and unpickling the target imports the module before the
        # pause.
        from asyncloader.workers.worker import worker_main

        if self._gc_stopped:
            # The modules and objects that unpickling has made live as long as the process: the collector need not visit
            # them.
            gc.freeze()
            gc.enable()
        worker_main(self._started, entered, *arguments)

    # multiprocessing pickles the target before the arguments, so `_unpickled` runs before these are unpickled.
    def __reduce__(self) -> Any:
        return _unpickled, (self._started,)


def _unpickled(started: float) -> Bootstrap:
    """Pause the collector in a spawned process, unless it is off already (fork server, or the user's own setting)."""
    # Unpickling the arguments imports torch, which takes most of a second. A tenth of that would be spent in the
    # collector, which visits objects again and again that live as long as the process.
    gc_stopped = gc.isenabled()
    gc.disable()
    return Bootstrap(started, perf_counter(), gc_stopped)


@contextlib.contextmanager
def gc_paused() -> Generator[None]:
    """Context around the fork of a worker: garbage that exists at the fork is never collected in the child."""
    in_forked_child(_pause.end_in_child)
    with _pause.lock:
        if _pause.enabled is not None:  # a signal handler forks in the middle of another fork
            yield
            return
        # Under the lock: the end of another thread's fork would switch the collector on during this one.
        _pause.enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            enabled, _pause.enabled = _pause.enabled, None
            if enabled:
                gc.enable()


class _GcPause:
    """The pause of the collector while a worker is forked; one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.enabled: bool | None = None
        """Whether the collector was on before the pause; None while no worker is being forked."""

    def end_in_child(self) -> None:
        """End the pause in a forked child, also in a child that another thread forked during the pause."""
        if self.enabled is None:
            return
        # The parent's garbage must not be collected here: finalizers are meant for the process that created the
        # objects. A tensor that was used on a CUDA stream aborts the process when it is freed in a forked child.
        gc.freeze()
        if self.enabled:
            gc.enable()
        self.enabled = None
        self.lock = threading.RLock()  # the old one may be held by a thread that does not exist here


_pause = _GcPause()
