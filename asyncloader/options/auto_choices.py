"""Turns the options that are given as "auto" into choices of the loader's own, and checks that it may choose.

Data path: options -> [auto_choices] -> declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncloader.options.auto_concurrency import AutoConcurrency, check_auto_concurrency
from asyncloader.options.auto_prefetch import AutoPrefetch, check_auto_prefetch
from asyncloader.options.auto_value import AUTO, AutoValue
from asyncloader.options.auto_workers import AutoWorkers, check_auto

_CHOICES: dict[str, type[AutoValue]] = {
    "num_workers": AutoWorkers,
    "prefetch_factor": AutoPrefetch,
    "concurrency": AutoConcurrency,
}


def with_choices(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loader, with a new choice for each "auto", also for that of another loader; the same object if
    there is none.
    """
    chosen = arguments
    for name, kind in _CHOICES.items():
        if isinstance(arguments[name], str) and arguments[name] == AUTO:
            chosen = {**chosen, name: kind()}
    return chosen


def check_choices(options: Mapping[str, Any], *, iterable: bool, makes_threads: bool) -> None:
    """Refuse a choice where the batches depend on it, or it is not this loader's to make.

    Args:
        options: every argument by name, those that are objects with their fields; checked.
        iterable: whether the dataset is iterated rather than indexed.
        makes_threads: whether the multiprocessing context makes threads, so that the workers are torch's own.

    Raises:
        ValueError: with the reason, and what to do.
    """
    if isinstance(options["num_workers"], AutoValue):
        check_auto(options, iterable=iterable, makes_threads=makes_threads)
    if isinstance(options["prefetch_factor"], AutoValue):
        check_auto_prefetch(options, makes_threads=makes_threads)
    if isinstance(options["concurrency"], AutoValue):
        check_auto_concurrency(options, iterable=iterable, makes_threads=makes_threads)
