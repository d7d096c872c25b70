"""Counts what a loader did so far, and keeps the records of bad samples.

Data path: beside the consumer. Always on; a few additions per batch.

Time is counted while an iterator is in use: from its start to its last batch or its end, without pauses between epochs.
Updated by the consumer's thread alone; read from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

from asyncloader.counters import COUNTERS, KEYS
from asyncloader.errors import TooManyBadSamples
from asyncloader.workers.fetch.error_notes import index_text
from asyncloader.workers.fetch.sample_errors import BadSample

_log = logging.getLogger("asyncloader")

__all__ = [
    "BadSampleLog",
    "Statistics",
]


class Statistics:
    """Counters of one loader over all of its iterators."""

    __slots__ = (
        "_mark",
        "_reported",
        "bad_samples",
        "batches",
        "busy_s",
        "bytes",
        "copy_outs",
        "credits",
        "elapsed_s",
        "first_batch_s",
        "lock_s",
        "locked_bytes",
        "log",
        "pickled",
        "refilled",
        "restarts",
        "retirements",
        "samples",
        "staged",
        "store",
        "wait_s",
        "worker_s",
    )

    def __init__(self) -> None:
        self.batches = 0
        self.samples = 0
        self.bytes = 0
        self.pickled = 0
        self.wait_s = 0.0
        self.elapsed_s = 0.0
        self.busy_s = 0.0  # seconds that workers spent on tasks
        self.worker_s = 0.0  # seconds that workers existed while an iterator was in use
        self.copy_outs = 0
        self.credits = 0  # outstanding batches per worker, in the newest iterator
        self.locked_bytes = 0  # of rings that were page-locked
        self.lock_s = 0.0
        self.staged = 0  # batches for a device that were copied to page-locked memory first
        self.restarts = 0  # workers that died and were replaced
        self.retirements = 0  # workers that were replaced because their memory had grown
        self.bad_samples = 0
        self.refilled = 0
        self.store: dict[str, float] = dict.fromkeys(KEYS, 0.0)  # the workers' transport counters
        self.log = BadSampleLog(None)  # of the newest iterator
        self.first_batch_s = 0.0
        self._mark = 0.0
        self._reported: dict[str, float] = {}

    def begin(self) -> float:
        """Begin to measure an iterator. Returns the time, for `first_batch`."""
        self._reported = COUNTERS.sums.copy()
        self._mark = perf_counter()
        return self._mark

    def first_batch(self, begun: float) -> None:
        """Record the time to an iterator's first batch; the newest iterator's value is kept."""
        self.first_batch_s = perf_counter() - begun

    def add_bad_samples(self, records: Sequence[BadSample]) -> None:
        """Record samples that raised.

        Raises:
            TooManyBadSamples: the newest iterator's limit is exceeded.
        """
        _tell(self.bad_samples, records)
        self.bad_samples += len(records)
        self.refilled += sum(record.action == "refilled" for record in records)
        self.log.add(records)

    def count(self, counts: Mapping[str, float]) -> None:
        """Add a worker's transport counters."""
        for name in self.store.keys() & counts.keys():
            self.store[name] += counts[name]

    def count_here(self) -> None:
        """Without workers: add this process's transport counters since the last call, or since `begin`."""
        if counts := COUNTERS.changes(self._reported):
            self.count(counts)

    def batch(self, samples: int, nbytes: int, pickled: int, waited: float, busy: float, workers: int) -> None:
        """Count a delivered batch. The consumer waited `waited` seconds for it, and a worker spent `busy` on it."""
        now = perf_counter()
        passed = now - self._mark
        self._mark = now
        self.batches += 1
        self.samples += samples
        self.bytes += nbytes
        self.pickled += pickled
        self.wait_s += waited
        self.elapsed_s += passed
        self.busy_s += busy
        self.worker_s += passed * workers

    def snapshot(self, queue_depth: int) -> dict[str, float]:
        """A new flat dictionary of floats.

        ``data/wait_frac`` is the fraction of the iterators' time that the consumer waited; ``data/worker_busy_frac``
        the fraction of the workers' time in which they had work; rates are per second of the iterators' time.
        ``data/credits`` is how many batches of the current size one worker (without workers: this process) may have
        outstanding. ``device/staged`` counts batches that could not be copied to the device straight from a
        page-locked ring.
        """
        elapsed = self.elapsed_s or float("inf")
        return {
            "data/batches": float(self.batches),
            "data/samples": float(self.samples),
            "data/bytes": float(self.bytes),
            "data/wait_s": self.wait_s,
            "data/wait_frac": min(1.0, self.wait_s / elapsed),
            "data/batches_per_sec": self.batches / elapsed,
            "data/samples_per_sec": self.samples / elapsed,
            "data/bytes_per_sec": self.bytes / elapsed,
            "data/queue_depth": float(queue_depth),
            "data/copy_outs": float(self.copy_outs),
            "data/time_to_first_batch_s": self.first_batch_s,
            "data/worker_busy_frac": min(1.0, self.busy_s / self.worker_s) if self.worker_s else 0.0,
            "data/credits": float(self.credits),
            "data/worker_restarts": float(self.restarts),
            "data/worker_retirements": float(self.retirements),
            "data/bad_samples": float(self.bad_samples),
            "data/refilled": float(self.refilled),
            "device/locked_bytes": float(self.locked_bytes),
            "device/lock_s": self.lock_s,
            "device/staged": float(self.staged),
            **{f"store/{name}": count for name, count in self.store.items()},
        }


class BadSampleLog:
    """The bad samples of one epoch, in the order in which their batches were delivered.

    Args:
        limit: most bad samples allowed; None: any number.
    """

    def __init__(self, limit: int | None) -> None:
        self.samples: list[BadSample] = []
        self._limit = limit

    def add(self, records: Iterable[BadSample]) -> None:
        """Add the records of one batch.

        Raises:
            TooManyBadSamples: there are now more than the limit. All records were added.
        """
        self.samples += records
        if self._limit is not None and len(self.samples) > self._limit:
            last = self.samples[-1]
            raise TooManyBadSamples(self._limit, f"index {last.index!r}, {last.error}")


def _tell(before: int, records: Sequence[BadSample]) -> None:
    """Log the first sample that raised, then only how many there are: at 10, 100 and so on."""
    after = before + len(records)
    if not before and records:
        first = records[0]
        where = f"index {index_text(first.index)}" if first.position is None else f"position {first.position}"
        _log.warning("the sample at %s raised and was %s (on_error): %s", where, first.action, first.error)
    reached = 10 ** (len(str(after)) - 1)
    if after >= 10 and before < reached:
        _log.warning("%d samples have raised; loader.errors has the newest iterator's", reached)
