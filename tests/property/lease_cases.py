"""Epochs of leased shards: their options, and shards that hold numbers. Used by the model in `lease_world.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from asyncloader import RemoteIterableDataset
from asyncloader.formats import Located, OnBad, ShardError, ShardFormat
from asyncloader.remote.assignment import Lease
from asyncloader.remote.catalog import Piece, Shard

__all__ = ["Case", "Shards", "pieces_of", "plan_of"]


@dataclass(frozen=True)
class Case:
    """One epoch's options.

    Attributes:
        shards: of each shard its pieces, and of each piece how many samples it holds.
        group: pieces of a lease, at most.
        workers: lanes.
        batch_size: samples; None: no batches.
        credits: tasks a worker.
        shuffle: samples of a block of the shuffle buffer; 0 for none.
        unit: bytes of a sample: large ones make lanes ask for the next lease before the end of the one they read.
        sized: whether the shards' sizes are known.
        chunk: samples that come with one read.
        bad: samples that cannot be read, stepped over by the reader.
        broken: samples at which a shard cannot be read on.
        skips: bad samples are left out; else they are raised.
        replaces: instead of being left out, each is replaced; see `substitutes`.
        drop_last: no short batch.
        in_order: batches come in the order of tasks.
        every: a lane's state is taken every so many batches.
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
        """Of the whole data set, the bad ones included."""
        return sum(map(sum, self.shards))

    def lost(self) -> set[int]:
        """Samples that nobody can read."""
        lost, first = set(self.bad), 0
        for pieces in self.shards:
            for size in pieces:
                places = range(first, first + size)
                for number in places:
                    if number in self.broken:
                        lost.update(range(number, first + size))
                        break
                first += size
        return lost

    def substitutes(self) -> list[int]:
        """What takes the places of bad samples, and of the rests of pieces, ascending."""
        found: list[int] = []
        first = 0
        for shard, pieces in enumerate(self.shards):
            begin = first
            for size in pieces:
                for number in range(first, first + size):
                    if number in self.bad or number in self.broken:
                        found.append(substitute_of(shard, number - begin))
                    if number in self.broken:
                        break
                first += size
        return sorted(found)

    def replace(self, _: Any, error: Exception) -> dict[str, int]:
        """The `on_error` function."""
        assert isinstance(error, ShardError)
        assert error.offset is not None
        return {"n": substitute_of(int(error.url), error.offset // self.unit)}


def substitute_of(shard: int, place: int) -> int:
    """What takes the place of a sample."""
    return -1 - 1000 * shard - place


def plan_of(case: Case) -> list[Lease]:
    """The leases, in the order of the shards."""
    pieces = pieces_of(case)
    return [tuple(pieces[first : first + case.group]) for first in range(0, len(pieces), case.group)]


def pieces_of(case: Case) -> list[Piece]:
    """The pieces, in the order of the shards."""
    plan: list[Piece] = []
    for shard, pieces in enumerate(case.shards):
        start = 0
        for place, size in enumerate(pieces):
            stop = start + size * case.unit
            plan.append(Piece(shard, start, None if place == len(pieces) - 1 else stop, place > 0))
            start = stop
    return plan


class Shards(RemoteIterableDataset):
    """The data set: sample `n` is ``{"n": n}``, and `unit` bytes long. Only its catalogue and bytes are made up."""

    def __init__(self, case: Case) -> None:
        super().__init__("memory://", shuffle_buffer=case.shuffle)
        self._case = case
        self._first = [sum(map(sum, case.shards[:shard])) for shard in range(len(case.shards))]
        self._shards = [
            Shard(str(number), ShardFormat("jsonl", None), sum(pieces) * case.unit if case.sized else None)
            for number, pieces in enumerate(case.shards)
        ]

    async def _open(self, shard: Shard, piece: Piece, on_bad: OnBad) -> AsyncGenerator[list[Located], None]:
        case = self._case
        stop = sum(case.shards[piece.shard]) if piece.stop is None else piece.stop // case.unit
        found: list[Located] = []
        for place in range(piece.start // case.unit, stop):
            number = self._first[piece.shard] + place
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
