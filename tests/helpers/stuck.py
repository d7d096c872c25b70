"""Workers that do not answer, in every way that a dataset may cause: for tests of shutdown."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Callable
from typing import Any, Self

from torch.utils.data import Dataset

from tests.helpers.running import PATIENCE_S


def _pause() -> None:
    while True:
        signal.pause()


def _pause_in_c() -> None:
    pause = ctypes.PyDLL(None).pause  # PyDLL keeps the GIL: no thread and no handler of this process runs any more
    while True:
        pause()


def _ignore() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _fork_one_that_holds_everything() -> None:
    """Fork a grandchild from C code, so that no hook runs: it keeps copies of all open descriptors of the worker."""
    pid = ctypes.CDLL(None).fork()
    if not pid:
        _ignore()
        _pause_in_c()
    os.write(2, f"grandchild {pid}\n".encode())


STUCK: dict[str, tuple[Callable[[], None], ...]] = {
    "asleep": (_pause,),
    "in C with the GIL": (_pause_in_c,),
    "deaf to SIGTERM": (_ignore, _pause),
    "in C with the GIL, deaf to SIGTERM": (_ignore, _pause_in_c),
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), _pause),
    "with a child that holds all descriptors": (_fork_one_that_holds_everything, _ignore, _pause),
}


def get_stuck(how: str) -> None:
    """Get stuck in this way, and never return."""
    for act in STUCK[how]:
        act()


class Told:
    """A pipe through which forked workers send lines to their parent, read with a deadline."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()

    def tell(self, text: str) -> None:
        os.write(self._in, f"{text}\n".encode())

    def lines(self, count: int) -> list[str]:
        """Read `count` lines."""
        got = b""
        while got.count(b"\n") < count:
            assert select.select([self._out], [], [], PATIENCE_S)[0], f"nobody tells; so far {got!r}"
            got += os.read(self._out, 4096)
        return got.decode().splitlines()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)


class StuckAt(Dataset[Any]):
    """A dataset whose worker sends its pid and gets stuck at sample `index` or a later sample."""

    def __init__(self, how: str, told: Told, index: int = 4) -> None:
        self.how = how
        self.told = told
        self.index = index

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index >= self.index:
            self.told.tell(f"{os.getpid()}")
            get_stuck(self.how)
        return index
