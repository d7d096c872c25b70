"""Holds the number of workers of a loader that chooses it: the value of ``num_workers="auto"``.

Data path: options -> [auto_workers] -> epoch_config, and the epoch's `WorkerCount`, which changes the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch.utils.data import BatchSampler

from asyncloader.cpus import usable_cpus
from asyncloader.options.auto_value import AutoValue
from asyncloader.telemetry.worker_tuning import MOST_WAITING_WORKERS, WorkerTuner
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.fetch.dataset_streams import count_streams
from asyncloader.workers.source import THREADS

_FIRST = 4  # workers to begin with, if there are CPUs for them


class AutoWorkers(AutoValue):
    """The loader's choice of the number of workers. Frameworks compare `loader.num_workers` with a number, or pass it
    on to a loader of ours.
    """

    __slots__ = ("chosen",)

    def __new__(cls) -> Self:
        """Make the choice of a new loader."""
        made = super().__new__(cls)
        made.chosen = False
        return made

    chosen: bool
    """Whether the number is final: in torch mode, after the trial."""

    @staticmethod
    def _first() -> WorkerTuner:
        return WorkerTuner(min(usable_cpus(), _FIRST))

    @property
    def most(self) -> int:
        """The most workers that there may ever be."""
        return max(usable_cpus(), MOST_WAITING_WORKERS, self.number)


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
    if why:
        raise ValueError(f'num_workers="auto" cannot be had here: {why}. Give a number')


def _size_of_batches(options: Mapping[str, Any]) -> int | None:
    batch_sampler = options["batch_sampler"]
    if batch_sampler is None:
        return options["batch_size"] or 1
    return batch_sampler.batch_size if type(batch_sampler) is BatchSampler else None
