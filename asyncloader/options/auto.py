"""Holds the number of workers that a loader chooses by itself, ``num_workers="auto"``, and checks that it may.

Data path: options -> [auto] -> declaration, epoch_config, and `worker_trial`, which chooses it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, Self

from torch.utils.data import BatchSampler

from asyncloader.base.cpus import usable_cpus
from asyncloader.samplers.positions import LoaderDataset
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.source import THREADS

AUTO: Final = "auto"

_FIRST_WORKERS = 4  # to begin with, if there are CPUs for them


class AutoWorkers:
    """The number of workers that a loader chooses by a trial before its first epoch. Each loader has its own; a copy
    begins anew.

    The loader's attribute `num_workers` is the number to begin with; after the trial, the chosen number.
    """

    def __init__(self) -> None:
        self.number = first_number()
        """The number now."""
        self.decisions: list[str] = []
        """The trial's decisions with their reasons, in words."""
        self.chosen = False
        """Whether the trial has been."""

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def first_number() -> int:
    """The number of workers that a choice begins with."""
    return min(usable_cpus(), _FIRST_WORKERS)


def check_choice(options: Mapping[str, Any], *, iterable: bool) -> None:
    """Refuse ``num_workers="auto"`` where the batches depend on the number, or it is not this loader's to choose.

    Args:
        options: every argument by name, those that are objects with their fields; checked.
        iterable: whether the dataset is iterated rather than indexed.

    Raises:
        ValueError: with the reason, and what to do.
    """
    if options["workers"] not in (None, THREADS):
        why = "the processes are the service's, which has a number of its own"
    else:
        why = _against_choice(options, iterable)
    if why:
        raise ValueError(f'num_workers="auto" is not possible here: {why}. Give a number')


def makes_threads(context: Any) -> bool:
    """Whether the processes of a multiprocessing context are threads."""
    kind = getattr(context, "Process", None)
    return isinstance(kind, type) and issubclass(kind, threading.Thread)


def _against_choice(options: Mapping[str, Any], iterable: bool) -> str:
    if iterable or isinstance(options["dataset"], LoaderDataset):
        return "a stream is read by the workers in parts, of which a trial can read no others"
    if is_stateful(options["dataset"]):
        return "the dataset has a state of its own (state_dict), of which each worker has a copy"
    if options["workers"] == THREADS or makes_threads(options["multiprocessing_context"]):
        return "a trial in threads would draw from this process's random numbers"
    if _size_of_batches(options) is None:
        return "a trial reads batches, whose size a batch_sampler of another class does not say"
    if not hasattr(options["dataset"], "__len__"):
        return "a trial reads samples of the dataset, whose length is unknown"
    return ""


def _size_of_batches(options: Mapping[str, Any]) -> int | None:
    batch_sampler = options["batch_sampler"]
    if batch_sampler is None:
        return options["batch_size"] or 1
    return batch_sampler.batch_size if type(batch_sampler) is BatchSampler else None
