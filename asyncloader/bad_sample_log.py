"""What ``loader.errors`` shows: the samples that raised, up to a limit.

Data path: consumer -> [bad_sample_log].
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncloader.errors import TooManyBadSamples
from asyncloader.workers.bad_samples import BadSample

__all__ = ["BadSampleLog"]


class BadSampleLog:
    """The bad samples of one epoch, in the order in which their batches were delivered.

    Args:
        limit: how many there may be; None: any number.
    """

    def __init__(self, limit: int | None) -> None:
        self.samples: list[BadSample] = []
        self._limit = limit

    def add(self, records: Iterable[BadSample]) -> None:
        """Take the records of one batch.

        Raises:
            TooManyBadSamples: there are more than the limit now. All of them were taken.
        """
        self.samples += records
        if self._limit is not None and len(self.samples) > self._limit:
            last = self.samples[-1]
            raise TooManyBadSamples(self._limit, f"index {last.index!r}, {last.error}")
