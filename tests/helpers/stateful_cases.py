"""Loaders with a state beside an uninterrupted run: where the state was taken, and the expected batches after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

ROWS = 11

WORKERS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"num_workers": 2},
    "2 persistent": {"num_workers": 2, "persistent_workers": True},
}

MOMENTS = ("new", "iter", "first", "within", "last", "end", "next iter", "later")
"""Before any `iter()`; after it; after the first batch; after three; on the last batch, in the loop; after the loop;
after the next `iter()`; after a batch of the second epoch."""


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Rows(Dataset[int]):
    """Each row is its index."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Counting(Rows):
    """A map dataset with a state: a row also has the number of rows that this copy of the dataset has given."""

    def __init__(self) -> None:
        self.given = 0

    def __getitem__(self, index: int) -> int:
        self.given += 1
        return 100 * self.given + index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Order(Sampler[int]):
    """A sampler that knows its place and epoch; its iterators are generators, which reset the place at their end."""

    def __init__(self) -> None:
        self.at = 0
        self.epoch = 0

    def __len__(self) -> int:
        return ROWS

    def items(self) -> list[Any]:
        return [(7 * k + self.epoch) % ROWS for k in range(ROWS)]

    def __iter__(self) -> Iterator[Any]:
        items = self.items()
        while self.at < len(items):
            self.at += 1
            yield items[self.at - 1]
        self.at = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Batches(Order):
    """A batch sampler like `Order`, with batches of different lengths."""

    def __len__(self) -> int:
        return 5

    def items(self) -> list[Any]:
        row = super().items()
        return [row[:2], row[2:3], row[3:6], row[6:8], row[8:]]


class _Places(Iterator[int]):
    """An iterator with a state."""

    def __init__(self, items: list[int]) -> None:
        self.items = items
        self.at = 0

    def __next__(self) -> int:
        if self.at >= len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OrderOfIterators(Sampler[int]):
    """A sampler whose iterators have the state."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return _Places([(5 * k) % ROWS for k in range(ROWS)])


class Stream(IterableDataset[int]):
    """Rows dealt out to the workers. The dataset has the state; its iterators, generators, reset it at their end."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        worker, workers = _worker()
        mine = range(worker, ROWS, workers)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StreamOfIterators(IterableDataset[int]):
    """A dataset whose iterators have the state."""

    def __iter__(self) -> Iterator[int]:
        worker, workers = _worker()
        return _Places(list(range(worker, ROWS, workers)))


class Plain(IterableDataset[int]):
    """Rows dealt out to the workers, without a state."""

    def __iter__(self) -> Iterator[int]:
        worker, workers = _worker()
        return iter(range(worker, ROWS, workers))


def plain(batches: Any) -> list[Any]:
    """Return batches as lists of numbers."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


class Run(NamedTuple):
    """An uninterrupted run: its epochs, and the states taken on the way, by moment."""

    epochs: list[list[Any]]
    states: dict[str, dict[str, Any]]

    def left(self, moment: str) -> list[list[Any]]:
        """Return the expected batches after this moment, of two epochs or more."""
        first, second, *others = self.epochs
        rest = {"first": first[1:], "within": first[3:], "last": [], "later": second[1:]}
        if moment in ("new", "iter"):
            return [first, second]
        if moment in ("end", "next iter"):
            return [second, *others]
        return [rest[moment], *others] if moment == "later" else [rest[moment], second, *others]


def uninterrupted(make: Callable[[], Any]) -> Run:
    """Run three epochs. Taking the states on the way must not disturb them, nor later steps the states."""
    torch.manual_seed(5)
    loader = make()
    states = {"new": loader.state_dict()}
    epochs: list[list[Any]] = [[], []]
    iterator = iter(loader)
    states["iter"] = loader.state_dict()
    for number, batch in enumerate(iterator, 1):
        epochs[0].append(batch)
        states["last"] = loader.state_dict()
        if number in (1, 3):
            states["first" if number == 1 else "within"] = states["last"]
    states["end"] = loader.state_dict()
    iterator = iter(loader)
    states["next iter"] = loader.state_dict()
    for batch in iterator:
        epochs[1].append(batch)
        states.setdefault("later", loader.state_dict())
    epochs.append(list(loader))
    return Run([plain(epoch) for epoch in epochs], copy.deepcopy(states))


def resumed(make: Callable[[], Any], state: dict[str, Any], epochs: int) -> list[list[Any]]:
    """Return the batches of a new loader with another seed from that state on."""
    torch.manual_seed(77)
    loader = make()
    loader.load_state_dict(copy.deepcopy(state))
    return [plain(loader) for _ in range(epochs)]
