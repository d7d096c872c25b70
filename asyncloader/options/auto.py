"""Holds the number of workers that a loader chooses by itself, ``num_workers="auto"``, and checks that it may.

Data path: options -> [auto] -> declaration, epoch_config, and the epoch's `EpochTuning`, which changes the number.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Self

from torch.utils.data import BatchSampler
from torch.utils.data import _DatasetKind as DatasetKind

from asyncloader.cpus import usable_cpus
from asyncloader.samplers.positions import LoaderDataset
from asyncloader.telemetry.tuner import MOST_WAITING_WORKERS, WorkerTuner
from asyncloader.workers.fetch.dataset_kinds import count_streams
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.source import THREADS

AUTO: Final = "auto"

_FIRST_WORKERS = 4  # to begin with, if there are CPUs for them


class AutoWorkers:
    """The number of workers that a loader chooses by itself. Each loader has its own; a copy begins anew.

    The loader's attribute `num_workers` is the number to begin with; in torch mode, after the trial, the chosen number.
    """

    def __init__(self) -> None:
        self.tuner = WorkerTuner(first_number())
        """Its value is this loader's."""
        self.decisions: deque[str] = deque(maxlen=20)
        """The newest decisions with their reasons, in words."""
        self.chosen = False
        """Whether the number is final: in torch mode, after the trial."""
        self._driver: weakref.ref[Any] | None = None

    @property
    def number(self) -> int:
        """The number now."""
        return int(self.tuner.value)

    @property
    def found(self) -> tuple[int, float]:
        """The number that was kept last, and the factor by which batches come faster than with the first number; 1: no
        other number was kept.
        """
        return self.tuner.kept, self.tuner.gain

    @property
    def most_workers(self) -> int:
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

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def first_number() -> int:
    """The number of workers that a choice begins with."""
    return min(usable_cpus(), _FIRST_WORKERS)


def choice_of(loader: Any) -> AutoWorkers | None:
    """The loader's own choice of the number of workers; None: the user gave a number."""
    choice: AutoWorkers | None = vars(loader).get("_asyncloader_choice")
    return choice


def is_auto(value: Any) -> bool:
    """Whether a number of workers is left to the loader."""
    return isinstance(value, str) and value == AUTO


def set_workers(loader: Any, value: Any) -> int:
    """Return the number for the attribute `num_workers` of a loader that has been made, as torch lets a user set it
    until it is iterated: "auto" becomes a choice of the loader's own.

    Args:
        loader: a `LoaderSpec`.
        value: from the user.

    Raises:
        ValueError: as `check_choice`.
    """
    if not is_auto(value):
        vars(loader).pop("_asyncloader_choice", None)
        return value  # type: ignore[no-any-return]
    now = {each: getattr(loader, each) for each in ("dataset", "batch_size", "batch_sampler")}
    options = {**vars(loader._asyncloader_options), **now}
    iterable = loader._dataset_kind == DatasetKind.Iterable
    check_choice(options, iterable=iterable, makes_threads=makes_threads(loader.multiprocessing_context))
    choice = vars(loader)["_asyncloader_choice"] = AutoWorkers()
    if loader.prefetch_factor is None:
        loader.prefetch_factor = 2  # torch's default with workers
    return choice.number


def check_choice(options: Mapping[str, Any], *, iterable: bool, makes_threads: bool) -> None:
    """Refuse ``num_workers="auto"`` where the batches depend on the number, or it is not this loader's to choose.

    Args:
        options: every argument by name, those that are objects with their fields; checked.
        iterable: whether the dataset is iterated rather than indexed.
        makes_threads: whether the multiprocessing context makes threads, so that the workers are torch's own.

    Raises:
        ValueError: with the reason, and what to do.
    """
    if options["workers"] not in (None, THREADS):
        why = "the processes are the service's, which has a number of its own"
    elif makes_threads:
        why = "the multiprocessing context makes threads, so the workers are torch's own"
    else:
        why = _against_choice(options, iterable)
    if why:
        raise ValueError(f'num_workers="auto" is not possible here: {why}. Give a number')


def makes_threads(context: Any) -> bool:
    """Whether a multiprocessing context makes threads."""
    if context is None:
        return False
    kind = context.Process
    if isinstance(kind, type):
        return issubclass(kind, threading.Thread)
    return isinstance(kind(target=print, args=()), threading.Thread)  # a factory function; the thread is not started


def _against_choice(options: Mapping[str, Any], iterable: bool) -> str:
    seeded, why = options["seed"] is not None, ""
    if iterable:
        why = "each worker of a stream reads its own part, so another number of workers gives other batches"
        if count_streams(options["dataset"]) is not None:
            why = "each of the dataset's streams stays with one worker while an epoch runs"
        if isinstance(options["dataset"], LoaderDataset):
            why += "; with seed= and streams= on the dataset it does not"
    elif is_stateful(options["dataset"]):
        why = "the dataset has a state of its own (state_dict), of which each worker has a copy"
    elif not seeded and options["workers"] == THREADS:
        why = "a trial in threads would draw from this process's random numbers; with seed= no trial is needed"
    elif not seeded and _size_of_batches(options) is None:
        why = "without seed= a trial reads batches, whose size a batch_sampler of another class does not say"
    elif not seeded and not hasattr(options["dataset"], "__len__"):
        why = "without seed= a trial reads samples of the dataset, whose length is unknown"
    return why


def _size_of_batches(options: Mapping[str, Any]) -> int | None:
    batch_sampler = options["batch_sampler"]
    if batch_sampler is None:
        return options["batch_size"] or 1
    return batch_sampler.batch_size if type(batch_sampler) is BatchSampler else None
