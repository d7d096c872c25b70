"""The loaders under comparison, and the two loops that drive them: `for` and `async for`.

Both loops do the same between the same two clock readings, so that the ratio of two loaders is theirs alone.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import uvloop

from .peers import PEERS, open_peer
from .plan import ASYNC, ASYNC_PLAIN, OURS, TORCH_FILE_SYSTEM
from .workloads import Workload


@dataclass
class Pass:
    """One epoch as its consumer saw it.

    Args:
        consume: applied to each batch; its results are kept in `results`.
    """

    consume: Callable[[Any], Any]
    results: list[Any] = field(default_factory=list[Any])
    started: float = 0.0
    """Just before `iter()`, in seconds of `time.perf_counter`, as the next two."""
    first: float = 0.0
    ended: float = 0.0
    cpu: float = 0.0
    """CPU seconds of the main process, all its threads, between `started` and `ended`."""

    @property
    def rate(self) -> float:
        """Batches per second, the start of the epoch included."""
        return len(self.results) / (self.ended - self.started)


def build(name: str, workload: Workload, batches: int, *, workers: int = 2, start: str | None = None) -> Any:
    """Make the loader called `name` over `batches` batches of `workload`.

    Args:
        name: one of the names in `plan.py`.
        workload: what to load.
        batches: batches in an epoch.
        workers: worker processes; they persist from epoch to epoch.
        start: start method of the workers; None is torch's default.
    """
    dataset = workload.dataset(workload.samples(batches))
    if name in PEERS:
        return open_peer(name, dataset, workload, batches, workers)
    options: dict[str, Any] = {"batch_size": workload.batch_size, "num_workers": workers}
    if workers:
        options |= {"persistent_workers": True, "multiprocessing_context": start}
    if name in (*OURS, ASYNC_PLAIN):
        import asyncloader

        return getattr(asyncloader, name.partition(" ")[0])(dataset, **options)
    if name == TORCH_FILE_SYSTEM:
        torch.multiprocessing.set_sharing_strategy("file_system")
    return torch.utils.data.DataLoader(dataset, **options)


def drive(name: str, make: Callable[[], Any], schedule: Iterator[Pass]) -> float:
    """Make a loader, run one epoch for each pass that `schedule` yields, and close it.

    The schedule is advanced between epochs, outside all clocks: it checks one pass and picks the next.

    Returns:
        `time.perf_counter()` just before the loader was made.
    """
    if name in (ASYNC, ASYNC_PLAIN):
        factory = uvloop.new_event_loop if name == ASYNC else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_drive_async(make, schedule))
    return _drive(make, schedule)


def _drive(make: Callable[[], Any], schedule: Iterator[Pass]) -> float:
    built = time.perf_counter()
    loader = make()
    for epoch in schedule:
        consume, keep = epoch.consume, epoch.results.append
        cpu = time.process_time()
        epoch.started = time.perf_counter()
        iterator = iter(loader)
        batch = next(iterator)
        epoch.first = time.perf_counter()
        keep(consume(batch))
        for batch in iterator:
            keep(consume(batch))
        epoch.ended = time.perf_counter()
        epoch.cpu = time.process_time() - cpu
        del iterator, batch
    if hasattr(loader, "close"):
        loader.close()
    del loader
    gc.collect()  # torch's workers end when their iterator is collected
    return built


async def _drive_async(make: Callable[[], Any], schedule: Iterator[Pass]) -> float:
    built = time.perf_counter()
    async with make() as loader:
        for epoch in schedule:
            consume, keep = epoch.consume, epoch.results.append
            cpu = time.process_time()
            epoch.started = time.perf_counter()
            iterator = aiter(loader)
            batch = await anext(iterator)
            epoch.first = time.perf_counter()
            keep(consume(batch))
            async for batch in iterator:
                keep(consume(batch))
            epoch.ended = time.perf_counter()
            epoch.cpu = time.process_time() - cpu
            del iterator, batch
    return built
