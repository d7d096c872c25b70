"""Images end to end: from a dataset that has them ready, through workers, to checked batches on the device.

The clock runs in the middle of an epoch, when rings and page-locked memory are in their steady state; the device's work
is waited for at both ends. Every batch is summed on the device inside the clock, alike for all loaders.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from asyncloader import AsyncDataLoader

from .gpu_card import Card
from .gpu_content import ImageCheck, ReadyImages
from .gpu_loaders import open_loader
from .gpu_plan import OURS, SPDLS, GpuJob, Outcome, cpu_metric, end_metric, staged_metric

WARM_UP_S = 0.7
WARM_UP_EACH = 4  # batches of each worker, at least: rings have grown and are page-locked then


class Window:
    """Takes batches and measures those between warm-up and end.

    Both ends lie where the batches that came are a multiple of the workers: slow ones come in bursts of one each.

    Args:
        card: where batches come.
        check: looks at them.
        workers: of the loader.
        seconds: least length of the measured part.
    """

    def __init__(self, card: Card, check: ImageCheck, workers: int, seconds: float) -> None:
        self._card = card
        self._check = check
        self._workers = workers
        self._seconds = seconds
        self._batches = 0
        self._first = 0.0
        self._began: tuple[float, float, int] | None = None  # clock, CPU seconds, batches
        self.batches_a_second = 0.0
        self.cpu = 0.0
        """CPU seconds of this process for a batch."""
        self.staged: float | None = None
        """The share of our batches that did not come straight from a ring."""

    def take(self, batch: Any) -> bool:
        """Check a batch; True at the end of the measured part."""
        if self._batches == 0:
            self._first = time.perf_counter()
        warm = self._began is not None
        (self._check.note if warm else self._check.compare)(batch)
        self._batches += 1
        if self._batches % self._workers:
            return False
        now = time.perf_counter()
        if self._began is None:
            if self._batches >= WARM_UP_EACH * self._workers and now - self._first >= WARM_UP_S:
                self._card.synchronize()
                self._began = (time.perf_counter(), time.process_time(), self._batches)
            return False
        if now - self._began[0] < self._seconds:
            return False
        self._card.synchronize()
        began, cpu, before = self._began
        count = self._batches - before
        self.batches_a_second = count / (time.perf_counter() - began)
        self.cpu = (time.process_time() - cpu) / count
        return True


def read(loader: Any, take: Callable[[Any], bool]) -> None:
    """Read a loader, by ``async for`` on uvloop if it is made for that, until `take` says so; then close it."""
    if isinstance(loader, AsyncDataLoader):
        import uvloop

        uvloop.run(_read_async(loader, take))
        return
    batches = iter(loader)
    for batch in batches:
        if take(batch):
            break
    if hasattr(loader, "close"):
        loader.close()


async def _read_async(loader: AsyncDataLoader[Any], take: Callable[[Any], bool]) -> None:
    async with loader:
        async for batch in loader:
            if take(batch):
                break


_UNFINISHED: list[Any] = []
"""Loaders that take long to stop; they end with the process."""


def end(job: GpuJob) -> Outcome:
    """(b): samples per second, and CPU seconds of this process per batch, with each number of workers. If the loader
    fails with a number of workers, the other numbers are still measured.
    """
    card = Card(job.device)
    dataset = ReadyImages(getattr(torch, job.workload))
    pool = dataset.pool.to(card.device)
    outcome = Outcome({}, [])
    for workers in job.workers:
        try:
            window = _measure(job, workers, card, dataset, pool)
        except Exception as error:
            traceback.print_exc()
            outcome.failures.append(f"{workers} workers: {type(error).__name__}: {error}"[:300])
            continue
        outcome.figures[end_metric(job.workload, workers)] = {job.loader: window.batches_a_second * job.batch}
        outcome.figures[cpu_metric(job.workload, workers)] = {job.loader: window.cpu}
        if window.staged is not None:
            outcome.figures[staged_metric(job.workload, workers)] = {job.loader: window.staged}
    return outcome


def _measure(job: GpuJob, workers: int, card: Card, dataset: ReadyImages, pool: torch.Tensor) -> Window:
    check = ImageCheck(pool, job.batch)
    window = Window(card, check, workers, job.seconds)
    loader = open_loader(job.loader, dataset, job.batch, workers, card.device)
    if job.loader in SPDLS:
        _UNFINISHED.append(loader)
    read(loader, window.take)
    if job.loader in OURS:
        figures = loader.stats()
        window.staged = figures["device/staged_batches"] / figures["data/batches"]
    check.settle()
    return window
