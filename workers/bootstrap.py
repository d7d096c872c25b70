"""The first code of ours that runs in a worker process.

Data path: pool start-up -> [bootstrap] -> worker.

A spawned worker imports torch, which takes most of a second; a tenth of that goes to the garbage collector, which looks
again and again at objects that will live as long as the process. So it rests until the worker's arguments are there.

This module imports nothing heavy: it is unpickled, and with it the collector stopped, before the arguments are.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

__all__ = ["Bootstrap", "Links"]


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
