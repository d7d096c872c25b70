"""Datasets and samplers of the kinds. What they give, and their own states, never change: states have been saved."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from asyncloader import get_worker_info, sample_rng
from tests.states.files import COUNT


def number_of(sample: dict[str, Any]) -> int:
    """Return the number of a shard's sample."""
    return int(sample["n"])


class Rows(Dataset[Any]):
    """Each row is its index."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return index


class Drawn(Rows):
    """Each row is its index, and numbers from each generator that a sample can use."""

    def __getitem__(self, index: int) -> Any:
        rng = sample_rng()
        numbers = torch.rand(()), random.random(), np.random.random(), rng.random.random(), rng.numpy.random()
        return torch.tensor([index, *(int(1000 * number) for number in numbers)])


class Seeds(Rows):
    """A row is its index, and the epoch's base seed, of which a worker's random numbers are made."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([index, (info.seed - info.id) % 1000])


class Awaited(Rows):
    """`Rows`, awaited."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return index


class Counting(Rows):
    """A row also has the number of rows that this copy has given, which is the dataset's state."""

    def __init__(self) -> None:
        self.given = 0

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return 100 * self.given + index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Sequences(Rows):
    """A row is 1 to 5 tokens."""

    lengths = tuple(1 + n % 5 for n in range(COUNT))

    def __getitem__(self, index: int) -> Any:
        return {"tokens": torch.arange(10 * index, 10 * index + self.lengths[index])}


class _At:
    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Order(_At, Sampler[Any]):
    """A sampler with a state; or one that is awaited, or of batches."""

    def __init__(self) -> None:
        self.items: list[Any] = [(7 * k) % COUNT for k in range(COUNT)]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]
        self.at = 0


class Batches(Order):
    """A batch sampler with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.items = [self.items[first : first + 1 + first % 3] for first in range(0, COUNT, 3)]


class AwaitedOrder(_At):
    """A sampler that is awaited."""

    async def __aiter__(self) -> AsyncIterator[int]:
        while self.at < COUNT:
            await asyncio.sleep(0)
            self.at += 1
            yield (7 * self.at) % COUNT
        self.at = 0


class Places(_At):
    """An iterator with a state."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]


class OrderOfIterators(Sampler[int]):
    """A sampler whose iterators have a state."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return Places([(5 * k) % COUNT for k in range(COUNT)])


def mine() -> list[int]:
    """Return this worker's numbers."""
    info = get_worker_info()
    return list(range(COUNT)) if info is None else list(range(info.id, COUNT, info.num_workers))


class Plain(IterableDataset[int]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(mine())


class Stream(_At, IterableDataset[int]):
    """A stream with a state, from which its iterators go on."""

    def __iter__(self) -> Iterator[int]:
        numbers = mine()
        while self.at < len(numbers):
            self.at += 1
            yield numbers[self.at - 1]
        self.at = 0


class StreamOfIterators(IterableDataset[int]):
    """A stream whose iterators have a state."""

    def __iter__(self) -> Iterator[int]:
        return Places(mine())


class OwnIterator(Stream):
    """A stream that is its own iterator."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        numbers = mine()
        if self.at >= len(numbers):
            self.at = 0
            raise StopIteration
        self.at += 1
        return numbers[self.at - 1]


class AwaitedStream(_At):
    """An asynchronous stream with a state."""

    async def __aiter__(self) -> AsyncIterator[int]:
        numbers = mine()
        while self.at < len(numbers):
            await asyncio.sleep(0)
            self.at += 1
            yield numbers[self.at - 1]
        self.at = 0


class ThreeStreams(Stream):
    """Three streams with a state."""

    loader_streams = 3


class SequenceStream(Stream):
    """A stream of sequences."""

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield Sequences()[number]
