"""What the transports of this process did besides reading: tried again, gave from a cache. Pure.

Data path: transport -> [totals] -> worker's answer -> statistics. A worker tells the main process what was added since
it reported last; `Counters.changes` is that.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COUNTERS", "KEYS", "Counters"]

KEYS: tuple[str, ...] = (
    "retries",
    "resumed",
    "given_up",
    "retry_wait_s",
    "cache_hits",
    "cache_misses",
    "cache_bytes",
    "cache_evictions",
)
"""What is counted, in the order in which `stats()` has it, behind ``store/``."""


class Counters:
    """Sums by name. They only grow. A sum of which two threads add at the same time may miss one of them."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(KEYS, 0.0)

    def add(self, name: str, number: float = 1) -> None:
        """Count."""
        self.sums[name] += number

    def changes(self, reported: dict[str, float]) -> Mapping[str, float]:
        """What was added since `reported`, which is brought up to date."""
        if reported == self.sums:
            return {}
        now = self.sums.copy()
        added = {name: now[name] - reported.get(name, 0.0) for name in KEYS if now[name] != reported.get(name, 0.0)}
        reported.update(now)
        return added


COUNTERS = Counters()
"""Of this process. A forked child goes on counting from its parent's: who reports takes differences."""
