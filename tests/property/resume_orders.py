"""Samplers for the property about resuming: torch's and custom ones, seekable, stateful, async, and batched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

from asyncloader import SeededSampler


def shuffled(length: int, *salt: int) -> list[int]:
    order: list[int] = np.random.Generator(np.random.PCG64([length, *salt])).permutation(length).tolist()
    return order


class Unsized:
    """A user's sampler: the same order every time, no length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


class Seekable(Unsized):
    """A sampler that seeks: `iter_from` yields no index before `start`. Each epoch has another order."""

    def __init__(self, length: int) -> None:
        super().__init__([])
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[Any]:
        if not 0 <= start <= self.length:
            raise ValueError(start)
        return iter(shuffled(self.length, self.epoch)[start:])


class RoundsState:
    """A stateful sampler: knows its place, and begins a new round in another order after each round."""

    def __init__(self, length: int, group: int | None = None) -> None:
        self.length = length
        self.group = group
        self.round = 0
        self.next = 0

    def items(self) -> list[Any]:
        order = shuffled(self.length, self.round)
        return order if self.group is None else [order[i : i + self.group] for i in range(0, self.length, self.group)]

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.round, self.next = state["round"], state["next"]


class Rounds(RoundsState):
    """`RoundsState` as a plain sampler."""

    def __iter__(self) -> Iterator[Any]:
        items = self.items()
        while self.next < len(items):
            self.next += 1
            yield items[self.next - 1]
        self.next = 0
        self.round += 1


class RoundsAwaited(RoundsState):
    """`RoundsState` as an async sampler."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        items = self.items()
        while self.next < len(items):
            await asyncio.sleep(0)
            self.next += 1
            yield items[self.next - 1]
        self.next = 0
        self.round += 1


class Counting:
    """A sampler without a state whose iterators are Stateful."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return Count(shuffled(self.length))


class Count:
    def __init__(self, order: list[int]) -> None:
        self.order = order
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next >= len(self.order):
            raise StopIteration
        self.next += 1
        return self.order[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Each order is arguments of a loader's constructor, from the dataset's length and a seed for generators.
ORDERS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "in order": lambda n, _: {},
    "shuffled": lambda n, _: {"shuffle": True},
    "list": lambda n, _: {"sampler": shuffled(n)[: n // 2 + 1] + shuffled(n)},
    "unsized": lambda n, _: {"sampler": Unsized(shuffled(n))},
    "seekable": lambda n, _: {"sampler": Seekable(n)},
    "random": lambda n, seed: {"sampler": RandomSampler(range(n), generator=_generator(seed))},
    "weighted": lambda n, seed: {
        "sampler": WeightedRandomSampler([1.0 + i for i in range(n)], n + 2, generator=_generator(seed))
    },
    "rounds": lambda n, _: {"sampler": Rounds(n)},
    "rounds awaited": lambda n, _: {"sampler": RoundsAwaited(n)},
    "counting": lambda n, _: {"sampler": Counting(n)},
    "loader's generator": lambda n, seed: {"shuffle": True, "generator": _generator(seed)},
    "distributed": lambda n, _: {"sampler": DistributedSampler(range(n), 2, 1, seed=9)},  # type: ignore[arg-type]
    "batches of ours": lambda n, _: {"batch_sampler": BatchSampler(SeededSampler(range(n), 9), 3, drop_last=False)},
    "lists": lambda n, _: {"batch_sampler": [shuffled(n, i)[: 1 + i % 4] for i in range(n // 2)]},
    "unsized lists": lambda n, _: {"batch_sampler": Unsized([shuffled(n, i)[: 1 + i % 3] for i in range(n // 2)])},
    "rounds of lists": lambda n, _: {"batch_sampler": Rounds(n, 3)},
    "rounds of lists awaited": lambda n, _: {"batch_sampler": RoundsAwaited(n, 3)},
}
ASYNC_ORDERS = ("rounds awaited", "rounds of lists awaited")
BATCH_ORDERS = ("batches of ours", "lists", "unsized lists", "rounds of lists", "rounds of lists awaited")
OWN_GENERATOR = ("random", "weighted", "loader's generator")
FIXED_WORLD = ("distributed",)
"""Orders that are those of one rank already."""
