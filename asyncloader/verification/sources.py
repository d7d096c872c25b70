"""Records where user code asks for what no seed decides (entropy, clocks, process ids), and can freeze the answers.

Data path: user code -> [sources] -> records. Installed in processes of the verification before the user's module is
imported, and in no other process.

A *site* is the user's line that asked. While a site is frozen, its answers follow from the site and from the number of
its earlier questions: a run in which all are frozen is reproducible, and a run in which all but one are frozen shows
whether the batches depend on that line.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import random
import secrets
import socket
import sqlite3
import sys
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from asyncloader.verification.user_code import CodeLine, place_of, rank

_THROUGH = {random.__file__, uuid.__file__, secrets.__file__, __file__}
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")


class Sources:
    """The wrapped functions of a process.

    Attributes:
        active: whether questions are recorded.
        frozen: the sites whose answers are fixed; None: all.
        sites: the user's lines that asked, with the name of the function, and how often.
        opened: where files, sockets and connections were opened, by the ids of the objects.
    """

    def __init__(self) -> None:
        self.active = False
        self.thawed: set[tuple[str, CodeLine]] | None = None
        self.sites: Counter[tuple[str, CodeLine]] = Counter()
        self.opened: dict[int, CodeLine] = {}
        self._opened_alive: dict[int, Any] = {}

    def asks(self, name: str) -> int | None:
        """Record a question; return the number that a frozen answer follows from, None for the true answer."""
        if not self.active:
            return None
        place = self._asking(sys._getframe(2))
        if place is None:
            return None
        site = (name, place)
        number = self.sites[site]
        self.sites[site] += 1
        if self.thawed is None or site in self.thawed:
            return None
        return int.from_bytes(hashlib.blake2b(f"{name} {place} {number}".encode(), digest_size=8).digest(), "big")

    @staticmethod
    def _asking(frame: Any) -> CodeLine | None:
        """Return the user's line, if it asked directly or through Python's modules of random numbers."""
        while frame is not None and frame.f_code.co_filename in _THROUGH:
            frame = frame.f_back
        if frame is None or not rank(frame.f_code.co_filename):
            return None
        return place_of(frame)

    def opens(self, value: Any, frame: Any) -> Any:
        """Note where an object was opened."""
        place = place_of(frame)
        if place is not None:
            try:
                weakref.finalize(value, self.opened.pop, id(value), None).atexit = False
            except TypeError:
                self._opened_alive[id(value)] = value
            self.opened[id(value)] = place
        return value

    def install(self) -> None:
        """Wrap the functions."""
        self._wrap_entropy()
        for name in _CLOCKS:
            setattr(time, name, self._clock(name, getattr(time, name)))
        pid = os.getpid
        os.getpid = lambda: pid() if self.asks("os.getpid") is None else 4711
        for module, name in ((builtins, "open"), (io, "open"), (socket, "create_connection"), (sqlite3, "connect")):
            setattr(module, name, self._opener(getattr(module, name)))
        sources, begin = self, socket.socket.__init__

        def init(sock: socket.socket, *args: Any, **kwargs: Any) -> None:
            begin(sock, *args, **kwargs)
            sources.opens(sock, sys._getframe(1))

        socket.socket.__init__ = init  # type: ignore[method-assign,assignment]

    def _opener(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any, **kwargs: Any) -> Any:
            return self.opens(function(*args, **kwargs), sys._getframe(1))

        opened.__name__ = function.__name__
        return opened

    def _clock(self, name: str, function: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            number = self.asks(f"time.{name}")
            if number is None:
                return function()
            fixed = 1_700_000_000 + number % 1000
            return fixed * 10**9 if name.endswith("_ns") else float(fixed)

        return read

    def _wrap_entropy(self) -> None:
        urandom = os.urandom

        def entropy(size: int) -> bytes:
            number = self.asks("os.urandom")
            return urandom(size) if number is None else random.Random(number).randbytes(size)

        os.urandom = random._urandom = entropy  # type: ignore[attr-defined]
        uuid1, seed_method = uuid.uuid1, random.Random.seed

        def made_uuid(*args: Any, **kwargs: Any) -> uuid.UUID:
            number = self.asks("uuid.uuid1")
            return uuid1(*args, **kwargs) if number is None else uuid.UUID(int=number)

        uuid.uuid1 = made_uuid
        sources = self

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            number = sources.asks("random.Random()") if a is None else None
            seed_method(generator, a if number is None else number, version)

        random.Random.seed = seed  # type: ignore[method-assign,assignment]
        random.seed = random._inst.seed
        draw = torch.seed

        def torch_seed() -> int:
            number = self.asks("torch.seed")
            if number is None:
                return draw()
            torch.manual_seed(number)
            return number

        torch.seed = torch.random.seed = torch_seed
        numpy_seed = np.random.seed

        def seed_numpy(seed: Any = None) -> None:
            number = self.asks("numpy.random.seed()") if seed is None else None
            numpy_seed(seed if number is None else number % 2**32)

        np.random.seed = seed_numpy
