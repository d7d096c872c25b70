"""Epochs of assigned shards: their options, and shards that hold numbers. Used by `assignment_world.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from asyncloader import RemoteIterableDataset
from asyncloader.formats import Located, OnBad, ShardError, ShardFormat
from asyncloader.remote.catalog import Shard
from asyncloader.remote.prefetch import AnyRange
from asyncloader.remote.reading import Pins
from asyncloader.remote.shard_splitting import Assignment, CatalogRange


@dataclass(frozen=True)
class Case:
    """One epoch's options.

    Attributes:
        shards: per shard the sample counts of its ranges.
        group: ranges per assignment, at most.
        workers: number of workers.
        batch_size: samples; None: no batches.
        credits: tasks per worker.
        shuffle: samples per block of the shuffle buffer; 0: no shuffling.
        unit: bytes per sample; if large, workers request an assignment before the end of the current assignment.
        sized: whether the shards' sizes are known.
        chunk: samples that one read gives.
        bad: samples that cannot be read and are skipped by the reader.
        broken: samples at which reading a shard fails.
        skips: bad samples are skipped; otherwise they are raised.
        replaces: bad samples are replaced instead of skipped; see `substitutes`.
        drop_last: no short batch.
        in_order: batches are delivered in the order of tasks.
        every: batches between two snapshots of a worker stream's state.
    """

    shards: tuple[tuple[int, ...], ...] = ((3, 4), (5,))
    group: int = 1
    workers: int = 2
    batch_size: int | None = 2
    credits: int = 2
    shuffle: int = 0
    unit: int = 1
    sized: bool = True
    chunk: int = 2
    bad: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    skips: bool = True
    replaces: bool = False
    drop_last: bool = False
    in_order: bool = True
    every: int = 1

    @property
    def samples(self) -> int:
        """The number of samples of the whole data set, including bad samples."""
        return sum(map(sum, self.shards))

    def lost(self) -> set[int]:
        """Samples that cannot be read."""
        lost, first = set(self.bad), 0
        for shard_ranges in self.shards:
            for size in shard_ranges:
                places = range(first, first + size)
                for number in places:
                    if number in self.broken:
                        lost.update(range(number, first + size))
                        break
                first += size
        return lost

    def substitutes(self) -> list[int]:
        """Return the replacements of bad samples and of unreadable ends of ranges, ascending."""
        found: list[int] = []
        first = 0
        for shard, shard_ranges in enumerate(self.shards):
            begin = first
            for size in shard_ranges:
                for number in range(first, first + size):
                    if number in self.bad or number in self.broken:
                        found.append(substitute_of(shard, number - begin))
                    if number in self.broken:
                        break
                first += size
        return sorted(found)

    def replace(self, _: Any, error: Exception) -> dict[str, int]:
        """Used as the `on_error` function."""
        assert isinstance(error, ShardError)
        assert error.offset is not None
        return {"n": substitute_of(int(error.url), error.offset // self.unit)}


def substitute_of(shard: int, place: int) -> int:
    """Return the replacement of a sample."""
    return -1 - 1000 * shard - place


def plan_of(case: Case) -> list[Assignment]:
    """Return the assignments, in the order of the shards."""
    shard_ranges = ranges_of(case)
    return [tuple(shard_ranges[first : first + case.group]) for first in range(0, len(shard_ranges), case.group)]


def ranges_of(case: Case) -> list[CatalogRange]:
    """Return the ranges, in the order of the shards."""
    plan: list[CatalogRange] = []
    for shard, shard_ranges in enumerate(case.shards):
        start = 0
        for place, size in enumerate(shard_ranges):
            stop = start + size * case.unit
            plan.append(CatalogRange(shard, start, None if place == len(shard_ranges) - 1 else stop, place > 0))
            start = stop
    return plan


class Shards(RemoteIterableDataset):
    """The dataset: sample `n` is ``{"n": n}`` and `unit` bytes long. Only its catalog and bytes are simulated."""

    def __init__(self, case: Case) -> None:
        super().__init__("memory://", shuffle_buffer=case.shuffle)
        self._case = case
        self._first = [sum(map(sum, case.shards[:shard])) for shard in range(len(case.shards))]
        self.planned_shards = [
            Shard(str(number), ShardFormat("jsonl", None), sum(shard_ranges) * case.unit if case.sized else None)
            for number, shard_ranges in enumerate(case.shards)
        ]

    async def _open(
        self, pins: Pins, shard: Shard, shard_range: AnyRange, on_bad: OnBad
    ) -> AsyncGenerator[list[Located], None]:
        case = self._case
        stop = sum(case.shards[shard_range.shard]) if shard_range.stop is None else shard_range.stop // case.unit
        found: list[Located] = []
        for place in range(shard_range.start // case.unit, stop):
            number = self._first[shard_range.shard] + place
            if number in case.broken:
                if found:
                    yield found
                raise ShardError("broken", url=shard.url, offset=place * case.unit)
            if number in case.bad:
                resume = (place + 1) * case.unit
                on_bad(ShardError("bad", url=shard.url, offset=place * case.unit, resume=resume))
            else:
                found.append(Located({"n": number}, (place + 1) * case.unit))
            if len(found) == case.chunk:
                yield found
                found = []
        if found:
            yield found
