"""Samplers of every kind, and index streams of them, for the tests of positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from asyncloader.base.topology import Topology
from asyncloader.samplers.distributed import RankView, Share
from asyncloader.samplers.generators import find_drawn, generator_states
from asyncloader.samplers.index_stream import IndexStream
from asyncloader.samplers.seeded import SeededSampler

SIZE = 23


class Plain:
    """A sampler whose iterators are generators; counts the indices that were read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for index in range(SIZE):
            self.read += 1
            yield index


class Eager:
    """Draws its order when ``iter`` is called, not when the iterator is first read."""

    def __init__(self, batch_size: int | None = None) -> None:
        self.batch_size = batch_size

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SIZE)
        return iter(order.tolist() if self.batch_size is None else [part.tolist() for part in order.split(3)])


class Stateful:
    """A sampler with another order in each epoch; its state has the epoch and the position. Counts the indices read."""

    def __init__(self) -> None:
        self.epoch = -1
        self.given = 0
        self.read = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        if not self.given:
            self.epoch += 1
        while self.given < SIZE:
            self.given += 1
            self.read += 1
            yield 1000 * self.epoch + self.given - 1
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class Pages:
    """An iterator with a state of its own."""

    def __init__(self) -> None:
        self.position = {"next": 0}

    def __iter__(self) -> Pages:
        return self

    def __next__(self) -> int:
        if self.position["next"] == SIZE:
            raise StopIteration
        self.position["next"] += 1
        return self.position["next"] - 1

    def state_dict(self) -> dict[str, Any]:
        return self.position  # the same dictionary is changed by later steps

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state


class StatefulIterators:
    """A sampler without a state whose iterators are stateful."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Pages:
        return Pages()


class Needy(Stateful):
    """A sampler whose `state_dict` requires an argument, so that it cannot be used."""

    def state_dict(self, step: int) -> dict[str, Any]:  # type: ignore[override]
        return {"step": step}


def seeded() -> SeededSampler:
    return SeededSampler(range(SIZE), seed=9)


def own_generator() -> RandomSampler:
    return RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(5))


def replacing() -> RandomSampler:
    return RandomSampler(range(SIZE), replacement=True, num_samples=100, generator=torch.Generator().manual_seed(5))


class Unsized:
    """A seekable sampler without a length. It refuses to begin after its end."""

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[int]:
        if start > SIZE:
            raise ValueError(f"the epoch has fewer than {start}")
        return iter(range(start, SIZE))


SAMPLERS: dict[str, Callable[[], Any]] = {
    "seeded": seeded,
    "unsized": Unsized,
    "sequential": lambda: SequentialSampler(range(SIZE)),
    "random": lambda: RandomSampler(range(SIZE)),
    "random, own generator": own_generator,
    "random, with replacement": replacing,
    "weighted": lambda: WeightedRandomSampler(torch.ones(SIZE).tolist(), SIZE),
    "eager": Eager,
    "list": lambda: list(range(SIZE)),
    "stateful": Stateful,
    "stateful iterators": StatefulIterators,
    "unusable state": Needy,
}


def alone(sampler: Any) -> Any:
    return sampler


def batched(sampler: Any) -> Any:
    return BatchSampler(sampler, 3, drop_last=False)


def shared(sampler: Any) -> Any:
    return RankView(sampler, Share(2, False, Topology(1, 2), "drop"))


WRAPPERS = {"alone": alone, "batches": batched, "rank": shared}


def stream(index_sampler: Any, **options: Any) -> IndexStream:
    """A stream made as the loader makes it, with a record of the numbers that ``iter`` itself draws."""
    before = generator_states(None)
    made = iter(index_sampler)
    return IndexStream(index_sampler, made, drawn=find_drawn(before, generator_states(None)), **options)


def numbered(running: IndexStream) -> list[tuple[int, Any]]:
    """All remaining indices, with the numbers of their steps."""
    found: list[tuple[int, Any]] = []
    with contextlib.suppress(StopIteration):
        while True:
            found.append(running.pull())
    return found


def after(steps: int, running: IndexStream, every: int = 1) -> dict[str, Any]:
    """The part of a state that restores a stream of which `steps` steps were delivered."""
    return {"step": steps, "every": every, "saved": running.state(steps), "generators": running.drawn()}
