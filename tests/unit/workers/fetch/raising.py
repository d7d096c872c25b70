"""Datasets some of whose samples raise, and readers of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader.base.events import SkippedSample
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample_errors import ErrorPolicy, NoSamples
from asyncloader.workers.fetch.seeding import sample_rng
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup

SEEDED = SeededSetup(seed=3, replicas=1, first_stream=0, seed_collate=False)
SKIP = ErrorPolicy("skip")
LENGTH = 40
MODES: dict[str, Any] = {"torch": None, "seeded": SEEDED}


class Map(Dataset[Any]):
    """A map dataset whose samples are indices with the numbers drawn for them; some raise, after a draw."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)

    def __len__(self) -> int:
        return LENGTH

    def sample(self, index: int) -> Any:
        own = sample_rng().random.random()
        if index in self.bad:
            raise ValueError(f"bad {index}")
        return index, own

    def __getitem__(self, index: int) -> Any:
        drawn = float(torch.rand(()))
        return *self.sample(index), drawn


class AsyncMap(Map):
    async def __getitem__(self, index: int) -> Any:
        for _ in range(1 + (-index) % 5):  # the smaller indices take longer
            await asyncio.sleep(0)
        return self.sample(index)


class Getitems(Map):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self.sample(index) for index in indices]


class OnlyGetitems(Dataset[Any]):
    """Has no `__getitem__` but that of `Dataset`."""

    def __getitems__(self, indices: list[int]) -> Any:
        raise OSError("no batch")


class AsyncGetitems(AsyncMap):
    async def __getitems__(self, indices: list[int]) -> Any:
        await asyncio.sleep(0)
        return [self.sample(index) for index in indices]


class AsyncOnlyGetitems(Dataset[Any]):
    async def __getitems__(self, indices: list[int]) -> Any:
        raise OSError("no batch")


class StreamIterator:
    """A stream's iterator that goes on after an exception, and has a state."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.length, self.bad, self.at = length, bad, 0

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> Any:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        own = sample_rng().random.random()
        if self.at - 1 in self.bad:
            raise ValueError(f"bad {self.at - 1}")
        return self.at - 1, own

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Stream(IterableDataset[Any]):
    def __init__(self, length: int, *bad: int) -> None:
        self.length, self.bad = length, set(bad)

    def __iter__(self) -> Iterator[Any]:
        return StreamIterator(self.length, self.bad)


class AsyncStreamIterator(StreamIterator):
    def __aiter__(self) -> AsyncStreamIterator:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None


class AsyncStream(Stream):
    def __aiter__(self) -> AsyncIterator[Any]:
        return AsyncStreamIterator(self.length, self.bad)


class BrokenGenerator(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(3)
        raise ValueError("bad 3")


class BrokenAsyncGenerator(BrokenGenerator):
    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in range(3):
            yield number
        raise ValueError("bad 3")


def reader(dataset: Any, policy: ErrorPolicy | None = None, **changes: Any) -> DatasetReader:
    """The reader of worker 2 of 3, at the beginning of an epoch; `changes` are fields of the set-up."""
    start = changes.pop("start", EpochStart())
    common = WorkerSetup(
        dataset=dataset,
        iterable=isinstance(dataset, IterableDataset),
        auto_collation=changes.get("batch_size", 1) is not None,
        batch_size=4,
        collate_fn=list,
        drop_last=False,
        base_seed=1,
        worker_init_fn=None,
        num_workers=3,
        concurrency=8,
        starts=[EpochStart()] * 3,
        snapshot_every=1,
        policy=policy,
    )
    collate = changes.pop("collate_fn", list)
    made = DatasetReader(common._replace(**changes), dataset, collate, worker_id=2, in_worker=True)
    made.begin(start)
    return made


async def fetch(one: DatasetReader, index: Any = None, bad: list[SkippedSample] | None = None) -> Any:
    """Fetch, blocking or asynchronously, as the dataset requires."""
    if one.asynchronous:
        return await one.fetch_async(index, bad)
    return one.fetch(index, bad)


async def rest(one: DatasetReader, bad: list[SkippedSample] | None = None) -> list[Any]:
    """All remaining batches; None for a batch without samples."""
    found: list[Any] = []
    while True:
        records: list[SkippedSample] = []
        try:
            found.append(await fetch(one, None, records))
        except NoSamples:
            assert records
            found.append(None)
        except EndOfData:
            assert records == []
            return found
        finally:
            if bad is not None:
                bad += records
        one.cursor()


def raised(error: Exception) -> Exception:
    """The exception with a traceback, as if a dataset had raised it."""
    try:
        raise error
    except Exception as caught:
        return caught


def indices(batch: Any) -> list[int]:
    """The indices of a batch's samples."""
    return [sample[0] for sample in batch]


def places(bad: list[SkippedSample]) -> list[Any]:
    """The parts of the records that do not depend on the process."""
    return [(record.index, record.position, record.action) for record in bad]


def at(mode: str, first: int, index: Any) -> Any:
    """An index as readers of this mode get it."""
    return (first, index) if mode == "seeded" else index
