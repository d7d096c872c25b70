"""Interrupts a call by Ctrl-C at each place where Python may check for signals, one place at a time; or by a signal
that comes just before the call waits.
"""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

MONITORING: Any = getattr(sys, "monitoring", None)
"""From Python 3.12 on; there `settrace` reports instructions only now and then."""
TOOL = 4

PROMPTS = ("CALL", "RESUME", "JUMP_BACKWARD", "BEFORE_WITH", "WITH_EXCEPT_START", "SEND")
"""Prefixes of the instructions where Python checks for signals: functions' beginnings, calls, jumps back."""


@cache
def _prompts(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions after which a signal may be handled."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith(PROMPTS))


class Interruption:
    """Raises KeyboardInterrupt at one place of a call: the `at`-th place in these functions where Python may have
    checked for signals since the instruction before.
    """

    def __init__(self, at: int, functions: Iterable[Any]) -> None:
        self.left = at
        self.codes: set[CodeType] = {function.__code__ for function in functions}
        self.before: dict[FrameType | CodeType, bool] = {}

    def __enter__(self) -> None:
        if MONITORING is None:
            sys.settrace(self.called)
            return
        events = MONITORING.events
        MONITORING.use_tool_id(TOOL, "interruption")
        MONITORING.register_callback(TOOL, events.INSTRUCTION, self.instruction)
        MONITORING.register_callback(TOOL, events.EXCEPTION_HANDLED, self.handled)
        MONITORING.set_events(TOOL, events.EXCEPTION_HANDLED)
        for code in self.codes:
            MONITORING.set_local_events(TOOL, code, events.INSTRUCTION)

    def __exit__(self, *_: object) -> None:
        if MONITORING is None:
            sys.settrace(None)
        else:
            for code in self.codes:
                MONITORING.set_local_events(TOOL, code, 0)
            MONITORING.set_events(TOOL, 0)
            MONITORING.free_tool_id(TOOL)
        self.before.clear()

    def instruction(self, code: CodeType, offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        before, self.before[code] = self.before.get(code, True), offset in _prompts(code)
        if before:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    def handled(self, code: CodeType, offset: int, error: BaseException) -> None:
        self.before[code] = False  # Python does not check on the way to a handler

    def called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in self.codes:
            return None
        frame.f_trace_opcodes = True
        self.before[frame] = True
        return self.traced

    def traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            self.before[frame] = False  # Python does not check on the way to a handler
        if event != "opcode":
            return self.traced
        if self.before[frame]:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        self.before[frame] = frame.f_lasti in _prompts(frame.f_code)
        return self.traced


class Interrupt(Exception):
    """Raised by a signal's handler, as Ctrl-C raises KeyboardInterrupt."""


@contextmanager
def unnoticed_signal(waits: Callable[[], bool]) -> Generator[None]:
    """Send this process a signal as soon as `waits()`, whose handler raises `Interrupt` in the main thread. The system
    gives it to another thread, so that it ends no wait of the main thread: so it is if it comes just before the wait.
    """

    def interrupt(*_: object) -> None:
        raise Interrupt

    def send() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        while not waits():
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    handler = signal.signal(signal.SIGUSR1, interrupt)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGUSR1, handler)
