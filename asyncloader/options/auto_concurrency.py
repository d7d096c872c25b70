"""Holds the number of samples in flight of a loader that chooses it: the value of ``concurrency="auto"``.

Data path: options -> [auto_concurrency] -> epoch_config, and the epoch's `EpochTuning`, which changes the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncloader.options.auto_value import AutoValue
from asyncloader.telemetry.concurrency_tuning import ConcurrencyTuner
from asyncloader.telemetry.trials import Tuner
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset
from asyncloader.workers.source import THREADS

CONCURRENCY = 256
"""Samples that a copy of the dataset awaits at a time, unless the user says otherwise."""


class AutoConcurrency(AutoValue):
    """The loader's choice of the number of samples in flight."""

    __slots__ = ()

    @staticmethod
    def _first() -> Tuner:
        return ConcurrencyTuner(CONCURRENCY)


def check_auto_concurrency(options: Mapping[str, Any], *, iterable: bool, makes_threads: bool) -> None:
    """Refuse ``concurrency="auto"`` where samples are not awaited by this loader's own workers.

    Args:
        options: every argument by name, checked.
        iterable: whether the dataset is iterated rather than indexed.
        makes_threads: whether the multiprocessing context makes threads, so that the workers are torch's own.

    Raises:
        ValueError: with the reason, and what to do.
    """
    why = ""
    if options["workers"] not in (None, THREADS):
        why = "the processes are the service's, which has its own way to the store. Give a number"
    elif makes_threads:
        why = "the multiprocessing context makes threads, so the workers are torch's own. Leave it out"
    elif iterable:
        why = "a stream's samples are read one after the other. Leave it out"
    elif not is_async_dataset(options["dataset"]):
        why = "the dataset is a blocking one, which has a thread for each sample in flight. Give their number"
    if why:
        raise ValueError(f'concurrency="auto" cannot be had here: {why}')
