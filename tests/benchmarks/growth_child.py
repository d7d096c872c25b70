"""The program of the fresh process of a point of a curve: `python -m tests.benchmarks.growth_child JOB OUTPUT`.

JOB is the JSON of a `Point` or a `Soak` (`growth_plan.py`); the result goes to the file OUTPUT as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from .growth_plan import TORCH, Point, Soak
from .harness import tree_memory
from .workloads import ContentError

LOOKS = 7
WARM_UP_S = 0.4
SEED = 11


class Computed(Dataset[npt.NDArray[np.int64]]):
    """Sample i is an array of int64, each of them i, made when it is asked for."""

    def __init__(self, samples: int, item_bytes: int) -> None:
        self.samples, self.length = samples, item_bytes // 8

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return np.full(self.length, index, np.int64)


class Epochs:
    """Batches of one epoch after the other; checks those of the first."""

    def __init__(self, loader: Any, samples: int, batch_size: int) -> None:
        self._loader, self._samples, self._batch_size = loader, samples, batch_size
        self._seen: set[int] | None = set()
        self.whole = 0  # epochs that ended
        self._iterator: Iterator[Any] = iter(loader)

    def __next__(self) -> int:
        batch = next(self._iterator, None)
        while batch is None:
            self._ended()
            self._iterator = iter(self._loader)
            batch = next(self._iterator, None)
        if self._seen is not None:
            self._check(batch, self._seen)
        return int(batch[-1, -1])

    def _check(self, batch: torch.Tensor, seen: set[int]) -> None:
        first, last = batch[:, 0].tolist(), batch[:, -1].tolist()
        known = len(seen)
        seen.update(first)
        if first != last or len(seen) != known + len(first) or not all(0 <= each < self._samples for each in first):
            raise ContentError(f"batch {first} ends as {last}; {known} samples came before it")

    def _ended(self) -> None:
        if self._seen is not None and len(self._seen) != self._samples:
            raise ContentError(f"{len(self._seen)} of {self._samples} samples came")
        self.whole += 1
        self._seen = None

    def check_no_more(self) -> None:
        """The checks take time, and the clock starts."""
        self._seen = None


def make(loader: str, dataset: Dataset[Any], batch_size: int, workers: int) -> Any:
    """The loader: shuffled, seeded, with workers that persist."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "persistent_workers": True}
    if loader == TORCH:
        return DataLoader(dataset, batch_size, generator=torch.Generator().manual_seed(SEED), **options)
    return our_loader()(dataset, batch_size, seed=SEED, **options)


def our_loader() -> Any:
    """Our DataLoader. A process that measures torch's does not import it."""
    import asyncloader

    return asyncloader.DataLoader


def measure(point: Point) -> dict[str, float]:
    """One point of a curve: seconds, bytes and batches a second."""
    dataset = Computed(point.samples, point.item_bytes)
    if point.loader != TORCH:
        our_loader()
    gc.collect()  # or a collection would fall into the constructor of some, and take longer than that
    built = time.perf_counter()
    loader = make(point.loader, dataset, point.batch_size, point.workers)
    constructor = time.perf_counter() - built
    batches = Epochs(loader, point.samples, point.batch_size)
    next(batches)
    first = time.perf_counter() - built
    warm = time.perf_counter()
    # Each worker has made its rings as large as they get; and an epoch that is short is checked to its end.
    while time.perf_counter() - warm < WARM_UP_S or (point.samples <= 1000 and not batches.whole):
        for _ in range(3 * point.workers):
            next(batches)
    batches.check_no_more()
    count, cpu, began = 0, time.process_time(), time.perf_counter()
    while count < 4 or time.perf_counter() - began < point.seconds:
        next(batches)
        count += 1
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    looks: list[int] = []
    for _ in range(LOOKS):
        for _ in range(point.workers):
            next(batches)
        look = tree_memory(os.getpid())
        looks.append(look.pss + look.unmapped)
    # Without a farewell: it would be the longest part where there are many workers, and is no part of the figures.
    return {
        "rate": count / seconds,
        "cpu": cpu / count,
        "memory": statistics.median(looks),
        "constructor": constructor,
        "first": first,
    }


def soak(job: Soak) -> list[dict[str, float]]:
    """What the loader holds in the middle of the second epoch, of one halfway and of the last."""
    loader = make(job.loader, Computed(job.batches * job.batch_size, 8), job.batch_size, job.workers)
    looks: list[dict[str, float]] = []
    began, at = time.perf_counter(), (1, job.epochs // 2, job.epochs - 1)
    for epoch in range(job.epochs):
        count = 0
        for batch in loader:
            count += 1
            if count == job.batches // 2 and epoch in at:
                del batch
                looks.append({"batches": epoch * job.batches + count, **held(), "seconds": time.perf_counter() - began})
        if count != job.batches:
            raise ContentError(f"epoch {epoch} had {count} batches, not {job.batches}")
    return looks


def held() -> dict[str, float]:
    """What this process and its descendants hold now."""
    gc.collect()
    objects = gc.get_objects()
    tasks = sum(isinstance(each, asyncio.Task) and not each.done() for each in objects)
    pids = [os.getpid(), *children(os.getpid())]
    return {
        "memory": tree_memory(os.getpid()).pss,
        "objects": len(objects),
        "tasks": tasks,
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),  # noqa: PTH208 - counted, not opened
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),  # noqa: PTH208
        "processes": len(pids),
    }


def children(pid: int) -> list[int]:
    """The processes that this one started, and that run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def main(job: str, output: str) -> None:
    """Measure, write the result, and end at once."""
    fields = json.loads(job)
    torch.set_num_threads(1)  # the consumer would fight the workers for the cores
    result: Any = soak(Soak(**fields)) if "epochs" in fields else measure(Point(**fields))
    Path(output).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
