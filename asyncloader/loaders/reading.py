"""Reads a running loader, from any thread: its counters, its workers and their rings, and the verdict.

Data path: loader -> [reading] -> snapshot.

Nothing is asked of the workers, and no lock is taken that a batch waits for: counts of workers lie in shared memory,
the others are attributes of this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from time import perf_counter, time
from typing import Any

from asyncloader.live.snapshot import Reading, WorkerReading
from asyncloader.loaders.explain import diagnose_run
from asyncloader.options.declaration import LoaderSpec
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.options.unknown_dataset import without_asking
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.pool import WorkerPool
from asyncloader.workers.stacks import process_state


def read(
    spec: LoaderSpec[Any],
    statistics: Statistics,
    *,
    kind: str,
    place: str,
    left_out: Mapping[str, float],
    queue_depth: int,
    pool: WorkerPool | None,
    closed: bool,
) -> Reading:
    """Read a loader. Takes about a millisecond.

    Args:
        spec: its options.
        statistics: its counters.
        kind: the name of its class.
        place: its position, in words.
        left_out: samples that ranks dropped and repeated, as `Statistics.snapshot` takes it.
        queue_depth: batches that are ready.
        pool: the newest iterator's workers, if it has any.
        closed: whether it was closed.
    """
    clock, waiting_since = perf_counter(), statistics.waiting_since
    # Before the first iterator, options may still be set, and a service was not asked about its dataset.
    config = EpochConfig.of(spec) if statistics.epochs else None
    return Reading(
        name=f"{kind} of {type(without_asking(spec).dataset).__name__}",
        pid=os.getpid(),
        time=time(),
        clock=clock,
        place=place,
        closed=closed,
        stats=statistics.snapshot(queue_depth, left_out),
        epochs=statistics.epochs,
        elapsed_s=statistics.elapsed_s,
        waiting_s=None if waiting_since is None else max(0.0, clock - waiting_since),
        blocks=statistics.blocks(),
        workers=[*read_workers(pool)],
        decodes_apart=config is None or not config.concurrent,
        verdict=None if config is None else diagnose_run(spec, statistics),
    )


def read_workers(pool: WorkerPool | None) -> Iterator[WorkerReading]:
    """Read the workers that run."""
    if pool is None or pool.stopped:
        return
    # Copies: the loop's thread may replace a worker while they are read.
    for handle, manager in zip(list(pool.processes), list(pool.rings), strict=False):
        ring = manager.ring
        # Threads and the workers of a service have no process of their own here.
        local = not handle.node and handle.pid != os.getpid()
        yield WorkerReading(
            worker=handle.worker_id,
            place=handle.place,
            ready=handle.ready,
            started=handle.started,
            outstanding=len(manager.tasks),
            answers=handle.answers,
            state=process_state(handle.pid) if local else "",
            slots=0 if ring is None else ring.slots,
            slots_in_use=0 if ring is None else ring.in_use,
            ring_bytes=0 if ring is None else ring.nbytes,
        )
