"""Reads a running DataLoader2, from any thread, for its page and `asyncloader top`.

Data path: run_methods -> [graph_reading] -> live.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from asyncloader.dataloader2.services.worker_streams import names_of
from asyncloader.live.reading import read_workers
from asyncloader.live.snapshot import Reading, WorkerReading

if TYPE_CHECKING:
    from asyncloader.dataloader2.run_methods import RunMethods

_OF_SAMPLES = ("data/samples", "data/samples_per_sec")
"""Figures that say the same as those of items."""


def read_graph(loader: RunMethods[Any]) -> Reading:
    """Read a loader. Takes about a millisecond."""
    statistics = loader._statistics
    stats = {key: value for key, value in loader._figures().items() if key not in _OF_SAMPLES}
    clock, since = perf_counter(), statistics.waits_since()
    trace = statistics.trace
    end = loader._datapipe_before_reading_service_adapt  # of the user's graph
    return Reading(
        name=f"{type(loader).__name__}" + ("" if end is None else f" of {names_of([end])[0]}"),
        pid=os.getpid(),
        time=time(),
        clock=clock,
        place=loader._place,
        closed=loader._terminated,
        stats=stats,
        epochs=statistics.epochs,
        elapsed_s=statistics.times()[0],
        waiting_s=None if since is None else max(0.0, clock - since),
        blocks=statistics.blocks(),
        workers=[*_workers(loader)],
        decodes_apart=False,
        verdict=loader._diagnosis if statistics.epochs else None,
        traced=trace is not None and trace.owned and trace.file is not None,
        unit="items",
    )


def _workers(loader: RunMethods[Any]) -> Iterator[WorkerReading]:
    for part in loader._interleaved:
        for number, pool in enumerate(part.pools()):
            # In its own loader each is worker 0.
            yield from (each._replace(worker=number) for each in read_workers(pool))
