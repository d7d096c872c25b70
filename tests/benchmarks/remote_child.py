"""The program of the process of a measurement over the store: reads a loader for some seconds amid an epoch.

The clock starts when the loader's buffers and connections are in their steady state. What is read before and after is
checked alike: every sample is some object of the store, begins and ends as it, and comes once; the first sample of each
batch is compared whole.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import psutil

from asyncloader import AsyncDataLoader

from .plan import Job
from .remote_content import LARGE_SHARDS, SHARDS, Content, WrongContent
from .remote_plan import BARE, BATCH, OBJECTS_KIND, WORKERS

WARM_UP_S = 1.0


class Window:
    """Takes a loader's batches, checks them, and measures the part between warm-up and end.

    Both ends lie where the batches that came are a multiple of the workers: slow ones come in bursts of one each.

    Args:
        content: what may come.
        seconds: least length of the measured part.
    """

    def __init__(self, content: Content, seconds: float) -> None:
        self.samples = 0
        self._content = content
        self._seconds = seconds
        self._seen = np.zeros(content.objects, np.bool_)
        self._batches = 0
        self._first: float | None = None
        self._began: tuple[float, float, int] | None = None  # clock, CPU seconds, samples
        self._last = 0.0
        self._cpu: float | None = None

    def take(self, batch: Any) -> bool:
        """Check a batch, of shape (n, bytes of a sample); True at the end of the measured part."""
        self._seen[self._content.places(np.asarray(batch))] = True
        return self._count(len(batch))

    def take_one(self, index: int, data: bytes) -> bool:
        """Check an object that was asked for by its index; the same."""
        wanted, came = self._content.object(index), memoryview(data)
        full = self.samples % BATCH == 0
        if came[:8] != wanted[:8] or came[-8:] != wanted[-8:] or (full and came != wanted):
            raise WrongContent(f"object {index} came with other bytes")
        self._seen[index] = True
        return self._count(1)

    def _count(self, samples: int) -> bool:
        self.samples += samples
        self._batches += 1
        now = self._last = time.perf_counter()
        if self._first is None:
            self._first = now
        if self._batches % WORKERS:
            return False
        if self._began is None:
            if now - self._first >= WARM_UP_S:
                cpu = tree_cpu()
                self._began = (time.perf_counter(), cpu, self.samples)
            return False
        if now - self._began[0] < self._seconds:
            return False
        self._cpu = tree_cpu()
        return True

    def result(self) -> dict[str, float]:
        """Samples per second, and CPU seconds per sample of this process and its descendants.

        Raises:
            WrongContent: a sample came twice.
        """
        cpu = tree_cpu() if self._cpu is None else self._cpu
        if (came := int(self._seen.sum())) != self.samples:
            raise WrongContent(f"{self.samples} samples came, and {came} different ones")
        if self._began is None or self._began[2] == self.samples:
            raise RuntimeError(f"the epoch of {self.samples} samples was over before the measurement began")
        began, before, passed = self._began
        count = self.samples - passed
        return {
            "rate": count / (self._last - began),
            "cpu": (cpu - before) / count,
        }


def tree_cpu() -> float:
    """CPU seconds of this process and its descendants, also of those that ended and were waited for."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:  # its parent has its time now, and is late in this list or counted already
            continue
    return total


def measure(job: Job) -> dict[str, float]:
    """Measure the loader `job.loader` over the store at `job.store`, which ends with the latency."""
    # Samples are read-only views of the bytes that were read. torch warns when it makes tensors of those, and copies.
    warnings.filterwarnings("ignore", "The given NumPy array is not writ")
    content = Content()
    window = Window(content, job.seconds)
    if job.loader in BARE.values():
        import uvloop

        in_flight = next(count for count, name in BARE.items() if name == job.loader)
        from .remote_clients import read_bare

        uvloop.run(read_bare(job.store, content.objects, in_flight, window.take_one))
        return window.result()
    from .remote_loaders import TAR, open_remote

    samples = content.objects
    if job.loader in TAR:
        samples = (LARGE_SHARDS if job.workload == OBJECTS_KIND else SHARDS[job.workload]).objects
    loader = open_remote(job.loader, job.workload, job.store, samples)
    return read(loader, window)


def read(loader: Any, window: Window) -> dict[str, float]:
    """Read a loader, by `async for` on uvloop if it is made for that, until the window ends."""
    if not isinstance(loader, AsyncDataLoader):
        for batch in loader:
            if window.take(batch):
                break
        return window.result()
    import uvloop

    return uvloop.run(_read_async(loader, window))


async def _read_async(loader: Any, window: Window) -> dict[str, float]:
    async with loader:
        async for batch in loader:
            if window.take(batch):
                break
        return window.result()
