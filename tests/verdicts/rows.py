"""The planted runs: their conditions, the options, the right verdicts, and the settings that the loader may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncloader import RemoteIterableDataset
from tests.verdicts.planted import (
    AsyncPlanted,
    Crowded,
    Leaking,
    Locked,
    Oversize,
    Pauses,
    Planted,
    Reading,
    Remembering,
    SlowSampler,
    Unequal,
    failing,
    files,
    holding,
    limited,
    multiplies,
    neighbours,
    nothing,
    shards,
    sleeps,
    slow_collate,
    storing,
    throttled,
    transfers,
)

TORCH, SEEDED = "torch", "seeded"
SEEDS = {TORCH: None, SEEDED: 1}
"""The loader's `seed` in each mode."""


@dataclass(frozen=True)
class Row:
    """A planted run.

    Attributes:
        name: the planted condition.
        bounds: the right verdicts, joined by "or".
        dataset: makes the dataset, given what the context `beside` gives.
        batch_size, num_workers: of the loader.
        options: further options of the loader.
        consume: called with each batch.
        beside: a context around the run.
        modes: those that may differ, or that can be.
        starts: whether the starts of workers are part of the rate.
    """

    name: str
    bounds: str
    dataset: Callable[[Any], Any]
    batch_size: int
    num_workers: int
    consume: Callable[[Any], Any] = nothing
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext[None]
    modes: tuple[str, ...] = (TORCH,)
    starts: bool = False


def _planted(kind: Callable[..., Any] = Planted, length: int = 800_000, **costs: Any) -> Callable[[Any], Any]:
    return lambda _: kind(11, length, **costs)


def _shards(pattern: str = "", **options: Any) -> Callable[[str], Any]:
    return lambda place: RemoteIterableDataset(f"{place}/{pattern}", **options)


_BOTH, _SEEDED = (TORCH, SEEDED), (SEEDED,)
_SMALL_RING = {"ring_bytes": 4 << 20}
_SMALL_MEMORY = {"worker_memory_limit": 64 << 20, "max_worker_restarts": 1_000_000}
_SLOW_SAMPLER = {"sampler": SlowSampler(800_000, 0.002)}

ROWS = (
    # Samples that wait.
    Row("slow storage", "fetch", _planted(waits=0.004), 8, 2, modes=_BOTH),
    Row("slow storage, no workers", "fetch", _planted(waits=0.004), 8, 0),
    Row("1 sample of 256 takes 0.1 s, others 2 ms", "fetch", _planted(waits=0.002, slow=256, times=50.0), 8, 2,
        modes=_BOTH),
    Row("1 sample of 64 takes 30 ms, others 1.5 ms, 1 batch ahead", "fetch",
        _planted(waits=0.0015, slow=64, times=20.0), 4, 4, options={"prefetch_factor": 1}, modes=_BOTH),
    Row("one lock that all workers wait for", "fetch", _planted(Locked, waits=0.004), 8, 2, modes=_BOTH,
        ),
    Row("one lock, one worker", "fetch", _planted(Locked, waits=0.004), 8, 1, modes=_BOTH),
    Row("an async dataset with 16 samples in flight", "fetch", _planted(AsyncPlanted, waits=0.02), 16, 1,
        options={"concurrency": 16}),
    Row("a store that waits, awaited", "fetch", _planted(AsyncPlanted, waits=0.1), 8, 0, modes=_SEEDED),
    Row("a crowded store", "fetch", _planted(Crowded, waits=0.05), 8, 0, modes=_SEEDED),
    Row("a crowded store, 2 workers", "fetch", _planted(Crowded, waits=0.05), 8, 2, modes=_SEEDED),
    Row("files that are not in the page cache", "fetch", lambda place: Reading(place, cold=True), 8, 2, beside=files),
    Row("a store that limits each connection", "fetch", _shards("{00..47}.jsonl"), 64, 1,
        beside=partial(storing, limited)),
    Row("a store that fails now and then", "store", _shards("{00..23}.jsonl"), 16, 2, beside=partial(storing, failing)),
    # Streams.
    Row("streams=2, decode waits 30 ms", "fetch", _shards(streams=2), 8, 2, options={"decode": sleeps(0.03)},
        beside=partial(shards, *[1000] * 8), modes=_SEEDED),
    Row("streams=6, decode waits 10 ms", "fetch", _shards(streams=6), 8, 2, options={"decode": sleeps(0.01)},
        beside=partial(shards, *[6000] * 24), modes=_SEEDED),
    Row("2 shards for 4 workers", "shards", _shards(), 8, 4, options={"decode": sleeps(0.002)},
        beside=partial(shards, 20_000, 20_000)),
    Row("1 huge shard and 7 small ones", "shards or slow worker or fetch", _shards(), 8, 4,
        options={"decode": sleeps(0.002)}, beside=partial(shards, *[8] * 7, 20_000)),
    Row("a stream of which one worker has a part", "shards", _planted(Unequal, waits=0.002, times={1: 0, 2: 0, 3: 0}),
        4, 4),
    Row("one slow worker", "slow worker", _planted(Unequal, waits=0.002, times={1: 8}), 4, 3),
    Row("states that take long to save", "snapshots", _planted(Remembering, size=20_000), 8, 2, sleeps(0.001)),
    # Samples that compute.
    Row("computing, 2 workers", "compute or cpus", _planted(computes=0.003), 8, 2, modes=_BOTH),
    Row("computing, no workers", "compute", _planted(computes=0.003), 8, 0, sleeps(0.02)),
    Row("waiting and computing, one worker", "fetch or compute", _planted(waits=0.002, computes=0.001), 8, 1,
        sleeps(0.01), modes=_BOTH),
    Row("photos that compute 15 ms, 2 workers anew each epoch", "startup or compute or cpus",
        _planted(computes=0.015, length=64), 8, 2, modes=_BOTH, starts=True),
    Row("a collate_fn that computes 20 ms", "compute or cpus", _planted(), 8, 1, options={"collate_fn": slow_collate}),
    Row("8 workers that compute on all CPUs", "cpus", _planted(computes=0.002), 8, 8),
    Row("a main process that computes in many threads", "cpus", _planted(computes=0.008), 8, 2, multiplies),
    Row("neighbours that compute, no workers", "compute or cpus", _planted(computes=0.004), 8, 0, beside=neighbours),
    Row("neighbours that compute, one worker", "compute or cpus", _planted(computes=0.004), 8, 1, beside=neighbours),
    Row("a control group's quota", "cpus", _planted(computes=0.004), 8, 1, beside=throttled),
    Row("files that are in the page cache", "compute or cpus or overhead", lambda place: Reading(place, cold=False),
        8, 2, beside=files),
    # The loader's own work.
    Row("tiny batches", "overhead", _planted(), 2, 2, modes=_BOTH),
    Row("batches of one small tensor", "overhead", _planted(), 1, 2, modes=_BOTH),
    Row("short epochs, workers anew each time", "startup", _planted(waits=0.0002, length=128), 8, 2, modes=_BOTH,
        starts=True),
    Row("a ring that is too small", "ring", _planted(nbytes=4 << 20), 2, 1, options=_SMALL_RING),
    Row("1 batch of 10 does not fit into the ring", "fetch", _planted(Oversize, waits=0.001), 8, 2,
        options=_SMALL_RING),
    Row("workers near their memory limit", "memory", _planted(Leaking, waits=0.001), 4, 2, options=_SMALL_MEMORY,
        modes=_SEEDED),
    # The main process.
    Row("a slow consumer", "consumer", _planted(waits=0.0005), 8, 2, sleeps(0.02), modes=_SEEDED),
    Row("a training step of 4 ms", "consumer", _planted(waits=0.0002), 8, 2, sleeps(0.004), modes=_BOTH,
        ),
    Row("batches copied to a device", "consumer", _planted(nbytes=1 << 18), 8, 2, transfers),
    Row("a consumer that pauses", "consumer or fetch", _planted(waits=0.0025), 8, 4, Pauses(), modes=_SEEDED),
    Row("a sampler that is slow", "sampler", _planted(waits=0.0005), 8, 2, options=_SLOW_SAMPLER, modes=_SEEDED,
        ),
    Row("a trainer that holds the GIL", "consumer process", _planted(waits=0.0002), 8, 2, beside=holding,
        modes=_BOTH),
)  # fmt: skip
