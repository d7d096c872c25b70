"""Chooses the settings of a loader to measure, and the best of the measured settings. Pure.

Data path: facts about a loader -> [search_settings] -> bench.

First come the changes that a model predicts to be faster (numbers of workers, samples in flight), in the order of the
prediction: `apply_predictions`. Then come changes of the best of these settings that no model predicts (threads,
prefetching): `propose_variants`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from asyncloader.telemetry.tuner import WORTH

_DEFAULT_PREFETCH = 2
_PREFETCHES = (4, 8)
_FETCH_THREADS = 16


class Setting(NamedTuple):
    """The options that the search varies.

    Attributes:
        workers: value of `num_workers`.
        threads: whether the workers are threads.
        prefetch: value of `prefetch_factor`, which has no effect without workers.
        concurrency: number of samples in flight; 0 for the loader's default.
        persistent: value of `persistent_workers`.
    """

    workers: int
    threads: bool = False
    prefetch: int = _DEFAULT_PREFETCH
    concurrency: int = 0
    persistent: bool = False

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Return the setting of a loader with these facts."""
        prefetch = facts["prefetch"] or _DEFAULT_PREFETCH
        return cls(facts["workers"], facts["threads"], prefetch, facts["concurrency"] or 0, facts["persistent"])

    def with_change(self, change: Mapping[str, Any]) -> Self:
        """Return the setting with changes that are given as arguments of the loader."""
        names = {"num_workers": "workers", "persistent_workers": "persistent", "concurrency": "concurrency"}
        return self._replace(**{names[name]: value for name, value in change.items()}).normal()

    def normal(self) -> Self:
        """Return the setting with the options that have no effect at their defaults."""
        if self.workers:
            return self
        return self._replace(threads=False, prefetch=_DEFAULT_PREFETCH, persistent=False)

    def change_from(self, other: Setting) -> dict[str, Any]:
        """Return the loader's arguments that turn another setting into this setting."""
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
        """Return the resources that the setting uses; the cheaper of two equally fast settings is better."""
        return self.workers, self.concurrency, self.workers * self.prefetch

    def __str__(self) -> str:
        parts = [f"num_workers={self.workers}"]
        parts += ["workers='threads'"] * self.threads
        parts += [f"prefetch_factor={self.prefetch}"] * (self.workers > 0 and self.prefetch != _DEFAULT_PREFETCH)
        parts += [f"concurrency={self.concurrency}"] * (self.concurrency > 0)
        parts += ["persistent_workers=True"] * self.persistent
        return ", ".join(parts)


def apply_predictions(base: Setting, changes: Iterable[Mapping[str, Any]]) -> list[Setting]:
    """Apply a model's changes to a setting. Returns the distinct new settings in the model's order."""
    found: dict[Setting, None] = {}
    for change in changes:
        setting = base.with_change(change)
        if setting != base.normal():
            found[setting] = None
    return list(found)


def propose_variants(best: Setting, facts: Mapping[str, Any], *, waits: bool) -> list[Setting]:
    """Propose changes of the best predicted setting that no model predicts.

    Args:
        best: the best predicted setting.
        facts: description of the loader.
        waits: whether the loader's samples mostly wait, rather than compute.
    """
    found: list[Setting] = []
    indexed = not facts["iterable"] and not facts["stateful"]
    if indexed and best.workers and not facts["context"]:
        found.append(best._replace(threads=not best.threads))
    if indexed and waits and not facts["asynchronous"] and not best.concurrency:
        # Each sample in flight has a thread, in this process or in each worker.
        found += [Setting(0, concurrency=_FETCH_THREADS), best._replace(concurrency=_FETCH_THREADS)]
    if best.workers:
        found += [best._replace(prefetch=number) for number in _PREFETCHES if number != best.prefetch]
    return [each for each in dict.fromkeys(found) if each != best]


def needs_thread_safety(setting: Setting, base: Setting, facts: Mapping[str, Any]) -> bool:
    """Return whether the setting, unlike the base, calls a blocking dataset from several threads."""
    if facts["asynchronous"]:
        return False
    return (setting.threads and not base.threads) or (setting.concurrency > 1 and base.concurrency <= 1)


def choose_best(rates: Mapping[Setting, float], base: Setting, facts: Mapping[str, Any]) -> Setting:
    """Choose the cheapest of the settings that are about as fast as the fastest.

    A setting that needs a thread-safe dataset, unlike the base, is chosen only if all other settings are slower.

    Args:
        rates: batches per second of each setting, of at least one.
        base: the loader's own setting.
        facts: description of the loader.
    """
    least = max(rates.values()) / (1 + WORTH)

    def order(each: Setting) -> tuple[bool, tuple[int, int, int], float]:
        return needs_thread_safety(each, base, facts), each.cost, -rates[each]

    return min((each for each, rate in rates.items() if rate >= least), key=order)
