"""Holds the number of batches ahead of a loader that chooses it: the value of ``prefetch_factor="auto"``.

Data path: options -> [auto_prefetch] -> epoch_config, and the epoch's `EpochTuning`, which changes the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncloader.options.auto_value import AutoValue
from asyncloader.telemetry.prefetch_tuning import PrefetchTuner
from asyncloader.telemetry.trials import Tuner
from asyncloader.workers.source import THREADS

LEAST_PREFETCH = 2
"""Batches that each worker has ahead at the beginning, and however large they are: torch's default."""

MOST_PREFETCH = 32
"""Batches that each worker may have ahead, and for which the sampler is read ahead."""


class AutoPrefetch(AutoValue):
    """The loader's choice of the number of batches ahead."""

    __slots__ = ()

    @staticmethod
    def _first() -> Tuner:
        return PrefetchTuner(LEAST_PREFETCH)


def check_auto_prefetch(options: Mapping[str, Any], *, makes_threads: bool) -> None:
    """Refuse ``prefetch_factor="auto"`` where the number cannot change while batches are read.

    Args:
        options: every argument by name, checked.
        makes_threads: whether the multiprocessing context makes threads, so that the workers are torch's own.

    Raises:
        ValueError: with the reason, and what to do.
    """
    why = ""
    if options["workers"] not in (None, THREADS):
        why = "a service's nodes are told the number when they are connected"
    elif makes_threads:
        why = "the multiprocessing context makes threads, so the workers are torch's own"
    elif options["device"] is not None:
        why = "with device= the memory of all batches ahead is page-locked at the first one"
    if why:
        raise ValueError(f'prefetch_factor="auto" cannot be had here: {why}. Give a number')
