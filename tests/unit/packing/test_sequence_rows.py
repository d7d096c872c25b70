"""`SequenceRows`: the rows of a dataset's sequences, however it is read."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pytest
import torch

from asyncloader import DataLoader, Dataset, PackingSampler, PackSequences, SequenceRows, Subset
from tests.unit.samplers.length_samplers import joined

LENGTHS = [5, 30, 1, 17, 12, 0, 8, 64]


class Plain(Dataset[Any]):
    """Sequence i consists of the tokens ``100 * i``, ``100 * i + 1``, ..."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def read(self, index: int) -> Any:
        return np.arange(100 * index, 100 * index + LENGTHS[index])

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class Fields(Plain):
    def __getitem__(self, index: int) -> Any:
        return {"tokens": torch.from_numpy(self.read(index)), "labels": self.read(index), "name": str(index)}


class Batched(Plain):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("batches are read at once")

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self.read(index) for index in indices]


class Awaited(Plain):
    async def __aenter__(self) -> Self:
        self.entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __getitem__(self, index: int) -> Any:
        assert self.entered
        return self.read(index)


class AwaitedBatches(Awaited):
    async def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        assert self.entered
        return [self.read(index) for index in indices]


def expected(sampler: PackingSampler) -> list[list[int]]:
    """The tokens of each row."""
    rows: Any = sampler
    return [[100 * index + at for index, start, stop in row for at in range(start, stop)] for row in rows]


@pytest.mark.parametrize("kind", [Plain, Fields, Batched, Awaited, AwaitedBatches])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("size", [None, 1, 3])
def test_every_way_to_read(kind: type[Plain], workers: int, seed: int | None, view: bool, size: int | None) -> None:
    """Blocking and awaited datasets, of samples and of batches, also behind torch's views, give the rows' tokens; rows
    of a batch lie one behind the other.
    """
    sampler = PackingSampler(LENGTHS, 20, 1, strategy="best_fit_wrap")
    wanted = expected(sampler)  # now: in seeded mode a loader sets the sampler's next epoch
    dataset: Any = Subset(kind(), range(len(LENGTHS))) if view else kind()
    with DataLoader[Any](
        SequenceRows(dataset),
        batch_size=size,
        sampler=sampler,
        collate_fn=PackSequences(),
        num_workers=workers,
        seed=seed,
    ) as loader:
        batches = [batch["tokens"].tolist() for batch in loader]
    assert batches == [joined(wanted[at : at + (size or 1)]) for at in range(0, len(wanted), size or 1)]


def test_torch_reads_it() -> None:
    """torch's loader reads rows, too, and a copy of them."""
    sampler = PackingSampler(LENGTHS, 20, 1, strategy="wrap")
    for dataset in (Plain(), Batched()):
        rows = pickle.loads(pickle.dumps(SequenceRows(dataset)))
        assert len(rows) == len(LENGTHS)
        loader = torch.utils.data.DataLoader(rows, batch_size=1, sampler=sampler, collate_fn=PackSequences())
        assert [row["tokens"].tolist() for row in loader] == expected(sampler)


def test_a_row() -> None:
    """Fields with an element for each token are cut; the others stay. Whole sequences are as they were read."""
    (part,) = SequenceRows(Fields())[((3, 2, 4),)]
    assert part["tokens"].tolist() == part["labels"].tolist() == [302, 303]
    assert part["name"] == "3"
    assert [each.tolist() for each in SequenceRows(Plain())[((3, 2, 4), (2, 0, 1))]] == [[302, 303], [200]]
    assert [each.tolist() for each in SequenceRows(Batched())[2, 0]] == [[200], [0, 1, 2, 3, 4]]


def test_sequences_that_fail() -> None:
    """An error is the sequence's own, also if it is awaited with others; too short a sequence is an error."""
    with pytest.raises(ValueError, match="the sequence has 17 tokens, but the plan has 18 or more"):
        SequenceRows(Plain())[((3, 2, 18),)]
    for kind in (Awaited, AwaitedBatches):
        with pytest.raises(AttributeError, match="entered"):  # its context was not entered
            asyncio.run(SequenceRows(kind())[0, 1, 2])


def test_a_bad_sequence_costs_its_row() -> None:
    """With an error policy the row is left out, and the others stay."""

    class Bad(Plain):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                raise ValueError("bad")
            return self.read(index)

    sampler = PackingSampler(LENGTHS, 70, 1)
    kept: list[Any] = [row for row in sampler if 4 not in row]
    assert 0 < len(kept) < len(sampler)
    with DataLoader[Any](
        SequenceRows(Bad()), batch_size=1, sampler=sampler, collate_fn=PackSequences(), on_error="skip"
    ) as loader:
        found = [batch["tokens"].tolist() for batch in loader]
    assert found == [[at for index in row for at in Plain().read(index).tolist()] for row in kept]
