"""Counts the calls of our own code, and how often it goes from one file to another, with a profile function.

Only frames of `asyncloader`, `workers` and `transports` count. Comprehensions do not: from Python 3.12 on they have no
frames of their own. A generator counts each time that it is resumed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

import asyncloader

_ROOT = asyncloader.__path__[0].removesuffix("asyncloader")
_OURS = tuple(f"{_ROOT}{room}/" for room in ("asyncloader", "workers", "transports"))
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")


class Count(NamedTuple):
    """The calls of our code during a run.

    Attributes:
        calls: frames of ours that were entered.
        changes: the number of times that the next such frame of a thread was in another file.
        files: the files of those frames.
        functions: how often each function was entered.
    """

    calls: int
    changes: int
    files: frozenset[str]
    functions: Counter[str]

    @classmethod
    def of(cls, *threads: list[CodeType]) -> Count:
        """Count the frames that were entered in each of these threads."""
        functions, files, changes = Counter[str](), set[str](), 0
        for entered in threads:
            names = [code.co_filename.removeprefix(_ROOT) for code in entered]
            changes += sum(name != before for before, name in pairwise(names))
            functions.update(f"{name} {code.co_qualname}" for name, code in zip(names, entered, strict=True))
            files.update(names)
        return cls(functions.total(), changes, frozenset(files), functions)

    def __str__(self) -> str:
        lines = [f"{number:5} {name}" for name, number in self.functions.most_common()]
        return "\n".join([f"{self.calls} calls, {self.changes} changes of file, {len(self.files)} files", *lines])


class Calls:
    """Records the frames of ours that are entered, in this thread and in those that start while it is `installed`."""

    def __init__(self) -> None:
        self._entered: dict[int, list[CodeType]] = {}  # of each thread
        self._numbers = Counter[str]()  # of each function

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; used as the profile function."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_OURS) and code.co_name not in _COMPREHENSIONS:
            self._entered.setdefault(threading.get_ident(), []).append(code)
            self._numbers[code.co_qualname] += 1

    def forget(self) -> None:
        """Start counting from zero."""
        for entered in list(self._entered.values()):
            entered.clear()
        self._numbers.clear()

    def count(self, thread: int | None = None) -> Count:
        """Return the counts, in one thread or over all. Each thread's changes of file are its own."""
        return Count.of(*(entered for each, entered in list(self._entered.items()) if thread in (None, each)))

    def number(self, function: str) -> int:
        """Return how often a function that runs in one thread was entered there."""
        return self._numbers[function]

    def rounds(self, function: str, thread: int) -> list[Count]:
        """Return the counts of a thread between each call of this function and the next."""
        entered = self._entered[thread]
        begins = [number for number, code in enumerate(entered) if code.co_qualname == function]
        return [Count.of(entered[begin:end]) for begin, end in pairwise(begins)]

    @contextmanager
    def installed(self) -> Generator[None]:
        """Context in which this is the profile function of this thread, and of those that it starts."""
        before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])


def counted(run: Callable[[], object]) -> Count:
    """Count the calls of our code while this function runs: in this thread, and in those that it starts."""
    calls = Calls()
    with calls.installed():
        run()
    return calls.count()
