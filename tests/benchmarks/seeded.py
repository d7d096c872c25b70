"""Probes of the cost of seeded mode and of states, and of a slow batch's cost to the others.

Run by `child.py`, each in a fresh process.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from .loaders import Pass, drive
from .plan import ASYNC, TORCH, TORCH_UNORDERED, Job
from .workloads import ContentError, IntSamples, SmallSamples

SHUFFLED = 100_000_000
RESUMED_STEP = 1_000_000
SLOW_EVERY, SLOW_S, FAST_S = 16, 0.1, 0.005
LINE_BATCHES = 160
COST_BATCHES, COST_BATCH, COST_TURNS = 300, 32, 5


class Uneven(Dataset[int]):
    """Sample i is i, after 5 ms of waiting; every sixteenth takes 20 times as long."""

    def __len__(self) -> int:
        return LINE_BATCHES

    def __getitem__(self, index: int) -> int:
        time.sleep(FAST_S if index % SLOW_EVERY else SLOW_S)
        return index


def make(name: str, dataset: Dataset[Any], *, seed: int | None, **options: Any) -> Any:
    """The loader called `name`; the seed is for ours."""
    if name == TORCH:
        return torch.utils.data.DataLoader(dataset, **options)
    if name == TORCH_UNORDERED:
        return torch.utils.data.DataLoader(dataset, in_order=False, **options)
    import asyncloader

    return getattr(asyncloader, name)(dataset, seed=seed, **options)


def _first_batch(name: str, loader: Any) -> Any:
    if name != ASYNC:
        return next(iter(loader))

    async def first() -> Any:
        async with loader:
            return await anext(aiter(loader))

    return asyncio.run(first())


def shuffle(job: Job) -> dict[str, Any]:
    """Seconds from `iter()` to the first batch of a shuffled epoch of 100 million samples, and the growth of memory."""
    loader = make(job.loader, IntSamples(SHUFFLED), seed=1, batch_size=32, shuffle=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    batch = _first_batch(job.loader, loader)
    seconds = time.perf_counter() - started
    if len(set(batch.tolist())) != 32:
        raise ContentError(f"{job.loader}: a shuffled batch with an index twice")
    return {"seconds": seconds, "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def cost(job: Job) -> dict[str, Any]:
    """Seconds per sample that seeded mode takes more than torch mode, without workers, where nothing hides them."""
    dataset = SmallSamples(COST_BATCHES * COST_BATCH)
    times: dict[int | None, list[float]] = {None: [], 1: []}
    for turn in range(COST_TURNS + 1):
        for seed in (None, 1) if turn % 2 else (1, None):
            epoch = Pass(lambda batch: int(batch["label"][0]))
            loader = make(job.loader, dataset, seed=seed, batch_size=COST_BATCH)
            drive(job.loader, lambda loader=loader: loader, iter([epoch]))  # type: ignore[misc]
            if epoch.results != list(range(0, len(dataset), COST_BATCH)):
                raise ContentError(f"{job.loader}, seed={seed}: {epoch.results[:4]}...")
            if turn:
                times[seed].append(epoch.ended - epoch.started)
    more = statistics.median(times[1]) - statistics.median(times[None])
    return {"seconds": more / len(dataset)}


def state(job: Job) -> dict[str, Any]:
    """Seconds of `state_dict()` in the middle of an epoch with 4 workers, and of resuming at step 1,000,000."""
    dataset = IntSamples((RESUMED_STEP + 100) * COST_BATCH)
    options: dict[str, Any] = {"seed": 1, "batch_size": COST_BATCH, "shuffle": True, "num_workers": 4}
    times: list[float] = []

    def look(loader: Any, count: int) -> None:
        for _ in range(count):
            started = time.perf_counter()
            loader.state_dict()
            times.append(time.perf_counter() - started)

    saved = _after_some(job.loader, make(job.loader, dataset, **options), look)
    saved["step"] = RESUMED_STEP
    resumed = make(job.loader, dataset, **options)
    started = time.perf_counter()
    resumed.load_state_dict(saved)
    batch = _first_batch(job.loader, resumed)
    seconds = time.perf_counter() - started
    expected = list(resumed.sampler.iter_from(RESUMED_STEP * COST_BATCH))[:COST_BATCH]
    if batch.tolist() != expected:
        raise ContentError(f"{job.loader}: resumed with {batch.tolist()[:4]}, expected {expected[:4]}")
    return {"state": statistics.median(times), "resume": seconds}


def _after_some(name: str, loader: Any, look: Callable[[Any, int], None]) -> Any:
    """Call `look` between batches; the state after 50 of them."""
    if name != ASYNC:
        with loader:
            batches = iter(loader)
            for _ in range(50):
                next(batches)
                look(loader, 20)
            return loader.state_dict()

    async def run() -> Any:
        async with loader:
            batches = aiter(loader)
            for _ in range(50):
                await anext(batches)
                look(loader, 20)
            return loader.state_dict()

    return asyncio.run(run())


def line(job: Job) -> dict[str, Any]:
    """Batches per second when one batch in 16 takes 20 times as long, 2 workers."""
    rates: list[float] = []

    def schedule() -> Iterator[Pass]:
        for turn in range(3):
            epoch = Pass(int)
            yield epoch
            came = epoch.results if job.loader != TORCH_UNORDERED else sorted(epoch.results)
            if came != list(range(LINE_BATCHES)):
                raise ContentError(f"{job.loader}: {came[:20]}...")
            if turn:
                rates.append(epoch.rate)

    drive(
        job.loader,
        lambda: make(job.loader, Uneven(), seed=1, batch_size=1, num_workers=2, persistent_workers=True),
        schedule(),
    )
    return {"rate": statistics.median(rates)}
