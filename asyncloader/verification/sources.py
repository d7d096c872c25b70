"""Records where user code asks for what no seed decides (entropy, clocks, process ids, the order of files), and can
freeze the answers.

Data path: user code -> [sources] -> records. Installed in processes of the verification before the user's module is
imported, and in no other process.

A *site* is the user's line that asked. While a site is frozen, its answers follow from the site and from the number of
its earlier questions: a run in which all are frozen is reproducible, and a run in which all but one are frozen shows
whether the batches depend on that line.
"""

from __future__ import annotations

import builtins
import ctypes
import datetime as dt
import gc
import glob
import hashlib
import io
import os
import pathlib
import random
import secrets
import socket
import sqlite3
import sys
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Self

import numpy as np
import torch

from asyncloader.verification.user_code import CodeLine, place_of, rank

_PATHLIB = (sys.modules[name] for name in ("pathlib._local", "pathlib._abc") if name in sys.modules)
_THROUGH = {__file__, "<frozen os>"} | {
    str(each.__file__) for each in (random, uuid, secrets, glob, pathlib, *_PATHLIB)
}
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")


class Sources:
    """The wrapped functions of a process.

    Attributes:
        active: whether questions are recorded.
        importing: whether the module is being imported.
        imported: the lines that asked meanwhile, which all got true answers.
        frozen: the sites whose answers are fixed; None: all.
        sites: the user's lines that asked, with the name of the function, and how often.
        opened: where files, sockets and connections were opened, by the ids of the objects.
    """

    def __init__(self) -> None:
        self.active = self.importing = False
        self.imported: list[tuple[str, CodeLine]] = []
        self.thawed: set[tuple[str, CodeLine]] | None = None
        self.sites: Counter[tuple[str, CodeLine]] = Counter()
        self.opened: dict[int, CodeLine] = {}
        self._opened_alive: dict[int, Any] = {}

    def asks(self, name: str) -> int | None:
        """Record a question; return the number that a frozen answer follows from, None for the true answer."""
        if not self.active and not self.importing:
            return None
        place = self._asking(sys._getframe(2))
        if place is None:
            return None
        site = (name, place)
        if self.importing:
            self._note_import(site)
            return None
        number = self.sites[site]
        self.sites[site] += 1
        if self.thawed is None or site in self.thawed:
            return None
        return int.from_bytes(hashlib.blake2b(f"{name} {place} {number}".encode(), digest_size=8).digest(), "big")

    def _note_import(self, site: tuple[str, CodeLine]) -> None:
        if rank(site[1].file) == 2 and site not in self.imported:  # not of the packages that it imports
            self.imported.append(site)

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

    def install(self, *, turned: bool) -> None:
        """Wrap the functions.

        Args:
            turned: names in folders come in the reverse of the file system's order, which is as good as any.
        """
        self._wrap_entropy()
        self._wrap_listings(turned=turned)
        self._wrap_dates()
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

    def _wrap_listings(self, *, turned: bool) -> None:
        listdir, scandir = os.listdir, os.scandir

        def names(*args: Any, **kwargs: Any) -> list[Any]:
            place, found = self._asking(sys._getframe(1)), listdir(*args, **kwargs)
            return found if place is None else self._ordered(found, None, ("os.listdir", place), turned=turned)

        def entries(*args: Any, **kwargs: Any) -> Any:
            place, found = self._asking(sys._getframe(1)), scandir(*args, **kwargs)
            if place is None:
                return found
            with found:
                return _Entries(self._ordered(list(found), attrgetter("name"), ("os.scandir", place), turned=turned))

        os.listdir, os.scandir = names, entries
        os.supports_fd |= {names, entries}  # which Python's own modules ask

    def _wrap_dates(self) -> None:
        """Wrap the clock of `datetime`, whose class takes no attributes: its dictionary does."""
        kind = dt.datetime
        members: Any = gc.get_referents(vars(kind))[0]
        for name in ("now", "utcnow"):
            members[name] = classmethod(self._date_clock(name, members[name]))
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))

    def _date_clock(self, name: str, plain: Any) -> Callable[..., dt.datetime]:
        def read(cls: type[dt.datetime], tz: dt.tzinfo | None = None) -> dt.datetime:
            number = self.asks(f"datetime.{name}")
            if number is None:
                now: dt.datetime = plain.__get__(None, cls)(*([tz] if name == "now" else []))
                return now
            return cls.fromtimestamp(1_700_000_000 + number % 10**9 / 1e6, tz)

        return read

    def _ordered(
        self, found: list[Any], key: Callable[[Any], Any] | None, site: tuple[str, CodeLine], *, turned: bool
    ) -> list[Any]:
        """Return what is in a folder: frozen in the order of its names, thawed against it."""
        if self.importing:
            self._note_import(site)
        if not self.active or self.thawed is None:
            return found[::-1] if turned else found
        self.sites[site] += 1
        return sorted(found, key=key, reverse=site in self.thawed)


class _Entries:
    """The entries of a folder, as `os.scandir` gives them.

    Args:
        found: the entries.
    """

    def __init__(self, found: Iterable[Any]) -> None:
        self._left: Iterator[Any] = iter(found)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration. Idempotent."""
        self._left = iter(())
