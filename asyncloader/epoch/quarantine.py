"""Keeps account of an epoch's bad samples: turns tasks that killed workers into errors or what `on_error` says.

Data path: consumer -> [quarantine] -> the user, `loader.skipped_samples`, statistics. Runs in the iterating thread.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from asyncloader.base.events import Poisoned, PositionedIndex, bare_index
from asyncloader.epoch.reassignment import quarantined
from asyncloader.errors import TaskQuarantined, TooManySkippedSamples
from asyncloader.options.declaration import OnError
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.error_notes import index_text
from asyncloader.workers.fetch.sample_errors import ERROR_CHARACTERS, TRACEBACK_CHARACTERS, SkippedSample


class Quarantine:
    """Resolves the poisoned tasks of one loader.

    Args:
        on_error: the loader's option.
        collate_fn: the loader's; collates the substitutes.
        batched: whether a task's index is a list of indices.
        replicas: distance between the positions of neighbouring samples.
    """

    def __init__(self, on_error: OnError, collate_fn: Any, *, batched: bool, replicas: int) -> None:
        self._on_error = on_error
        self._collate_fn = collate_fn
        self._batched = batched
        self._replicas = replicas

    def settle(self, poisoned: Poisoned) -> tuple[Any, list[SkippedSample]]:
        """The batch of substitutes (None without substitutes), and a record per sample.

        Raises:
            TaskQuarantined: `on_error` is "raise".
            Exception: any error of the `on_error` function or of `collate_fn`.
        """
        error = quarantined(poisoned)
        index = poisoned.task.index
        first = index.position if isinstance(index, PositionedIndex) else None
        index = bare_index(index)
        if self._on_error == "raise":
            raise error
        indices: Sequence[Any] = index if self._batched else [index]
        positions: Sequence[int | None] = (
            first
            if isinstance(first, tuple)
            else [None if first is None else first + offset * self._replicas for offset in range(len(indices))]
        )
        # Without the standard error, for which the record has a field of its own.
        brief = TaskQuarantined(error.indices, error.deaths, advice=error.advice)
        text = f"{type(brief).__name__}: {brief}"[:ERROR_CHARACTERS]
        substitutes: list[Any] = []
        records: list[SkippedSample] = []
        for one, position in zip(indices, positions, strict=True):
            if callable(self._on_error):
                substitute: Any = self._on_error(one, error)
                if inspect.iscoroutine(substitute):
                    substitute.close()
                    raise error  # there is no worker left whose loop could await it
                substitutes.append(substitute)
            action = "replaced" if callable(self._on_error) else "skipped"
            worker, pid, _ = error.deaths[-1]
            records.append(
                SkippedSample(one, position, worker, pid, text, error.stderr[-TRACEBACK_CHARACTERS:], action, None)
            )
        if not callable(self._on_error):
            return None, records
        return self._collate_fn(substitutes if self._batched else substitutes[0]), records


_log = logging.getLogger("asyncloader")


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
