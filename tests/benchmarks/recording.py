"""Probe of the statistics: their cost per batch, in the main process and in a worker, and per decoded sample.

Run by `child.py` in a fresh process. The cost is a few microseconds of the CPU, far below what one run differs from the
next by. So the entries of a real run are counted in the blocks that it leaves, and multiplied by the price of one: two
clock readings and the entry.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from .loaders import Pass, drive
from .plan import Job
from .workloads import ContentError, IntSamples

BATCHES, BATCH = 2000, 4
CALLS, TURNS = 20_000, 15


def recording(job: Job) -> dict[str, Any]:
    """Seconds that the statistics take: of a batch in the main process, of one in a worker, of a decoded sample."""
    main, workers = _entries(job.loader)
    price = _entry_s()
    return {"main": main * price, "worker": workers * price, "decode": _decoded_s()}


def _entries(name: str) -> tuple[float, float]:
    """Entries for each batch of a run: the main process's, and its worker's."""
    import asyncloader
    from asyncloader.telemetry.counters import STAGES, stage_times

    dataset, made = IntSamples(BATCHES * BATCH), []

    def make() -> Any:
        made.append(getattr(asyncloader, name)(dataset, batch_size=BATCH, num_workers=1))
        return made[0]

    epoch = Pass(lambda batch: int(batch[0]))
    drive(name, make, iter([epoch]))
    if epoch.results != list(range(0, len(dataset), BATCH)):
        raise ContentError(f"{name}: {epoch.results[:4]}...")
    blocks = _statistics(made[0]).blocks()
    entries = {
        process: sum(stage_times(block, stage).number for stage in STAGES) / BATCHES
        for process, block in blocks.items()
    }
    main = entries.pop(-1)
    return main, sum(entries.values())


def _statistics(loader: Any) -> Any:
    return loader._asyncloader_state.statistics


def _entry_s() -> float:
    from asyncloader.telemetry.counters import Recorder

    record, clock = Recorder().time, time.perf_counter

    def entry(_: int) -> None:
        began = clock()
        record("fetch", clock() - began)

    return _more(entry, lambda _: None)


def _decoded_s() -> float:
    from asyncloader.workers.fetch.decoding import Decoder

    class Untimed(Decoder):
        def call(self, sample: Any) -> Any:
            try:
                return self.function(sample)
            except (StopIteration, StopAsyncIteration) as error:
                raise RuntimeError from error

    return _more(Decoder(abs, None).call, Untimed(abs, None).call)


def _more(one: Callable[[int], Any], other: Callable[[int], Any]) -> float:
    """Seconds by which a call of the first takes longer than a call of the second: the median of turns."""

    def seconds(function: Callable[[int], Any]) -> float:
        began = time.perf_counter()
        for number in range(CALLS):
            function(number)
        return (time.perf_counter() - began) / CALLS

    return statistics.median(seconds(one) - seconds(other) for _ in range(TURNS))
