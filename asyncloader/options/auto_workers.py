"""Holds the number of workers of a loader that chooses it: the value of ``num_workers="auto"``.

Data path: options -> [auto_workers] -> epoch_config, and the epoch's `WorkerCount`, which changes the number.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from torch.utils.data import BatchSampler

from asyncloader.cpus import usable_cpus
from asyncloader.telemetry.prediction import MOST_WAITING_WORKERS
from asyncloader.telemetry.worker_tuning import WorkerTuner
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.source import THREADS

AUTO = "auto"

_FIRST = 4  # workers to begin with, if there are CPUs for them


class AutoWorkers(str):
    """The text "auto", which also compares and converts as the number of workers now: frameworks that compare
    `loader.num_workers` with a number, or pass it on to a loader of ours, go on working.

    Each loader has its own; a copy begins anew.
    """

    __slots__ = ("_driver", "chosen", "decisions", "tuner")

    def __new__(cls) -> Self:
        """Make the choice of a new loader."""
        made = super().__new__(cls, AUTO)
        made.tuner = WorkerTuner(min(usable_cpus(), _FIRST))
        made.chosen = False
        made.decisions = deque(maxlen=20)
        made._driver = None
        return made

    tuner: WorkerTuner
    """Its number of workers is this loader's."""
    chosen: bool
    """Whether the number is final: in torch mode, after the trial."""
    decisions: deque[str]
    """The newest decisions with their reasons, in words."""
    _driver: weakref.ref[Any] | None

    @property
    def number(self) -> int:
        """The number of workers now."""
        return self.tuner.workers

    @property
    def most(self) -> int:
        """The most workers that there may ever be."""
        return max(usable_cpus(), MOST_WAITING_WORKERS, self.number)

    def drive(self, driver: object) -> bool:
        """Whether this is the object that changes the number: the first that asks, for as long as it lives. Several
        iterators of a loader would measure one another.
        """
        now = None if self._driver is None else self._driver()
        if now is None:
            self._driver = weakref.ref(driver)
        return now is None or now is driver

    def release(self, driver: object) -> None:
        """Let another object change the number."""
        if self._driver is not None and self._driver() is driver:
            self._driver = None

    def __index__(self) -> int:
        return self.number

    __int__ = __index__

    def __lt__(self, other: Any) -> bool:
        return self.number < other if isinstance(other, (int, float)) else super().__lt__(other)

    def __le__(self, other: Any) -> bool:
        return self.number <= other if isinstance(other, (int, float)) else super().__le__(other)

    def __gt__(self, other: Any) -> bool:
        return self.number > other if isinstance(other, (int, float)) else super().__gt__(other)

    def __ge__(self, other: Any) -> bool:
        return self.number >= other if isinstance(other, (int, float)) else super().__ge__(other)

    def __reduce__(self) -> tuple[type[AutoWorkers], tuple[()]]:
        return AutoWorkers, ()


def number_of(num_workers: Any) -> int:
    """The number of workers now, of the value of a loader's `num_workers`."""
    return num_workers.number if isinstance(num_workers, AutoWorkers) else num_workers


def check_auto(options: Mapping[str, Any], *, iterable: bool, makes_threads: bool) -> None:
    """Refuse ``num_workers="auto"`` where the number of workers is part of the batches, or not this loader's to choose.

    Args:
        options: every argument by name, checked.
        iterable: whether the dataset is iterated by each worker, rather than indexed.
        makes_threads: whether the multiprocessing context makes threads, so that the workers are torch's own.

    Raises:
        ValueError: with the reason, and what to do.
    """
    seeded, why = options["seed"] is not None, ""
    if options["workers"] not in (None, THREADS):
        why = "the processes are the service's, which has a number of its own"
    elif makes_threads:
        why = "the multiprocessing context makes threads, so the workers are torch's own"
    elif iterable:
        why = "each worker of a stream reads its own part, so another number of workers gives other batches"
        if hasattr(type(options["dataset"]), "fixed_streams"):
            why += "; with seed= and streams= on the dataset it does not"
    elif is_stateful(options["dataset"]):
        why = "the dataset has a state of its own (state_dict), of which each worker has a copy"
    elif not seeded and options["workers"] == THREADS:
        why = "a trial in threads would draw from this process's random numbers; with seed= no trial is needed"
    elif not seeded and _size_of_batches(options) is None:
        why = "without seed= a trial reads batches, whose size a batch_sampler of another class does not say"
    elif not seeded and not hasattr(options["dataset"], "__len__"):
        why = "without seed= a trial reads samples of the dataset, whose length is unknown"
    if why:
        raise ValueError(f'num_workers="auto" cannot be had here: {why}. Give a number')


def _size_of_batches(options: Mapping[str, Any]) -> int | None:
    batch_sampler = options["batch_sampler"]
    if batch_sampler is None:
        return options["batch_size"] or 1
    return batch_sampler.batch_size if type(batch_sampler) is BatchSampler else None
