"""What a loader did so far, as numbers: always on, a few additions a batch.

Data path: beside the consumer.

Time counts while an iterator is in use: from its start to its last batch or its end. Pauses between epochs do not
count. Updated by the consumer's thread alone; read from any.

What ``loader.errors`` shows: the samples that raised, up to a limit.

Data path: consumer -> [bad_sample_log].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

from asyncloader.counters import COUNTERS, KEYS
from asyncloader.errors import TooManyBadSamples
from asyncloader.workers.fetch.sample_errors import BadSample

__all__ = [
    "BadSampleLog",
    "Statistics",
]


class Statistics:
    """Counters of one loader over all of its iterators."""

    __slots__ = (
        "_mark",
        "_told",
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
        self.worker_s = 0.0  # seconds that they existed in iterators' time
        self.copy_outs = 0
        self.credits = 0  # batches that a worker of the newest iterator may have in hand
        self.locked_bytes = 0  # of rings that were page-locked
        self.lock_s = 0.0
        self.staged = 0  # batches for a device that were copied to page-locked memory first
        self.restarts = 0  # workers that died and were replaced
        self.retirements = 0  # workers that had grown and were replaced
        self.bad_samples = 0
        self.refilled = 0
        self.store: dict[str, float] = dict.fromkeys(KEYS, 0.0)  # what the transports of the workers did
        self.log = BadSampleLog(None)  # of the newest iterator
        self.first_batch_s = 0.0
        self._mark = 0.0
        self._told: dict[str, float] = {}

    def begin(self) -> float:
        """An iterator starts now; returns the time, for `first_batch`."""
        self._told = COUNTERS.sums.copy()
        self._mark = perf_counter()
        return self._mark

    def first_batch(self, begun: float) -> None:
        """An iterator gave its first batch. The figure kept is that of the newest iterator."""
        self.first_batch_s = perf_counter() - begun

    def bad(self, records: Sequence[BadSample]) -> None:
        """These samples raised.

        Raises:
            TooManyBadSamples: they are more than the newest iterator's limit allows.
        """
        self.bad_samples += len(records)
        self.refilled += sum(record.action == "refilled" for record in records)
        self.log.add(records)

    def count(self, counts: Mapping[str, float]) -> None:
        """The transports of a worker did this."""
        for name in self.store.keys() & counts.keys():
            self.store[name] += counts[name]

    def count_here(self) -> None:
        """Without workers: the transports of this process did something since this was called last, or `begin` was."""
        if counts := COUNTERS.changes(self._told):
            self.count(counts)

    def batch(self, samples: int, nbytes: int, pickled: int, waited: float, busy: float, workers: int) -> None:
        """A batch was delivered, for which the consumer waited `waited` seconds and a worker spent `busy`."""
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
        """A flat dictionary of floats, a fresh one each time.

        ``data/wait_frac`` is the share of the iterators' time that the consumer waited; ``data/worker_busy_frac`` that
        of the workers' time in which they had work; rates are per second of the iterators' time. ``data/credits`` is
        how many batches one worker (without workers: this process) may have in hand now, as large as they are.
        ``device/staged`` counts batches that could not be copied to the device straight from a page-locked ring.
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
