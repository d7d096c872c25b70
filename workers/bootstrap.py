"""The first code of ours that runs in a worker process.

Data path: pool start-up -> [bootstrap] -> worker.

A forked worker is born with its parent's garbage, and must not collect it: what a finalizer does is meant for the process
that it was set up in (a tensor that was handed to a CUDA stream aborts when it is freed in a forked child). So the
collector rests while a worker is forked, and what is there is frozen in the child before the collector goes on.

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
from typing import Any, NamedTuple

__all__ = ["Bootstrap", "Links", "uncollected"]

_lock = threading.RLock()  # whoever holds it is forking a worker
_rests: bool | None = None  # while a worker is forked: whether the collector was on before


class Links(NamedTuple):
    """The descriptors that a worker shares with the main process; each an `InheritedFd`.

    Attributes:
        control: the worker's end of the control socket.
        lifeline: the pipe whose end ends the worker.
        stacks: the pipe into which it writes what it is doing.
        parent: the main process's pidfd, None where the system has none.
    """

    control: Any
    lifeline: Any
    stacks: Any
    parent: Any


class Bootstrap:
    """The target of a worker's `Process`."""

    def __init__(self, resting: bool = False) -> None:
        self._resting = resting

    def __call__(self, *arguments: Any) -> None:
        """`worker_main` with its arguments, the collector being what it was."""
        from asyncloader.workers.worker import worker_main

        if self._resting:
            gc.freeze()
            gc.enable()
        worker_main(*arguments)

    def __reduce__(self) -> Any:
        return _unpickled, ()


def _unpickled() -> Bootstrap:
    """In the new process. Under a fork server, or a user's site that has stopped the collector, it stays as it was."""
    resting = gc.isenabled()
    gc.disable()
    return Bootstrap(resting)


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Around the fork of a worker: garbage that is there at the fork is never collected in the child."""
    global _rests
    _install_fork_hook()
    with _lock:
        if _rests is not None:  # a signal handler forks in the middle of another fork
            yield
            return
        _rests = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            enabled, _rests = _rests, None
            if enabled:
                gc.enable()


@functools.cache
def _install_fork_hook() -> None:
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    """Also in a child that another thread of the parent forks meanwhile, where nobody else would end the rest."""
    global _lock, _rests
    enabled, _rests = _rests, None
    if enabled is None:
        return
    _lock = threading.RLock()
    gc.freeze()
    if enabled:
        gc.enable()
