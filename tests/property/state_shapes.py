"""Datasets of every kind that can have a state, for the property that a resumed loader continues as torchdata's does.

Each sample is its index and a random number. Some datasets save torch's generator in their states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def sample(index: int, draws: bool) -> torch.Tensor:
    return torch.tensor([index, torch.rand(()).item() if draws else 0.0], dtype=torch.float64)


def mine(length: int) -> range:
    info = get_worker_info()
    return range(length) if info is None else range(info.id, length, info.num_workers)


class Saving:
    """Saves its place, and torch's generator if `draws`."""

    draws = False
    at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": torch.get_rng_state() if self.draws else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        if self.draws:
            torch.set_rng_state(state["generator"])


class Map(Dataset[Any]):
    def __init__(self, length: int, draws: bool) -> None:
        self.length = length
        self.draws = draws

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index, self.draws)


class SavingMap(Saving, Map):
    """A dataset whose samples contain the number of samples made so far."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.at += 1
        return torch.cat([sample(index, self.draws), torch.tensor([self.at])])


class Stream(IterableDataset[Any]):
    """A stream without a state: a generator function."""

    def __init__(self, length: int, draws: bool) -> None:
        self.length = length
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        for index in mine(self.length):
            yield sample(index, self.draws)


class SavingStream(Saving, Stream):
    """The dataset has the state; `__iter__` is a generator function, which starts from the beginning after its end."""

    def __iter__(self) -> Iterator[Any]:
        rows = mine(self.length)
        while self.at < len(rows):
            self.at += 1
            yield sample(rows[self.at - 1], self.draws)
        self.at = 0


class Itself(Saving, Stream):
    """A stream that is its own iterator. `__iter__` creates its place: before that, no place can be saved or set."""

    def __init__(self, length: int, draws: bool) -> None:
        super().__init__(length, draws)
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.place = {"at": 0}
        self.epochs += 1
        return self

    def __next__(self) -> torch.Tensor:
        rows = mine(self.length)
        if self.place["at"] >= len(rows):
            raise StopIteration
        self.place["at"] += 1
        return sample(1000 * self.epochs + rows[self.place["at"] - 1], self.draws)

    def state_dict(self) -> dict[str, Any]:
        self.at = self.place["at"]
        return super().state_dict() | {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.place["at"], self.epochs = state["at"], state["epochs"]


class ItselfOnce(Saving, Stream):
    """A stream that is its own iterator; `__iter__` changes nothing, and after its end it starts from the beginning."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> torch.Tensor:
        rows = mine(self.length)
        if self.at >= len(rows):
            self.at = 0
            raise StopIteration
        self.at += 1
        return sample(rows[self.at - 1], self.draws)


class Rows(Saving):
    """An iterator with a state."""

    def __init__(self, stream: Stream) -> None:
        self.rows = mine(stream.length)
        self.draws = stream.draws
        self.stream: Any = stream

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at >= len(self.rows):
            raise StopIteration
        self.at += 1
        return sample(self.rows[self.at - 1], self.draws)


class SavingIterators(Stream):
    """A stream whose iterators have the state."""

    def __iter__(self) -> Iterator[Any]:
        return Rows(self)


class Both(Saving, Stream):
    """The dataset has a state, in which its iterators count, and the iterators have a state of their own."""

    def __iter__(self) -> Iterator[Any]:
        return CountingRows(self)


class CountingRows(Rows):
    def __next__(self) -> torch.Tensor:
        row = super().__next__()
        self.stream.at += 1
        return torch.cat([row, torch.tensor([self.stream.at])])


class PlainRows:
    """An iterator without a state, over a dataset that has a state."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> torch.Tensor:
        rows = mine(self.stream.length)
        if self.stream.at >= len(rows):
            self.stream.at = 0
            raise StopIteration
        self.stream.at += 1
        return sample(rows[self.stream.at - 1], self.stream.draws)


class SavingOfIterators(Saving, Stream):
    """The dataset has the state; its iterators are objects without a state."""

    def __iter__(self) -> Iterator[Any]:
        return PlainRows(self)


STREAMS: dict[str, Callable[[int, bool], Any]] = {
    "stateless": Stream,
    "dataset, generator function": SavingStream,
    "dataset, iterators": SavingOfIterators,
    "iterators": SavingIterators,
    "dataset and iterators": Both,
    "itself": Itself,
    "itself, once": ItselfOnce,
}

SHAPES: dict[str, Callable[[int, bool], Any]] = {"map": SavingMap, "stateless map": Map, **STREAMS}
