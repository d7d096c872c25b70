"""Says which settings of a loader are measured, in which order. Pure.

Data path: facts about a loader -> [search_settings] -> bench.

What a model predicts (numbers of workers, samples in flight) comes in the order of the prediction, `predicted`; what
none predicts (threads, prefetching) is tried upon the best of those, `variants`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from asyncloader.telemetry.worker_tuning import WORTH

_DEFAULT_PREFETCH = 2
_PREFETCHES = (4, 8)
_FETCH_THREADS = 16


class Setting(NamedTuple):
    """The options that are searched.

    Attributes:
        workers: `num_workers`.
        threads: whether they are threads.
        prefetch: `prefetch_factor`; without workers it says nothing.
        concurrency: of samples; 0: the loader's default.
        persistent: `persistent_workers`.
    """

    workers: int
    threads: bool = False
    prefetch: int = _DEFAULT_PREFETCH
    concurrency: int = 0
    persistent: bool = False

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Return the setting that a loader has."""
        prefetch = facts["prefetch"] or _DEFAULT_PREFETCH
        return cls(facts["workers"], facts["threads"], prefetch, facts["concurrency"] or 0, facts["persistent"])

    def with_change(self, change: Mapping[str, Any]) -> Self:
        """Return the setting with options changed, by the names of the loader's arguments."""
        names = {"num_workers": "workers", "persistent_workers": "persistent", "concurrency": "concurrency"}
        return self._replace(**{names[name]: value for name, value in change.items()}).normal()

    def normal(self) -> Self:
        """Return the setting without options that say nothing."""
        if self.workers:
            return self
        return self._replace(threads=False, prefetch=_DEFAULT_PREFETCH, persistent=False)

    def change_from(self, other: Setting) -> dict[str, Any]:
        """Return the loader's arguments that make this setting of another one."""
        change: dict[str, Any] = {}
        if self.workers != other.workers:
            change["num_workers"] = self.workers
        if self.threads != other.threads:
            change["workers"] = "threads" if self.threads else None
        if self.workers and self.prefetch != other.prefetch:
            change["prefetch_factor"] = self.prefetch
        if self.concurrency != other.concurrency:
            change["concurrency"] = self.concurrency or None
        if self.workers and self.persistent != other.persistent:
            change["persistent_workers"] = self.persistent
        return change

    @property
    def cost(self) -> tuple[int, int, int]:
        """What the setting takes of the machine: of two that are as fast, the lesser is better."""
        return self.workers, self.concurrency, self.workers * self.prefetch

    def __str__(self) -> str:
        parts = [f"num_workers={self.workers}"]
        parts += ["workers='threads'"] * self.threads
        parts += [f"prefetch_factor={self.prefetch}"] * (self.workers > 0 and self.prefetch != _DEFAULT_PREFETCH)
        parts += [f"concurrency={self.concurrency}"] * (self.concurrency > 0)
        parts += ["persistent_workers=True"] * self.persistent
        return ", ".join(parts)


def predicted(base: Setting, changes: Iterable[Mapping[str, Any]]) -> list[Setting]:
    """Return the settings that a model's changes make, in its order, without those that are the same."""
    found: dict[Setting, None] = {}
    for change in changes:
        setting = base.with_change(change)
        if setting != base.normal():
            found[setting] = None
    return list(found)


def variants(best: Setting, facts: Mapping[str, Any], *, waits: bool) -> list[Setting]:
    """Return the settings that no model predicts, upon the best of the predicted.

    Args:
        best: that setting.
        facts: about the loader.
        waits: whether its samples rather wait than compute.
    """
    found: list[Setting] = []
    indexed = not facts["iterable"] and not facts["stateful"]
    if indexed and best.workers and not facts["context"]:
        found.append(best._replace(threads=not best.threads))
    if indexed and waits and not facts["asynchronous"] and not best.concurrency:
        # A thread for each sample in flight, in this process or in each worker.
        found += [Setting(0, concurrency=_FETCH_THREADS), best._replace(concurrency=_FETCH_THREADS)]
    if best.workers:
        found += [best._replace(prefetch=number) for number in _PREFETCHES if number != best.prefetch]
    return [each for each in dict.fromkeys(found) if each != best]


def needs_thread_safety(setting: Setting, base: Setting, facts: Mapping[str, Any]) -> bool:
    """Whether the setting, unlike the base, calls a blocking dataset from several threads."""
    if facts["asynchronous"]:
        return False
    return (setting.threads and not base.threads) or (setting.concurrency > 1 and base.concurrency <= 1)


def best_of(rates: Mapping[Setting, float], base: Setting, facts: Mapping[str, Any]) -> Setting:
    """Return the best setting: of those that are about as fast as the fastest, the cheapest; one that asks nothing new
    of the dataset goes before one that does.

    Args:
        rates: of each, in batches per second; at least one.
        base: the loader's own setting.
        facts: about the loader.
    """
    least = max(rates.values()) / (1 + WORTH)

    def order(each: Setting) -> tuple[bool, tuple[int, int, int], float]:
        return needs_thread_safety(each, base, facts), each.cost, -rates[each]

    return min((each for each, rate in rates.items() if rate >= least), key=order)
