"""Times the collation of batches, which runs within their fetch.

Data path: worker: fetch -> [timed_collate: collate] -> codec -> ring. Also without workers.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from asyncloader.telemetry.counters import Stage


class TimedCollate:
    """Collates, and records how long it took.

    Attributes:
        seconds: of the last call; the reader sets it to 0.
    """

    __slots__ = ("_function", "_time", "seconds")

    def __init__(self, function: Callable[[Any], Any], time: Callable[[Stage, float], None]) -> None:
        self._function = function
        self._time = time
        self.seconds = 0.0

    def __call__(self, samples: Any) -> Any:
        """Return the batch of these samples."""
        began = perf_counter()
        batch = self._function(samples)
        self.seconds = perf_counter() - began
        self._time("collate", self.seconds)
        return batch
