"""Finds what makes batches differ, where that is cheap: draws from the process's generators, handles that cross a fork,
and parts that cannot be pickled.

Data path: job -> [causes: target -> loader] -> the process that reports. In a process of its own, whose functions of
numpy are replaced.

The loader is read without workers, under a profile function. Python calls that for each call of C code, and it notes
whether the call drew, or used a handle.
"""

from __future__ import annotations

import gc
import io
import random
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncloader.verification.runs import RunJob, opened
from asyncloader.verification.user_code import CodeLine, line_of_definition, line_of_frame
from asyncloader.workers.fetch.seeding import current_sample
from asyncloader.workers.setup_payload import find_unpicklable

_MOST_DRAWS = 50
_DEEPEST = 5  # of the attributes and containers in which an unpicklable part is looked for
_rand: Any = torch.rand
_TORCH = _rand.__self__  # which all of its functions belong to
_RANDOM: Any = random._inst
_NUMPY: Any = np.random.mtrand._rand


class Draw(NamedTuple):
    """A line that draws from a generator of the process; `in_sample`: while the loader makes a sample."""

    generator: str
    line: CodeLine
    in_sample: bool


@dataclass
class Causes:
    """The causes that a search has found.

    Attributes:
        draws: the lines that draw.
        handles: the lines that use a handle which was open when the workers would start, by its kind.
        unpicklable: a part that spawned workers cannot get, in words, and where it is defined.
    """

    draws: list[Draw] = field(default_factory=list)
    handles: dict[str, CodeLine] = field(default_factory=dict)
    unpicklable: tuple[str, CodeLine | None] | None = None


def search(batches: int, make: Callable[[], Any], _: Callable[[str], None]) -> Causes:
    """Read some batches, and return the causes that were seen."""
    watch = _Watch()
    with watch.watching():
        loader = opened(make, RunJob(batches=batches, seconds=0))
        watch.open, watch.found.unpicklable = _open_handles(), _unpicklable(loader)  # now: samples may open more
        with suppress(Exception):  # a run reports the error
            for _ in islice(loader, batches):
                pass
    return watch.found


def _unpicklable(loader: Any) -> tuple[str, CodeLine | None] | None:
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        path, value = find_unpicklable(name, getattr(loader, name), _DEEPEST)
        if path is not None:
            return f"{path}, a {type(value).__qualname__}, cannot be pickled", line_of_definition(value)
    return None


def _open_handles() -> dict[int, tuple[str, Any]]:
    """Return the open files, sockets and connections of this process, and their kinds, by their ids."""
    found: dict[int, tuple[str, Any]] = {}
    for each in gc.get_objects():
        kind = type(each)  # never `isinstance`, which asks objects that pretend to be others
        if issubclass(kind, io.IOBase) and not issubclass(kind, io.BytesIO | io.StringIO) and not each.closed:
            found[id(each)] = "an open file", each
        elif issubclass(kind, socket.socket):
            found[id(each)] = "an open socket", each
        elif issubclass(kind, sqlite3.Connection | sqlite3.Cursor):
            found[id(each)] = "an open connection of sqlite3", each
    return found


class _Watch:
    """A profile function that notes the user's lines.

    Attributes:
        found: the causes so far.
        open: the handles that are looked at: kept, so that no other object gets the id of one.
    """

    def __init__(self) -> None:
        self.found = Causes()
        self.open: dict[int, tuple[str, Any]] = {}
        self._mark = 0

    @contextmanager
    def watching(self) -> Generator[None]:
        """Context in which this thread, and those that it starts, are watched."""
        for name, function in list(vars(np.random).items()):  # which profile functions do not see
            if getattr(function, "__self__", None) is _NUMPY and name not in ("seed", "get_state", "set_state"):
                setattr(np.random, name, self._noted(function))
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            self._drew("numpy.random", sys._getframe(1))
            return function(*args, **kwargs)

        drawn.__name__ = drawn.__qualname__ = function.__name__
        drawn.__module__ = "numpy.random"  # it is pickled by name
        return drawn

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event not in ("c_call", "c_return"):
            return
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if owner is _RANDOM:
            if event == "c_return" and name in ("random", "getrandbits"):  # of which all draws are made
                self._drew("random", frame)
        elif owner is _TORCH or issubclass(type(owner), torch.Tensor):
            mark, self._mark = self._mark, hash(torch.default_generator.get_state().numpy().tobytes())
            if event == "c_return" and mark != self._mark:
                self._drew("torch", frame)
        elif event == "c_call" and (found := self.open.get(id(owner))) and _shares(found[0], name):
            line = line_of_frame(frame)
            # A forked process opens asyncloader's own again.
            if line is not None and not str(frame.f_globals.get("__name__")).startswith("asyncloader."):
                self.found.handles.setdefault(found[0], line)

    def _drew(self, generator: str, frame: FrameType) -> None:
        line = line_of_frame(frame)
        if line is not None and len(self.found.draws) < _MOST_DRAWS:
            draw = Draw(generator, line, current_sample() is not None)
            if draw not in self.found.draws:
                self.found.draws.append(draw)


def _shares(kind: str, method: str) -> bool:
    """Whether a method depends on what processes share after a fork: of a file the position."""
    if kind == "an open file":
        return method.startswith(("read", "seek", "__next__"))
    return method not in ("close", "fileno")
