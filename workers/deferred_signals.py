"""Defers the program's signal handlers, Ctrl-C's above all, while something is made that must be known to be ended.

Data path: pool start-up -> [deferred_signals] -> process.

A handler that raises may strike between any two instructions, also between `os.fork` and the line that keeps the
child's number, or between `os.pipe` and the line that keeps the descriptors. To block signals does not prevent that:
the system gives a signal to any thread that has not blocked it, and Python runs the handler in the main thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_Handler = Callable[[int, FrameType | None], Any]

_PATIENCE_S = 1.0
"""A signal that comes again after this time is handled at once: what is being made may hang."""


def each_deferred(made: Generator[T], add: Callable[[T], object], local: bool) -> None:
    """Call `add` with each object that is made; Ctrl-C comes in between, when the object is known. `local`: else at any
    time.
    """
    over = False
    try:
        while not over:
            with handlers_deferred() if local else nullcontext():
                for each in made:
                    add(each)
                    break
                else:
                    over = True
    finally:
        if not over:
            with handlers_deferred() if local else nullcontext():
                made.close()


class handlers_deferred:  # noqa: N801 - used as a function; a generator would take more calls
    """Context in which Python's signal handlers do not run. They run at its end, and may raise there."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._over = False
        self._handlers: dict[int, _Handler] = {}
        self._noted: dict[int, tuple[float, FrameType | None]] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # Python runs handlers in the main thread only
            return
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # Ctrl-C, before its handler was exchanged
            self.__exit__()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        # In a child that another thread has forked meanwhile nobody ends this.
        if self._over or os.getpid() != self._owner:
            self._handlers[number](number, frame)
            return
        now = monotonic()
        if now - self._noted.setdefault(number, (now, frame))[0] > _PATIENCE_S:
            self._handlers[number](number, frame)

    def __exit__(self, *_: object) -> None:
        """Restore the handlers, and call those whose signals came. Raises what they raise, once all were restored."""
        self._over = True  # first: if Ctrl-C strikes below, the handlers that are not restored yet pass signals on
        try:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        finally:
            if self._noted:
                self._call()

    def _call(self) -> None:
        number, (_, frame) = self._noted.popitem()
        try:
            self._handlers[number](number, frame)
        finally:
            if self._noted:
                self._call()
