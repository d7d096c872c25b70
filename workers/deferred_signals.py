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

from asyncloader.plain_context import plain_context

T = TypeVar("T")

_Handler = Callable[[int, FrameType | None], Any]

_PATIENCE_S = 1.0
"""A signal that comes again after this time is handled at once: what is being made may hang."""


@plain_context
def handlers_deferred() -> Generator[None]:
    """Context in which Python's signal handlers do not run. They run at its end, and may raise there."""
    if threading.current_thread() is not threading.main_thread():  # Python runs handlers in the main thread only
        yield
        return
    deferred = _Deferred()
    try:
        deferred.begin()
        yield
    finally:
        deferred.end()


def each_deferred(made: Generator[T], add: Callable[[T], object], local: bool) -> None:
    """Call `add` with each object that is made; Ctrl-C comes in between, when the object is known. `local`: else at any
    time.
    """
    context = handlers_deferred if local else nullcontext
    try:
        while True:
            with context():
                add(next(made))
    except StopIteration:
        pass
    finally:
        with context():
            made.close()


class _Deferred:
    def __init__(self) -> None:
        self._owner = os.getpid()
        self._over = False
        self._handlers: dict[int, _Handler] = {}
        self._noted: dict[int, tuple[float, FrameType | None]] = {}

    def begin(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # In a child that another thread has forked meanwhile nobody ends this.
        if self._over or os.getpid() != self._owner:
            self._handlers[number](number, frame)
            return
        now = monotonic()
        if now - self._noted.setdefault(number, (now, frame))[0] > _PATIENCE_S:
            self._handlers[number](number, frame)

    def end(self) -> None:
        """Restore the handlers, and call those whose signals came. Raises what they raise, once all were restored."""
        self._over = True  # first: if Ctrl-C strikes below, the handlers that are not restored yet pass signals on
        try:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        finally:
            self._call()

    def _call(self) -> None:
        if self._noted:
            number, (_, frame) = self._noted.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self._call()
