"""Counts what this process's transports did besides reading, such as retries and cache hits. Pure.

Data path: transport -> [counters] -> worker's answer -> statistics. With each answer a worker reports what was added
since its last report: `Counters.changes`.
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
"""The counters' names, in the order of `stats()`, where they have the prefix ``store/``."""


class Counters:
    """Sums by name, which only grow. If two threads add to a sum at the same time, one addition may be lost."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(KEYS, 0.0)

    def add(self, name: str, number: float = 1) -> None:
        """Add `number` to a sum."""
        self.sums[name] += number

    def changes(self, reported: dict[str, float]) -> Mapping[str, float]:
        """What was added since `reported`, which is updated to the current sums."""
        if reported == self.sums:
            return {}
        now = self.sums.copy()
        added = {name: now[name] - reported.get(name, 0.0) for name in KEYS if now[name] != reported.get(name, 0.0)}
        reported.update(now)
        return added


COUNTERS = Counters()
"""The counters of this process. A forked child continues from its parent's sums, so reports are differences."""
