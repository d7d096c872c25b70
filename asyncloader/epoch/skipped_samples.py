"""Keeps the records of samples that raised in one epoch, and ends the epoch where there are too many.

Data path: batch -> consumer -> [skipped_samples] -> `loader.skipped_samples`, statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncloader.errors import TooManySkippedSamples
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.error_notes import index_text
from asyncloader.workers.fetch.sample_errors import SkippedSample

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
