"""Holds the settings that a loader chooses by itself, those given as "auto", and checks that it may choose them.

Data path: options -> [auto] -> declaration, epoch_config, and the epoch's `EpochTuning`, which changes the values.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from torch.utils.data import BatchSampler
from torch.utils.data import _DatasetKind as DatasetKind

from asyncloader.cpus import usable_cpus
from asyncloader.telemetry.tuner import (
    CONCURRENCY,
    LEAST_PREFETCH,
    MOST_WAITING_WORKERS,
    ConcurrencyTuner,
    PrefetchTuner,
    Tuner,
    WorkerTuner,
)
from asyncloader.workers.fetch.dataset_kinds import count_streams, is_async_dataset
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.source import THREADS

AUTO: Final = "auto"

_FIRST_WORKERS = 4  # to begin with, if there are CPUs for them

_TUNERS: dict[str, Callable[[], Tuner]] = {
    "num_workers": lambda: WorkerTuner(min(usable_cpus(), _FIRST_WORKERS)),
    "prefetch_factor": lambda: PrefetchTuner(LEAST_PREFETCH),
    "concurrency": lambda: ConcurrencyTuner(CONCURRENCY),
}

SETTABLE = ("num_workers", "prefetch_factor")
"""torch's options that may be "auto", also once the loader is made, until it is iterated."""


class AutoValue(str):
    """The text "auto", which also compares and converts as the number now: code that compares the setting with a
    number, or passes it on to a loader of ours, goes on working.

    Each loader has its own; a copy begins anew.

    Args:
        option: its name.
    """

    __slots__ = ("_driver", "chosen", "decisions", "option", "tuner")

    def __new__(cls, option: str) -> Self:
        """Make the choice of a new loader."""
        made = super().__new__(cls, AUTO)
        made.option, made.tuner = option, _TUNERS[option]()
        made.decisions, made.chosen, made._driver = deque(maxlen=20), False, None
        return made

    option: str
    tuner: Tuner
    """Its value is this loader's."""
    decisions: deque[str]
    """The newest decisions with their reasons, in words."""
    chosen: bool
    """Whether the number of workers is final: in torch mode, after the trial."""
    _driver: weakref.ref[Any] | None

    @property
    def number(self) -> int:
        """The value now."""
        return int(self.tuner.value)

    @property
    def found(self) -> tuple[int, float]:
        """The value that was kept last, and the factor by which batches come faster than with the first value; 1: no
        other value was kept.
        """
        return self.tuner.kept, self.tuner.gain

    @property
    def most_workers(self) -> int:
        """The most workers that there may ever be."""
        return max(usable_cpus(), MOST_WAITING_WORKERS, self.number)

    def drive(self, driver: object) -> bool:
        """Whether this is the object that changes the value: the first that asks, for as long as it lives. Several
        iterators of a loader would measure one another.
        """
        now = None if self._driver is None else self._driver()
        if now is None:
            self._driver = weakref.ref(driver)
        return now is None or now is driver

    def release(self, driver: object) -> None:
        """Let another object change the value."""
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

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self.option,)


def number_of(value: Any) -> Any:
    """The number now, of the value of a setting that may be the loader's choice; any other value as it is."""
    return value.number if isinstance(value, AutoValue) else value


def is_auto(value: Any) -> bool:
    """Whether a setting is given as "auto", or as the choice of another loader."""
    return isinstance(value, str) and value == AUTO


def with_choices(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loader, with a new choice for each "auto", also for that of another loader; the same object if
    there is none.
    """
    chosen = arguments
    for name in _TUNERS:  # written out: each loader's construction asks
        if isinstance(arguments[name], str) and arguments[name] == AUTO:
            chosen = {**chosen, name: AutoValue(name)}
    return chosen


def set_later(loader: Any, name: str, value: Any) -> Any:
    """Return the value for an option of a loader that has been made, as torch lets a user set its options until it is
    iterated: "auto" becomes a choice of the loader's own.

    Args:
        loader: a `LoaderSpec`.
        name: one of `SETTABLE`.
        value: from the user.

    Raises:
        ValueError: as `check_choices`.
    """
    if not is_auto(value) or vars(loader)[name] is value:
        return value
    now = {each: getattr(loader, each) for each in ("dataset", "batch_size", "batch_sampler")}
    options = {**vars(loader._asyncloader_options), **now, **dict.fromkeys(_TUNERS), name: AutoValue(name)}
    iterable = loader._dataset_kind == DatasetKind.Iterable
    check_choices(options, iterable=iterable, makes_threads=makes_threads(loader.multiprocessing_context))
    if name == "num_workers" and loader.prefetch_factor is None:
        loader.prefetch_factor = 2  # torch's default with workers
    return options[name]


def check_choices(options: Mapping[str, Any], *, iterable: bool, makes_threads: bool) -> None:
    """Refuse a choice where the batches depend on it, or it is not this loader's to make.

    Args:
        options: every argument by name, those that are objects with their fields; checked.
        iterable: whether the dataset is iterated rather than indexed.
        makes_threads: whether the multiprocessing context makes threads, so that the workers are torch's own.

    Raises:
        ValueError: with the reason, and what to do.
    """
    for name, (at_nodes, reason) in _REASONS.items():
        if not isinstance(options[name], AutoValue):
            continue
        if options["workers"] not in (None, THREADS):
            why = at_nodes
        elif makes_threads:
            why = "the multiprocessing context makes threads, so the workers are torch's own"
        else:
            why = reason(options, iterable)
        if why:
            raise ValueError(f'{name}="auto" is not possible here: {why}. Give a number')


def makes_threads(context: Any) -> bool:
    """Whether a multiprocessing context makes threads."""
    if context is None:
        return False
    kind = context.Process
    if isinstance(kind, type):
        return issubclass(kind, threading.Thread)
    return isinstance(kind(target=print, args=()), threading.Thread)  # a factory function; the thread is not started


def _against_workers(options: Mapping[str, Any], iterable: bool) -> str:
    seeded, why = options["seed"] is not None, ""
    if iterable:
        why = "each worker of a stream reads its own part, so another number of workers gives other batches"
        if count_streams(options["dataset"]) is not None:
            why = "each of the dataset's streams stays with one worker while an epoch runs"
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
    return why


def _against_prefetch(options: Mapping[str, Any], iterable: bool) -> str:
    del iterable
    locks = options["device"] is not None
    return "with device= the memory of all batches ahead is page-locked at the first one" if locks else ""


def _against_concurrency(options: Mapping[str, Any], iterable: bool) -> str:
    if iterable:
        return "a stream's samples are read one after the other, so that the option has no effect"
    if is_async_dataset(options["dataset"]):
        return ""
    return "the dataset is a blocking one, which has a thread for each sample in flight"


_REASONS: dict[str, tuple[str, Callable[[Mapping[str, Any], bool], str]]] = {
    "num_workers": ("the processes are the service's, which has a number of its own", _against_workers),
    "prefetch_factor": ("a service's nodes are told the number when they are connected", _against_prefetch),
    "concurrency": ("the processes are the service's, which has its own way to the store", _against_concurrency),
}


def _size_of_batches(options: Mapping[str, Any]) -> int | None:
    batch_sampler = options["batch_sampler"]
    if batch_sampler is None:
        return options["batch_size"] or 1
    return batch_sampler.batch_size if type(batch_sampler) is BatchSampler else None
