"""Logs the parts of a long time to the first batch.

Data path: statistics -> [slow_start] -> log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from asyncloader.telemetry.counters import STAGES, stage_times

_log = logging.getLogger("asyncloader")

_SLOW_S = 10.0


def is_slow(seconds: float) -> bool:
    """Return whether a time to the first batch is long enough to be logged."""
    return seconds > _SLOW_S


def log_parts(seconds: float, blocks: Mapping[int, Sequence[float]]) -> None:
    """Log the parts of the time to the first batch: a mean worker's, and the rest.

    Args:
        seconds: the whole time.
        blocks: each worker's counters, by its number; -1: the main process, which is left out.
    """
    of_workers = [block for worker, block in blocks.items() if worker >= 0]
    merged = [sum(each) for each in zip(*of_workers, strict=True)]
    parts = [
        times.total / max(1, times.number)
        for times in (stage_times(merged, stage) for stage in STAGES if stage.startswith(("start_", "first_")))
    ]
    # A service's workers run already: there the rest, the search for a node that answers, is nearly all.
    rest = max(0.0, seconds - sum(parts))
    _log.warning(
        "the first batch came after %.1f s: %.1f s to create a worker's process, %.1f s in imports, %.1f s for the "
        "dataset, %.1f s for its first samples, %.1f s for all else; diagnose() says whether each epoch pays that",
        *(seconds, *parts, rest),
    )
