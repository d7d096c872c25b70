"""The planted runs: their conditions, the options, the right verdicts, and the settings that the loader may choose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from asyncloader import RemoteIterableDataset
from tests.verdicts.planted import (
    AsyncPlanted,
    Blobs,
    Crowded,
    Failing,
    Holding,
    Leaking,
    Limited,
    Locked,
    Neighbours,
    Pauses,
    Planted,
    Reading,
    Remembering,
    Shards,
    SlowSampler,
    Throttled,
    Unequal,
    multiplies,
    nothing,
    sleeps,
    slow_collate,
    transfers,
)

TORCH, SEEDED = "torch", "seeded"
SEEDS = {TORCH: None, SEEDED: 1}
"""The loader's `seed` in each mode."""

LADDERS = {
    "num_workers": (1, 2, 4, 16, 64),
    "concurrency": (16, 32, 64, 128, 256),
    "prefetch_factor": (1, 2, 4, 8, 32),
}
"""The fixed numbers of each option that are measured beside "auto"."""


@dataclass(frozen=True)
class Row:
    """A planted run.

    Attributes:
        name: the planted condition.
        bounds: the right verdicts.
        dataset: makes the dataset, given what the context `beside` gives.
        options: of the loader.
        consume: called with each batch.
        beside: a context around the run.
        modes: those that may differ, or that can be.
        auto: options that are also given as "auto", each by itself.
        ladder: the fixed numbers beside "auto"; None: `LADDERS`.
        starts: whether the starts of workers are part of the rate.
    """

    name: str
    bounds: tuple[str, ...]
    dataset: Callable[[Any], Any]
    options: dict[str, Any]
    consume: Callable[[Any], None] = nothing
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext[None]
    modes: tuple[str, ...] = (TORCH, SEEDED)
    auto: tuple[str, ...] = ()
    ladder: tuple[int, ...] | None = None
    starts: bool = False


def _planted(kind: Callable[..., Any] = Planted, length: int = 800_000, **costs: Any) -> Callable[[Any], Any]:
    return lambda _: kind(11, length, **costs)


def _options(batch_size: int, num_workers: int, **more: Any) -> dict[str, Any]:
    return {"batch_size": batch_size, "num_workers": num_workers, **more}


_TORCH, _SEEDED, _WORKERS, _CONCURRENCY = (TORCH,), (SEEDED,), ("num_workers",), ("concurrency",)
_COMPUTING = ("compute", "cpus")

ROWS = (
    # ------------------------------------------------------------------------------------------ samples that wait
    Row(
        *("slow storage", ("fetch",), _planted(waits=0.004), _options(8, 2)),
        auto=("num_workers", "prefetch_factor"),
    ),
    Row("slow storage, no workers", ("fetch",), _planted(waits=0.004), _options(8, 0), modes=_TORCH),
    Row(
        *("1 sample of 256 takes 0.1 s, others 2 ms", ("fetch",)),
        *(_planted(waits=0.002, slow=256, times=50.0), _options(8, 2)),
        auto=_WORKERS,
    ),
    Row(
        *("1 sample of 64 takes 20 times as long, one batch ahead", ("fetch",)),
        *(_planted(waits=0.0015, slow=64), _options(4, 4, prefetch_factor=1)),
    ),
    Row("one lock that all workers wait for", ("fetch",), _planted(Locked, waits=0.004), _options(8, 2), auto=_WORKERS),
    Row("one lock, one worker", ("fetch",), _planted(Locked, waits=0.004), _options(8, 1)),
    Row(
        *("an async dataset with 16 samples in flight", ("fetch",)),
        *(_planted(AsyncPlanted, waits=0.02), _options(16, 1, concurrency=16)),
        modes=_TORCH,
    ),
    Row(
        *("a store that waits, awaited", ("fetch",), _planted(AsyncPlanted, waits=0.1), _options(8, 0)),
        modes=_SEEDED,
        auto=_CONCURRENCY,
    ),
    Row(
        *("a crowded store", ("fetch",), _planted(Crowded, waits=0.05), _options(8, 0)),
        modes=_SEEDED,
        auto=_CONCURRENCY,
    ),
    Row(
        *("a crowded store, 2 workers", ("fetch",), _planted(Crowded, waits=0.05), _options(8, 2)),
        modes=_SEEDED,
        auto=_CONCURRENCY,
    ),
    Row(
        *("files that are not in the page cache", ("fetch",), lambda at: Reading(at, cold=True), _options(8, 2)),
        beside=Blobs,
        modes=_TORCH,
    ),
    Row(
        *("a store that limits each connection", ("fetch",)),
        *(lambda url: RemoteIterableDataset(url + "/{00..47}.jsonl"), _options(64, 1)),
        beside=Limited,
        modes=_TORCH,
    ),
    Row(
        *("a store that fails now and then", ("store",)),
        *(lambda url: RemoteIterableDataset(url + "/{00..23}.jsonl"), _options(16, 2)),
        beside=Failing,
        modes=_TORCH,
    ),
    # ------------------------------------------------------------------------------------------ streams
    Row(
        *("streams=2, decode waits 30 ms", ("fetch",)),
        *(lambda at: RemoteIterableDataset(at + "/", streams=2), _options(8, 2, decode=sleeps(0.03))),
        beside=lambda: Shards(*[1000] * 8),
        modes=_SEEDED,
    ),
    Row(
        *("streams=6, decode waits 10 ms", ("fetch",)),
        *(lambda at: RemoteIterableDataset(at + "/", streams=6), _options(8, 2, decode=sleeps(0.01))),
        beside=lambda: Shards(*[1000] * 24),
        modes=_SEEDED,
        auto=_WORKERS,
        ladder=(1, 2, 3, 6, 12),
    ),
    Row(
        *("2 shards for 4 workers", ("shards",)),
        *(lambda at: RemoteIterableDataset(at + "/"), _options(8, 4, decode=sleeps(0.002))),
        beside=lambda: Shards(20_000, 20_000),
        modes=_TORCH,
    ),
    Row(
        *("1 huge shard and 7 small ones", ("shards", "slow worker", "fetch")),
        *(lambda at: RemoteIterableDataset(at + "/"), _options(8, 4, decode=sleeps(0.002))),
        beside=lambda: Shards(*[8] * 7, 20_000),
        modes=_TORCH,
    ),
    Row(
        *("a stream of which one worker has a part", ("shards",)),
        *(_planted(Unequal, waits=0.002, times={1: 0, 2: 0, 3: 0}), _options(4, 4)),
        modes=_TORCH,
    ),
    Row(
        "one slow worker", ("slow worker",), _planted(Unequal, waits=0.002, times={1: 8}), _options(4, 3), modes=_TORCH
    ),
    Row(
        *("states that take long to save", ("snapshots",)),
        *(_planted(Remembering, size=20_000), _options(8, 2), sleeps(0.001)),
        modes=_TORCH,
    ),
    # ------------------------------------------------------------------------------------------ samples that compute
    Row("computing, 2 workers", _COMPUTING, _planted(computes=0.003), _options(8, 2), auto=_WORKERS),
    Row("computing, no workers", ("compute",), _planted(computes=0.003), _options(8, 0), sleeps(0.02), modes=_TORCH),
    Row(
        *("waiting and computing, one worker", ("fetch", "compute")),
        *(_planted(waits=0.002, computes=0.001), _options(8, 1), sleeps(0.01)),
    ),
    Row(
        *("photos that compute 15 ms, 2 workers anew each epoch", ("startup", *_COMPUTING)),
        *(_planted(computes=0.015, length=64), _options(8, 2)),
        starts=True,
    ),
    Row(
        *("a collate_fn that computes 20 ms", ("compute",)),
        *(_planted(), _options(8, 1, collate_fn=slow_collate)),
        modes=_TORCH,
    ),
    Row("8 workers that compute on all CPUs", ("cpus",), _planted(computes=0.002), _options(8, 8), modes=_TORCH),
    Row(
        *("a main process that computes in many threads", ("cpus",)),
        *(_planted(computes=0.008), _options(8, 2), multiplies),
        modes=_TORCH,
    ),
    Row(
        *("neighbours that compute, no workers", _COMPUTING, _planted(computes=0.004), _options(8, 0)),
        beside=Neighbours,
        modes=_TORCH,
    ),
    Row(
        *("neighbours that compute, one worker", _COMPUTING, _planted(computes=0.004), _options(8, 1)),
        beside=Neighbours,
        modes=_TORCH,
    ),
    Row(
        *("a control group's quota", _COMPUTING, _planted(computes=0.004), _options(8, 1)),
        beside=Throttled,
        modes=_TORCH,
    ),
    Row(
        *("files that are in the page cache", (*_COMPUTING, "overhead"), lambda at: Reading(at, cold=False)),
        _options(8, 2),
        beside=Blobs,
        modes=_TORCH,
    ),
    # ------------------------------------------------------------------------------------------ the loader's own work
    Row("tiny batches", ("overhead",), _planted(), _options(2, 2)),
    Row("batches of one small tensor", ("overhead",), _planted(), _options(1, 2)),
    Row(
        *("short epochs, workers anew each time", ("startup",), _planted(waits=0.0002, length=128), _options(8, 2)),
        starts=True,
    ),
    Row(
        *("a ring that is too small", ("ring",), _planted(nbytes=4 << 20), _options(2, 1, ring_bytes=4 << 20)),
        modes=_TORCH,
    ),
    Row(
        *("oversize batches now and then", ("consumer", "fetch", "compute", "ring", "overhead")),
        *(_planted(waits=0.001, nbytes=1 << 16), _options(8, 2, ring_bytes=1 << 20)),
        modes=_TORCH,
    ),
    Row(
        *("workers near their memory limit", ("memory",), _planted(Leaking, waits=0.001)),
        _options(4, 2, worker_memory_limit=64 << 20, max_worker_restarts=1_000_000),
        modes=_SEEDED,
    ),
    # ------------------------------------------------------------------------------------------ the main process
    Row("a slow consumer", ("consumer",), _planted(waits=0.0005), _options(8, 2), sleeps(0.02), auto=_WORKERS),
    Row("a training step of 4 ms", ("consumer",), _planted(waits=0.0002), _options(8, 2), sleeps(0.004), auto=_WORKERS),
    Row("batches copied to a device", ("consumer",), _planted(nbytes=1 << 18), _options(8, 2), transfers, modes=_TORCH),
    Row(
        *("a consumer that pauses", ("consumer", "fetch"), _planted(waits=0.0025), _options(8, 4), Pauses()),
        modes=_SEEDED,
        auto=("prefetch_factor",),
    ),
    Row(
        *("a sampler that is slow", ("sampler",), _planted(waits=0.0005)),
        _options(8, 2, sampler=SlowSampler(800_000, 0.002)),
        modes=_SEEDED,
        auto=_WORKERS,
    ),
    Row("a trainer that holds the GIL", ("consumer process",), _planted(waits=0.0002), _options(8, 2), beside=Holding),
)
