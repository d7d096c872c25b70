"""Gives a new worker process the default signal handlers, whatever the program that it was forked from had set.

Data path: pool start-up -> [default_signals] -> worker.

A forked process inherits the program's handlers: those of Python, those that libraries set in C, and the descriptor
that Python's handlers write to, which wakes the *main* process's event loop. In a worker they would do the main
process's work, such as write a checkpoint, or have the main process do it.

So signals are blocked while a worker is forked, and in the child until the handlers are the default ones. Signals that
are ignored stay so (``nohup``, SIGPIPE), except SIGTERM, by which the loader ends a busy worker. The user may set a
worker's own handlers in `worker_init_fn`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

_SYNCHRONOUS = {
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP")
    if hasattr(signal, name)  # not all on Windows
}
"""Sent for an instruction of the thread itself: while blocked, they would end the process without a trace."""


class _Fork(threading.local):
    """A fork in progress in this thread. The child's only thread is a copy of it."""

    mask: Iterable[int] | None = None
    """The signals that were blocked before; None: no fork is in progress."""


_fork = _Fork()


@contextlib.contextmanager
def signals_blocked() -> Generator[None]:
    """Context around the fork of a worker: this thread gets no signals, and the child none until it calls
    `set_worker_signals`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    outer = _fork.mask
    try:
        # Within `try`: the call may run a Python handler, which may raise, after it has blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _SYNCHRONOUS)
        _fork.mask = before if outer is None else outer  # a handler forks in the middle of another fork
        yield
    finally:
        _fork.mask = outer
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def set_worker_signals() -> None:
    """In a new worker process: set the default handlers, ignore Ctrl-C, which the main process handles, and wake no
    event loop. Signals that were blocked for the fork arrive now.
    """
    # A forked worker has inherited the descriptor that wakes the main process's event loop.
    signal.set_wakeup_fd(-1)
    # Through `disable`, not by setting the default handlers: faulthandler would believe that its handlers are set, and
    # would not set them when `worker_init_fn` asks for it.
    reports_crashes = faulthandler.is_enabled()
    faulthandler.disable()
    for each in signal.valid_signals():
        with contextlib.suppress(RuntimeError):  # faulthandler refuses the signals of crashes
            faulthandler.unregister(each)
    # All of them: those that a library has set in C are not known here.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # A library's handler may hide that a signal is ignored: Debian's torch, as it is imported, sets one for SIGHUP.
        ignored = signal.getsignal(number) is signal.SIG_IGN and number != signal.SIGTERM
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    # After the loop, which includes SIGINT: Python handles it unless the program has changed that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if reports_crashes:
        with contextlib.suppress(Exception):  # standard error is closed
            faulthandler.enable()
    # Last: the signals that were blocked since the fork arrive now, and meet the handlers set above.
    mask, _fork.mask = _fork.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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


# ------------------------------------------------------------------------- handlers of the main process that wait

# A handler that raises, Ctrl-C's above all, may strike between any two instructions, also between `os.fork` and the
# line that keeps the child's number, or between `os.pipe` and the line that keeps the descriptors. To block signals
# does not prevent that: the system gives a signal to any thread that has not blocked it, and Python runs the handler in
# the main thread. So the program's handlers wait while something is made that must be known to be ended.


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
