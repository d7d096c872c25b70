"""Iterable datasets for the property about resuming: the iterator has a state, the dataset has a state, or neither."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader import sample_rng


def global_draws() -> list[float]:
    """Draw a number from each process-global generator."""
    return [float(torch.rand(())), random.random(), float(np.random.random())]


def own_draws() -> list[float]:
    """Draw a number from each of the current sample's own generators."""
    rng = sample_rng()
    return [float(torch.rand((), generator=rng.torch)), float(rng.numpy.random()), rng.random.random()]


class _Shard:
    """`length` numbers in all, dealt to the workers; each epoch and rank has other numbers."""

    def __init__(self, length: int, rank: int) -> None:
        self.length = length
        self.rank = rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> range:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        first = 1000 * (self.epoch % 7) + 100 * self.rank
        return range(first + worker, first + self.length, workers)


def _sample(number: int, *, awaited: bool = False) -> torch.Tensor:
    draws = own_draws() if awaited else [*global_draws(), *own_draws()]
    return torch.tensor([number, *draws], dtype=torch.float64)


class PlainStream(_Shard, IterableDataset[Any]):
    """A stream without a state: it can be resumed by reading it again."""

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            yield _sample(number)


class IteratorStream(_Shard, IterableDataset[Any]):
    """A stream whose iterators are Stateful."""

    def __iter__(self) -> Iterator[Any]:
        return _Cursor(self.numbers())


class _Cursor:
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def _number(self) -> int | None:
        if self.next >= len(self.numbers):
            return None
        self.next += 1
        return self.numbers[self.next - 1]

    def __next__(self) -> Any:
        number = self._number()
        if number is None:
            raise StopIteration
        return _sample(number)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class DatasetStream(_Shard, IterableDataset[Any]):
    """A Stateful dataset: it continues at its place, and starts from the beginning after its end."""

    def __init__(self, length: int, rank: int) -> None:
        super().__init__(length, rank)
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers()
        while self.next < len(numbers):
            self.next += 1
            yield _sample(numbers[self.next - 1])
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class OwnIterator(DatasetStream):
    """A Stateful dataset that is its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        numbers = self.numbers()
        if self.next >= len(numbers):
            self.next = 0
            raise StopIteration
        self.next += 1
        return _sample(numbers[self.next - 1])


class AwaitedStream(_Shard):
    """An asynchronous stream whose iterators are Stateful."""

    def __aiter__(self) -> AsyncIterator[Any]:
        return _AwaitedCursor(self.numbers())


class _AwaitedCursor(_Cursor):
    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        number = self._number()
        if number is None:
            raise StopAsyncIteration
        return _sample(number, awaited=True)


class AwaitedPlainStream(_Shard):
    """An asynchronous Stateful dataset, whose `__aiter__` is a generator function."""

    def __init__(self, length: int, rank: int) -> None:
        super().__init__(length, rank)
        self.next = 0

    async def __aiter__(self) -> AsyncIterator[Any]:
        numbers = self.numbers()
        while self.next < len(numbers):
            self.next += 1
            yield _sample(numbers[self.next - 1], awaited=True)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class ThreeIterators(IteratorStream):
    """Three streams, whose iterators are Stateful."""

    loader_streams = 3


class FourDatasets(DatasetStream):
    """Four streams, each of a Stateful dataset."""

    loader_streams = 4


class TwoPlain(PlainStream):
    """Two streams without a state."""

    loader_streams = 2


SEVERAL: dict[str, Callable[[int, int], Any]] = {
    "three stateful iterators": ThreeIterators,
    "four stateful datasets": FourDatasets,
    "two plain": TwoPlain,
}
"""Datasets of several streams: the number of workers is no part of their batches."""

# Each stream is built from its length and the rank.
STREAMS: dict[str, Callable[[int, int], Any]] = {
    "plain": PlainStream,
    "stateful iterator": IteratorStream,
    "stateful dataset": DatasetStream,
    "own iterator": OwnIterator,
    "awaited, stateful iterator": AwaitedStream,
    "awaited, stateful dataset": AwaitedPlainStream,
    **SEVERAL,
}
