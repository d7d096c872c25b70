"""Watches user code line by line: which line changed a value, where two runs part, which line used a handle.

Data path: user code -> [watching] -> places. In processes of the verification only: a traced program runs many times
slower.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from types import FrameType
from typing import Any

from asyncloader.plain_context import plain_context
from asyncloader.verification.tokens import token
from asyncloader.verification.user_code import CodeLine, is_users, rank

_MOST_EVENTS = 100_000


@plain_context
def _tracing(trace: Callable[[FrameType, str, Any], Any]) -> Generator[None]:
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)


@plain_context
def changes(read: Callable[[], Any], least: int = 1) -> Generator[list[CodeLine]]:
    """Yield a list, which gets the user's lines during which `read()` came to return another value, in their order.

    Args:
        read: returns the value.
        least: the least rank of the files whose lines are looked at: 2 for the user's alone.
    """
    found: list[CodeLine] = []
    last: list[Any] = [read(), None]  # the value, and the line that runs

    def look() -> None:
        now = read()
        if now != last[0]:
            last[0] = now
            if last[1] is not None and last[1] not in found:
                found.append(last[1])

    def local(frame: FrameType, event: str, _: Any) -> Any:
        look()
        if event == "line":
            last[1] = _here(frame)
        elif event == "return":
            caller = frame.f_back
            last[1] = _here(caller) if caller is not None and is_users(caller.f_code) else None
        return local

    def trace(frame: FrameType, _: str, __: Any) -> Any:
        if rank(frame.f_code.co_filename) < least:
            return None
        if last[1] is None:
            last[0] = read()  # changed outside of user code
        else:
            look()
        return local

    with _tracing(trace):
        yield found
    if last[1] is not None:
        look()


def _here(frame: FrameType) -> CodeLine:
    return CodeLine(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


@plain_context
def record() -> Generator[list[tuple[str, int, str, str]]]:
    """Yield a list, which gets each user line that has run: file, line, function, and a token of all that it could
    change: the frame's variables, or the value that it returned.
    """
    events: list[tuple[str, int, str, str]] = []
    running: dict[int, int] = {}

    def note(frame: FrameType, line: int, value: Any) -> None:
        if len(events) < _MOST_EVENTS:
            events.append((frame.f_code.co_filename, line, frame.f_code.co_name, token(value, 7)))

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        line = running.get(id(frame))
        if event == "line":
            if line is not None:
                note(frame, line, frame.f_locals)
            running[id(frame)] = frame.f_lineno or 0
        elif event == "return":
            if type(arg).__name__ == "async_generator_wrapped_value":  # what an async generator yields
                arg = gc.get_referents(arg)
            note(frame, frame.f_lineno or 0, [frame.f_locals, arg])
            running.pop(id(frame), None)
        return local

    def trace(frame: FrameType, _: str, __: Any) -> Any:
        return local if is_users(frame.f_code) else None

    with _tracing(trace):
        yield events


@plain_context
def following(note: Callable[[str], None]) -> Generator[None]:
    """Note each of the user's lines before it runs, as ``file|line|function``."""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            note(f"{frame.f_code.co_filename}|{frame.f_lineno}|{frame.f_code.co_name}")
        return local

    with _tracing(lambda frame, _, __: local if rank(frame.f_code.co_filename) else None):
        yield


@plain_context
def called_before(calls: Mapping[CodeLine, Callable[[], object]]) -> Generator[None]:
    """Call a function before each of these lines runs."""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and (call := calls.get(_here(frame))) is not None:
            call()
        return local

    with _tracing(lambda frame, _, __: local if rank(frame.f_code.co_filename) else None):
        yield


def parting(first: Iterable[tuple[str, int, str, str]], second: Iterable[tuple[str, int, str, str]]) -> CodeLine | None:
    """Return the first line that had another effect in the second run than in the first."""
    before: CodeLine | None = None
    for one, other in zip(first, second, strict=False):
        place = CodeLine(*one[:3])
        if tuple(one[:3]) != tuple(other[:3]):
            return before or place
        if one[3] != other[3]:
            return place
        before = place
    return None


@plain_context
def uses(values: Iterable[Any]) -> Generator[dict[int, CodeLine]]:
    """Yield a dictionary, which gets the first user line that called a method of each value, by the value's id."""
    ids = {id(value) for value in values}
    found: dict[int, CodeLine] = {}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        owner = id(getattr(arg, "__self__", None)) if event == "c_call" else 0
        if owner in ids and owner not in found:
            caller: FrameType | None = frame
            while caller is not None and not rank(caller.f_code.co_filename):
                caller = caller.f_back
            if caller is not None:
                found[owner] = _here(caller)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
