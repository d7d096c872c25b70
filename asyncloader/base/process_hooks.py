"""Registers functions that Python calls when this process forks or exits: each once, by the first object that needs it.

Data path: none. Importing the package registers nothing, so a program that forks without a loader pays nothing.

The functions are those of modules, and find their objects in the module's own set: hooks cannot be unregistered.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable


class _ThisProcess:
    pid = 0


THIS_PROCESS = _ThisProcess()
"""`pid` is the number of this process, also in children that Python forks; 0 until `own_pid` was called. It is read for
each batch, for which the system call of `os.getpid` takes 5 microseconds while the caches are cold.
"""


def own_pid() -> int:
    """Return the number of this process, and keep it in `THIS_PROCESS`."""
    THIS_PROCESS.pid = os.getpid()
    in_forked_child(own_pid)
    return THIS_PROCESS.pid


@functools.cache
def before_fork(hook: Callable[[], object]) -> None:
    """Call `hook` in this process before every fork. Hooks that were registered later are called first."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=hook)


@functools.cache
def in_forked_child(hook: Callable[[], object]) -> None:
    """Call `hook` in every child that Python forks, workers included, and in theirs. Hooks that were registered earlier
    are called first.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=hook)


@functools.cache
def at_exit(hook: Callable[[], object]) -> None:
    """Call `hook` when this process exits. Hooks that were registered later are called first."""
    # A forked child inherits the registration, but none of the threads, and locks that they may hold for ever: there
    # `_call_in` does nothing. For objects of its own the child registers the hook again.
    in_forked_child(at_exit.cache_clear)
    atexit.register(_call_in, os.getpid(), hook)


def _call_in(owner: int, hook: Callable[[], object]) -> None:
    if os.getpid() == owner:
        hook()
