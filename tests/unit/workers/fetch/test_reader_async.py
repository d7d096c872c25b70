"""Asynchronous datasets: samples are made concurrently, each under its own random numbers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from asyncloader.errors import StateError
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.seeding import SampleSeeder, sample_rng
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup

LENGTH = 11
SEEDED = SeededSetup(seed=3, replicas=1, first_stream=0, seed_collate=False)


def drawn() -> float:
    return sample_rng().random.random()


class Map:
    """Its samples take a few turns of the loop, some more than others, and draw in between."""

    def __len__(self) -> int:
        return LENGTH

    async def __getitem__(self, index: int) -> Any:
        first = drawn()
        for _ in range(3 - index % 3):
            await asyncio.sleep(0)
        return index, first, drawn()


class Stream:
    """A stream without a state."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in range(self.length):
            await asyncio.sleep(0)
            yield number, drawn()


class Broken(Stream):
    """A stream whose first beginning fails."""

    begun = 0

    def __aiter__(self) -> Any:
        self.begun += 1
        if self.begun == 1:
            raise OSError("not yet")
        return super().__aiter__()


def reader(dataset: Any, start: EpochStart | None = None, collate: Any = list, **changes: Any) -> DatasetReader:
    in_worker = changes.pop("in_worker", False)
    common = WorkerSetup(
        dataset=dataset,
        iterable=hasattr(dataset, "__aiter__"),
        auto_collation=True,
        batch_size=2,
        collate_fn=collate,
        drop_last=False,
        base_seed=1,
        worker_init_fn=None,
        num_workers=1,
        concurrency=4,
        starts=[EpochStart()],
        snapshot_every=1,
        seeded=SEEDED,
    )
    made = DatasetReader(common._replace(**changes), dataset, collate, in_worker=in_worker)
    made.begin(start or EpochStart())
    return made


async def rest_of(one: DatasetReader) -> list[Any]:
    found = []
    while True:
        try:
            found.append(await one.fetch_async(None))
        except EndOfData:
            return found


def numbers(batches: list[Any]) -> list[int]:
    return [sample[0] for batch in batches for sample in batch]


def at_sample(position: int) -> list[float]:
    SampleSeeder(3, 0, concurrent=True).sample(position)
    return [drawn(), drawn()]


@pytest.mark.parametrize("view", [False, True])
async def test_concurrent_samples_have_their_own_numbers(view: bool) -> None:
    """A sample's numbers do not depend on samples made at the same time, in any batch; also through a Subset."""
    dataset: Any = Subset(Map(), range(LENGTH)) if view else Map()  # type: ignore[arg-type]
    one = reader(dataset)
    indices = [[4, 0, 9], [1, 2], [7, 7, 5, 3]]
    found = await asyncio.gather(*(one.fetch_async((10 * i, index)) for i, index in enumerate(indices)))
    for i, (batch, index) in enumerate(zip(found, indices, strict=True)):
        assert batch == [(number, *at_sample(10 * i + place)) for place, number in enumerate(index)]


@pytest.mark.parametrize("in_worker", [False, True])
async def test_the_users_collation_is_exact(in_worker: bool) -> None:
    """Collation is not concurrent: it may draw from the global generators, without a warning."""

    def collate(samples: Any) -> Any:
        return random.random(), float(torch.rand(())), drawn()

    def made() -> DatasetReader:
        return reader(Map(), collate=collate, in_worker=in_worker, seeded=SEEDED._replace(seed_collate=True))

    one = made()
    found = await asyncio.gather(*(one.fetch_async((position, [1, 2])) for position in (0, 4, 8)))
    other = made()
    assert [await other.fetch_async((position, [2, 1])) for position in (8, 4, 0)] == found[::-1]
    assert len({number for batch in found for number in batch}) == 9


async def test_tasks_of_a_stream_take_turns() -> None:
    """Tasks that are given together get the stream's batches in order."""
    one = reader(Stream())
    found = await asyncio.gather(*(one.fetch_async(None) for _ in range(6)))
    assert numbers(found) == list(range(LENGTH))
    assert found == await rest_of(reader(Stream()))
    with pytest.raises(EndOfData):
        await one.fetch_async(None)


async def test_no_task_runs_into_the_skipping() -> None:
    """Skipped batches answer no task, however many tasks wait for the beginning."""
    whole = await rest_of(reader(Stream()))
    one = reader(Stream(), EpochStart(skip=3))
    assert await asyncio.gather(*(one.fetch_async(None) for _ in range(3))) == whole[3:]


async def test_a_stream_that_became_shorter_fails_every_task() -> None:
    """If a delivered batch is missing, every task gets that error, not the end of the stream."""
    one = reader(Stream(5), EpochStart(skip=5))
    found = await asyncio.gather(*(one.fetch_async(None) for _ in range(3)), return_exceptions=True)
    for error in found:
        assert isinstance(error, StateError)
        assert "ended after 3 batches, but 5 had been delivered" in str(error)
    one.begin(EpochStart(epoch=1))
    assert numbers(await rest_of(one)) == list(range(5))


async def test_a_beginning_that_failed_is_tried_again() -> None:
    """The dataset's error is raised, and the next task begins again, and drops all batches that are to be dropped."""
    one = reader(Broken(), EpochStart(skip=4))
    with pytest.raises(OSError, match="not yet"):
        await one.fetch_async(None)
    assert numbers(await rest_of(one)) == [8, 9, 10]
