"""Keeps account of an epoch's bad samples: what becomes of tasks that killed workers.

Data path: consumer -> [quarantine] -> the user, `loader.skipped_samples`, statistics. Runs in the iterating thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from asyncloader.base.events import Poisoned, PositionedIndex, SkippedSample, bare_index
from asyncloader.epoch.reassignment import quarantined
from asyncloader.errors import TaskQuarantined, TooManySkippedSamples
from asyncloader.options.declaration import OnError
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.error_notes import index_text
from asyncloader.workers.fetch.sample_errors import ERROR_CHARACTERS, TRACEBACK_CHARACTERS

_log = logging.getLogger("asyncloader")


def settle(poisoned: Poisoned, on_error: OnError, *, batched: bool, replicas: int) -> list[SkippedSample]:
    """Record each sample of a task that killed its workers, whose batch is left out.

    Args:
        poisoned: the task.
        on_error: the loader's option.
        batched: whether the task's index is a list of indices.
        replicas: distance between the positions of neighbouring samples.

    Raises:
        TaskQuarantined: `on_error` is "raise", or a function, which no worker is left to call.
    """
    error = quarantined(poisoned)
    if on_error == "raise" or callable(on_error):
        raise error
    index = poisoned.task.index
    first = index.position if isinstance(index, PositionedIndex) else None
    index = bare_index(index)
    indices: Sequence[Any] = index if batched else [index]
    positions: Sequence[int | None] = (
        first
        if isinstance(first, tuple)
        else [None if first is None else first + offset * replicas for offset in range(len(indices))]
    )
    # Without the standard error, for which the record has a field of its own.
    brief = TaskQuarantined(error.indices, error.deaths, advice=error.advice)
    text = f"{type(brief).__name__}: {brief}"[:ERROR_CHARACTERS]
    trace = error.stderr[-TRACEBACK_CHARACTERS:]
    worker, pid, _ = error.deaths[-1]
    return [
        SkippedSample(one, position, worker, pid, text, trace, "skipped", None)
        for one, position in zip(indices, positions, strict=True)
    ]


class SkippedSampleLog:
    """The bad samples of one epoch, in the order in which their batches were delivered.

    Args:
        limit: most bad samples allowed; None: any number.
        statistics: of the loader, which counts them, and refers to the records of the newest epoch.
    """

    def __init__(self, limit: int | None, statistics: Statistics) -> None:
        self._limit = limit
        self._statistics = statistics
        self.samples: list[SkippedSample] = []
        statistics.newest_skipped = self.samples

    def add(self, records: Sequence[SkippedSample]) -> None:
        """Add the records of one batch.

        Raises:
            TooManySkippedSamples: there are now more than the limit. All records were added.
        """
        statistics = self._statistics
        _tell(statistics.skipped_samples, records)
        statistics.skipped_samples += len(records)
        statistics.refilled_samples += sum(record.action == "refilled" for record in records)
        self.samples += records
        if self._limit is not None and len(self.samples) > self._limit:
            last = self.samples[-1]
            raise TooManySkippedSamples(self._limit, f"index {index_text(last.index)}, {last.error}")


def _tell(before: int, records: Sequence[SkippedSample]) -> None:
    """Log the first sample that raised, then only how many there are: at 10, 100 and so on."""
    after = before + len(records)
    if not before and records:
        first = records[0]
        where = f"position {first.position}"
        if first.position is None:
            where = f"index {index_text(first.index)}"
        elif isinstance(first.index, str):  # a shard's
            where = first.index
        _log.warning("the sample at %s raised and was %s (on_error): %s", where, first.action, first.error)
    reached = 10 ** (len(str(after)) - 1)
    if after >= 10 and before < reached:
        _log.warning("%d samples have raised; loader.skipped_samples has the newest iterator's", reached)
