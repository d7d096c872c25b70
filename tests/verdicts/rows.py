"""The planted runs: their conditions, the options, and the right verdicts.

A `Row` names the bound of a run. `Row.grid` has the settings among which the best is searched for: those of the options
that can have an effect there and alter neither order nor samples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from asyncloader import RemoteIterableDataset
from tests.verdicts.planted import (
    AsyncPlanted,
    Failing,
    Holding,
    Leaking,
    Limited,
    Locked,
    Neighbours,
    OneShard,
    Planted,
    Remembering,
    SlowSampler,
    SlowWorker,
    Throttled,
    multiplies,
    nothing,
    sleeps,
)


@dataclass(frozen=True)
class Row:
    """A planted run.

    Attributes:
        name: the planted condition.
        bounds: the right verdicts.
        dataset: makes the dataset from a seed.
        options: of the loader.
        grid: other options to try.
        consume: called with each batch.
        epochs: number of epochs read.
        beside: a context around the run.
    """

    name: str
    bounds: tuple[str, ...]
    dataset: Callable[[int], Any]
    options: dict[str, Any]
    grid: tuple[dict[str, Any], ...] = ()
    consume: Callable[[Any], None] = nothing
    epochs: int = 1
    beside: Callable[[], AbstractContextManager[None]] = nullcontext[None]


def workers(*numbers: int) -> tuple[dict[str, Any], ...]:
    """Return a grid of numbers of workers."""
    return tuple({"num_workers": number} for number in numbers)


PERSISTENT = tuple({"num_workers": number, "persistent_workers": True} for number in (1, 2, 4))
PREFETCH = tuple({"prefetch_factor": number} for number in (1, 4))

ROWS = [
    Row(
        "slow storage",
        ("fetch",),
        lambda seed: Planted(seed, 320, waits=0.004),
        {"batch_size": 8, "num_workers": 2},
        (*workers(0, 1, 4, 8, 16, 32, 64), *PREFETCH),
    ),
    Row(
        "slow storage, async dataset",
        ("fetch",),
        lambda seed: AsyncPlanted(seed, 1600, waits=0.02),
        {"batch_size": 16, "num_workers": 1, "concurrency": 16},
        ({"concurrency": 4}, {"concurrency": 64}, {"concurrency": 256}, *workers(0, 2)),
    ),
    Row(
        "slow decode, no workers",
        ("compute",),
        lambda seed: Planted(seed, 320, computes=0.003),
        {"batch_size": 8, "num_workers": 0},
        workers(1, 2, 4, 8),
        sleeps(0.02),
    ),
    Row(
        "tiny batches",
        ("overhead",),
        lambda seed: Planted(seed, 6000),
        {"batch_size": 2, "num_workers": 2},
        (*workers(0, 1, 4), *PREFETCH),
    ),
    Row(
        "slow consumer",
        ("consumer",),
        lambda seed: Planted(seed, 320, waits=0.0005),
        {"batch_size": 8, "num_workers": 2},
        workers(0, 1, 4),
        sleeps(0.02),
    ),
    Row(
        "start-up alone",
        ("startup",),
        lambda seed: Planted(seed, 128, waits=0.0002),
        {"batch_size": 8, "num_workers": 2},
        (*workers(0, 1, 4), *PERSISTENT),
        epochs=8,
    ),
    Row(
        "one slow worker",
        ("slow worker",),
        lambda seed: SlowWorker(seed, 80, 0.002),
        {"batch_size": 4, "num_workers": 3},
        PREFETCH,
    ),
    Row(
        "slow head of line",
        ("fetch",),
        lambda seed: Planted(seed, 480, waits=0.0015, slow=64),
        {"batch_size": 4, "num_workers": 4, "prefetch_factor": 1},
        ({"prefetch_factor": 2}, {"prefetch_factor": 4}),
    ),
    Row(
        "ring too small",
        ("ring",),
        lambda seed: Planted(seed, 200, nbytes=4 << 20),
        {"batch_size": 2, "num_workers": 1, "ring_bytes": 4 << 20},
        ({"ring_bytes": 32 << 20}, {"ring_bytes": 64 << 20}),
    ),
    Row(
        "slow storage, no workers",
        ("fetch",),
        lambda seed: Planted(seed, 160, waits=0.004),
        {"batch_size": 8, "num_workers": 0},
        workers(1, 2, 4, 8, 16, 32, 64),
    ),
    Row(
        "a sampler that is slow",
        ("sampler",),
        lambda seed: Planted(seed, 320, waits=0.0005),
        {"batch_size": 8, "num_workers": 2, "sampler": SlowSampler(320, 0.004)},
        workers(0, 1, 4),
    ),
    Row(
        "one lock that all workers wait for",
        ("fetch",),
        lambda seed: Locked(seed, 320, 0.004),
        {"batch_size": 8, "num_workers": 2, "multiprocessing_context": "fork"},
        workers(0, 1, 4, 8),
    ),
    Row(
        "one lock, one worker",
        ("fetch",),
        lambda seed: Locked(seed, 320, 0.004),
        {"batch_size": 8, "num_workers": 1, "multiprocessing_context": "fork"},
        workers(0, 2, 4, 8),
    ),
    Row(
        "neighbours that compute, no workers",
        ("compute", "cpus"),
        lambda seed: Planted(seed, 320, computes=0.004),
        {"batch_size": 8, "num_workers": 0},
        workers(1, 2, 4, 8),
        beside=Neighbours,
    ),
    Row(
        "neighbours that compute, one worker",
        ("compute", "cpus"),
        lambda seed: Planted(seed, 320, computes=0.004),
        {"batch_size": 8, "num_workers": 1},
        workers(0, 2, 4, 8),
        beside=Neighbours,
    ),
    Row(
        "a control group's quota",
        ("compute", "cpus"),
        lambda seed: Planted(seed, 320, computes=0.004),
        {"batch_size": 8, "num_workers": 1},
        workers(0, 2, 4),
        beside=Throttled,
    ),
    Row(
        "a store that limits each connection",
        ("fetch",),
        lambda seed: RemoteIterableDataset(Limited.url + "/{00..47}.jsonl", shuffle_shards=bool(seed % 2)),
        {"batch_size": 64, "num_workers": 1, "multiprocessing_context": "fork"},
        workers(2, 4),
        beside=Limited,
    ),
    Row(
        "a store that fails now and then",
        ("store",),
        lambda seed: RemoteIterableDataset(Failing.url + "/{00..23}.jsonl", shuffle_shards=bool(seed % 2)),
        {"batch_size": 16, "num_workers": 2, "multiprocessing_context": "fork"},
        PREFETCH,
        beside=Failing,
    ),
    Row(
        "a trainer that holds the GIL",
        ("consumer process",),
        lambda seed: Planted(seed, 960, waits=0.0002),
        {"batch_size": 8, "num_workers": 2},
        (*workers(0, 1, 4), *PREFETCH),
        beside=Holding,
    ),
    Row(
        "too few workers",
        ("fetch", "compute"),
        lambda seed: Planted(seed, 320, waits=0.002, computes=0.001),
        {"batch_size": 8, "num_workers": 1},
        workers(0, 2, 4, 8),
        sleeps(0.01),
    ),
    Row(
        "too many workers for the cores",
        ("cpus",),
        lambda seed: Planted(seed, 480, computes=0.002),
        {"batch_size": 8, "num_workers": 8},
        workers(0, 1, 2, 4),
    ),
    Row(
        "a main process that computes in many threads",
        ("cpus",),
        lambda seed: Planted(seed, 320, computes=0.008),
        {"batch_size": 8, "num_workers": 2},
        workers(0, 1, 4),
        multiplies,
    ),
    Row(
        "oversize batches now and then",
        ("consumer", "fetch", "compute", "ring", "overhead"),
        lambda seed: Planted(seed, 200, waits=0.001, nbytes=1 << 16),
        {"batch_size": 8, "num_workers": 2, "ring_bytes": 1 << 20},
        ({"ring_bytes": 16 << 20}, *workers(0, 1, 4)),
    ),
    Row(
        "a stream with too few shards",
        ("shards",),
        lambda seed: OneShard(seed, 320, 0.002),
        {"batch_size": 4, "num_workers": 4},
        PREFETCH,
    ),
    Row(
        "states that take long to save",
        ("snapshots",),
        lambda seed: Remembering(seed, 640, 20_000),
        {"batch_size": 8, "num_workers": 2},
        tuple({"snapshot_every_n_steps": number} for number in (10, 100, 1000)),
        sleeps(0.001),
    ),
    Row(
        "workers near their memory limit",
        ("memory",),
        lambda seed: Leaking(seed, 240, waits=0.001),
        {"batch_size": 4, "num_workers": 2, "worker_memory_limit": 64 << 20, "max_worker_restarts": 1000, "seed": 1},
        ({"worker_memory_limit": 256 << 20}, {"worker_memory_limit": 1024 << 20}),
    ),
]
