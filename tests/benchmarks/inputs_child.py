"""The program of the process of a measurement of an input: epochs of a loader, checked, without and with a step.

Data path: loader -> [epochs] -> samples a second.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .inputs_data import INPUTS, Batch, Fingerprint, reference
from .inputs_loaders import bare, open_input, read_batches
from .inputs_plan import LIMITS, REFERENCE, ROWS
from .loaders import Pass, drive
from .plan import Job
from .workloads import ContentError


def measure(job: Job) -> dict[str, Any]:
    """Measure `job.loader` over the files in `job.folder`.

    Returns:
        "rate" in samples a second. Of a loader also the "checksum" of its first epoch, "step", the seconds of a
        training step, "stepped", the samples a second beside that step, and "fed", the share of that time in which the
        step was running.
    """
    folder = Path(job.folder)
    if job.loader in LIMITS:
        return {"rate": bare(job.loader, job.workload, folder, job.store, job.seconds)}
    if job.loader == REFERENCE:
        return {"checksum": reference(job.workload, folder, read_batches(folder))}
    # torch warns of arrays that cannot be written to when it makes tensors of them, and copies.
    warnings.filterwarnings("ignore", "The given NumPy array is not writ")
    epochs = Epochs(job)
    drive(job.loader, lambda: open_input(job.loader, job.workload, folder, job.store), epochs.schedule())
    return epochs.result()


class Epochs:
    """The epochs of a measurement: one to warm up, whose content is taken, some without a training step, some with one.

    A training step waits, as a process does whose accelerator computes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._touch = INPUTS[job.workload].touch
        self._stream = ROWS[job.workload].stream
        self._fingerprint = Fingerprint(self._stream)
        self._samples = 0  # of an epoch
        self._step = job.step
        self._slept = 0.0

    def schedule(self) -> Iterator[Pass]:
        """The epochs, one after the other.

        Raises:
            ContentError: an epoch has other content than the first.
        """
        first = Pass(self._take)
        yield first
        self._wanted = first.results
        self._seconds: list[float] = []
        yield from self._timed(self._touch, self._seconds)
        self._step = self._step or statistics.median(self._seconds) / len(self._wanted)
        self._beside: list[float] = []
        yield from self._timed(self._train, self._beside)

    def _timed(self, consume: Callable[[Batch], float], seconds: list[float]) -> Iterator[Pass]:
        while len(seconds) < 2 or sum(seconds) < self._job.seconds:
            epoch = Pass(consume)
            yield epoch
            self._check(epoch.results)
            seconds.append(epoch.ended - epoch.started)

    def _check(self, results: list[float]) -> None:
        same = sum(results) == sum(self._wanted) if self._stream else results == self._wanted
        if not same:
            raise ContentError(f"{self._job.loader}: an epoch of {self._job.workload} has other content than the first")

    def _take(self, batch: Batch) -> float:
        self._fingerprint.add(batch)
        self._samples += len(next(iter(batch.values())))
        return self._touch(batch)

    def _train(self, batch: Batch) -> float:
        result = self._touch(batch)
        began = time.perf_counter()
        time.sleep(self._step)
        self._slept += time.perf_counter() - began
        return result

    def result(self) -> dict[str, Any]:
        """The numbers, as `measure` gives them."""
        return {
            "checksum": str(self._fingerprint),
            "rate": self._samples / statistics.median(self._seconds),
            "step": self._step,
            "stepped": self._samples / statistics.median(self._beside),
            "fed": self._slept / sum(self._beside),
        }
