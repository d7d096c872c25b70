"""The simulated resources of a run: the network, the store's answers, and the processors.

Data path: simulated_store, parquet_layout -> [machine] -> virtual time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

PIECE = 1 << 18
"""Bytes that arrive at a time: the streams of all workers take turns on the network after this number."""


class SharedLink:
    """The network between the store and all workers: carries one piece after the other.

    Args:
        bytes_per_s: its bandwidth; None: unlimited.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free = 0.0  # when it has carried all pieces so far

    async def carry(self, nbytes: int) -> None:
        """Return when a piece has been carried, after those that came before it."""
        if self._bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._free = max(now, self._free) + nbytes / self._bytes_per_s
        await asyncio.sleep(self._free - now)


class Processors:
    """The CPUs that all processes of the loader share, first come, first served.

    Args:
        number: CPU seconds per second, also a fraction: a control group's quota.
        crowded: how much longer computing takes, because processes take turns.
    """

    def __init__(self, number: float, crowded: float = 1.0) -> None:
        whole = max(1, math.ceil(number))
        self._slower = crowded * whole / number
        self._free = asyncio.Semaphore(whole)

    async def compute(self, seconds: float, process: asyncio.Lock | None = None) -> None:
        """Return when a computation is done that takes these CPU seconds.

        Args:
            seconds: of one CPU.
            process: a lock held for this time: the thread of a process that runs its event loop. None: another thread.
        """
        if seconds <= 0:
            return
        if process is None:
            async with self._free:
                await asyncio.sleep(seconds * self._slower)
            return
        async with process, self._free:
            await asyncio.sleep(seconds * self._slower)


class Traffic:
    """Counts the requests and bytes of all workers.

    Args:
        most_requests, most_pieces: after these, `full` is called, each time.
        full: ends the simulation.
    """

    def __init__(self, most_requests: int, most_pieces: int, full: Callable[[], None]) -> None:
        self.requests = 0
        self.nbytes = 0
        self._pieces = 0
        self._most_requests = most_requests
        self._most_pieces = most_pieces
        self._full = full

    def request(self) -> None:
        """Count a request."""
        self.requests += 1
        if self.requests > self._most_requests:
            self._full()

    def piece(self, nbytes: int) -> None:
        """Count a piece of an answer."""
        self.nbytes += nbytes
        self._pieces += 1
        if self._pieces > self._most_pieces:
            self._full()
