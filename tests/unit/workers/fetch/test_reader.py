"""Reader: begins epochs, fetches batches, saves its position, and resumes from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from asyncloader.base.events import Cursor
from asyncloader.errors import StateError
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from tests.unit.workers.fetch.drawing import drawn

LENGTH = 11


class Map:
    """A map dataset whose samples are indices with the numbers drawn for them."""

    def __init__(self) -> None:
        self.read = 0
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return index, drawn()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset[Any]):
    """A stream without a state; records its calls."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.calls: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        self.calls.append("iter")
        for number in range(self.length):
            self.calls.append("read")
            yield number, drawn()


class StatefulStream(Stream):
    """A stream whose own state has its position."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        self.calls.append("iter")
        while self.at < self.length:
            self.at += 1
            yield self.at - 1, drawn()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load")
        self.at = state["at"]


def plain(samples: Any) -> Any:
    return list(samples)


def setup(dataset: Any, **changes: Any) -> WorkerSetup:
    iterable = isinstance(dataset, IterableDataset)
    common = WorkerSetup(
        dataset=dataset,
        iterable=iterable,
        auto_collation=True,
        batch_size=2,
        collate_fn=plain,
        drop_last=False,
        base_seed=1,
        worker_init_fn=None,
        num_workers=1,
        concurrency=4,
        starts=[EpochStart()],
        snapshot_every=1,
    )
    return common._replace(**changes)


SEEDED = SeededSetup(seed=3, replicas=1, first_stream=0, seed_collate=False)


def reader(dataset: Any, start: EpochStart | None = None, **changes: Any) -> DatasetReader:
    worker_id, in_worker = changes.pop("worker_id", 0), changes.pop("in_worker", True)
    made = DatasetReader(setup(dataset, **changes), dataset, plain, worker_id=worker_id, in_worker=in_worker)
    made.begin(start or EpochStart())
    return made


def batches(one: DatasetReader, count: int = 100) -> tuple[list[Any], Cursor | None]:
    """The next batches, and the cursor after the last of them."""
    found, cursor = [], None
    for _ in range(count):
        try:
            found.append(one.fetch(None))
        except EndOfData:
            break
        cursor = one.cursor()
    return found, None if cursor is None else cursor.value


MODES: dict[str, Any] = {"torch": None, "seeded": SEEDED}


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_without_a_state_is_read_anew(mode: str) -> None:
    """The stream is read from its beginning; delivered batches are dropped without being collated."""
    collated: list[Any] = []
    whole, cursor = batches(reader(Stream(), seeded=SEEDED))
    assert cursor is None
    dataset = Stream()

    def collate(samples: Any) -> Any:
        collated.append(samples)
        return samples

    one = DatasetReader(setup(dataset, seeded=MODES[mode]), dataset, collate, in_worker=True)
    one.begin(EpochStart(skip=4))
    assert dataset.calls == ["iter"] + ["read"] * 8
    assert collated == []
    rest, _ = batches(one)
    assert [[n for n, _ in batch] for batch in rest] == [[8, 9], [10]]
    if mode == "seeded":
        assert rest == whole[4:]


def test_a_stream_that_became_shorter_is_refused() -> None:
    """The delivered batches must exist; the error has their number and the stream's length."""
    with pytest.raises(StateError, match="ended after 3 batches, but 5 had been delivered"):
        reader(Stream(5), EpochStart(skip=5))
    cursor = Cursor(1, 2, False, {"at": 2}, None)
    with pytest.raises(StateError, match="ended after 3 batches, but 5 had been delivered"):
        reader(StatefulStream(5), EpochStart(cursor=cursor, skip=4))


def test_a_stream_that_had_ended_stays_at_its_end() -> None:
    """A copy whose last batch was short is not read again, whatever its state is."""
    dataset = StatefulStream()
    _, cursor = batches(reader(dataset), 6)
    assert cursor is not None
    assert cursor.ended
    assert cursor.dataset == {"at": 0}
    assert batches(reader(StatefulStream(), EpochStart(cursor=cursor)))[0] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dataset", [Map, Stream])
def test_in_the_callers_process_the_generators_are_kept(mode: str, dataset: Any) -> None:
    """In seeded mode the process's generators are unchanged; in torch mode the dataset draws from them."""
    random.seed(1)
    before = random.getstate(), torch.get_rng_state().tolist()
    one = reader(dataset(), EpochStart(skip=1), seeded=MODES[mode], in_worker=False)
    batch = one.fetch((0, [0]) if mode == "seeded" else [0])
    assert ((random.getstate(), torch.get_rng_state().tolist()) == before) == (mode == "seeded")
    if mode == "seeded":
        start = EpochStart(skip=1)
        assert batch == reader(dataset(), start, seeded=SEEDED).fetch((0, [0]))
