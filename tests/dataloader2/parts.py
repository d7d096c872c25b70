"""Parts of graphs, and functions that pickle, for the tests of DataLoader2."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

MP = SHARDING_PRIORITIES.MULTIPROCESSING


def numbers(count: int, start: int = 0) -> Any:
    return IterableWrapper(range(start, start + count))


def double(x: Any) -> Any:
    return 2 * x


def odd(x: int) -> bool:
    return x % 2 == 1


def as_tensor(x: int) -> torch.Tensor:
    return torch.full((3,), x)


def total(pair: Any) -> Any:
    return sum(pair)


def no_third(x: int) -> bool:
    return x % 3 != 0


def mod3(x: int) -> int:
    return x % 3


def fails_at_5(x: int) -> int:
    if x == 5:
        raise ValueError("five is right out")
    return x


def dies_at_5(x: int) -> int:
    if x == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def hangs_at_3(x: int) -> int:
    """Hangs at 3, as a read would that never returns."""
    if x == 3:
        threading.Event().wait()
    return x


def process(x: Any) -> tuple[Any, int]:
    return x, os.getpid()


def drawn(x: Any) -> Any:
    """Return the item with a number from each of the process's global generators."""
    return x, random.random(), float(torch.rand(())), float(np.random.random())


async def slow_double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


async def async_fails_at_5(x: int) -> int:
    await asyncio.sleep(0)
    return fails_at_5(x)


class OnlyHere(IterDataPipe[Any]):
    """A part that is not replicable."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def is_replicable(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


class Unreadable(IterDataPipe[Any]):
    """Raises an error when an iterator is made of it, and not with the first item."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        raise self.error("cannot begin")


class Seeded(IterDataPipe[Any]):
    """Adds the seed that it was given to each item."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.seed: int | None = None

    def set_seed(self, seed: int) -> Seeded:
        self.seed = seed
        return self

    def __iter__(self) -> Iterator[Any]:
        for x in self.source:
            yield x, self.seed


class _Ticking(IterDataPipe[int]):
    """A part that can only be read with ``async for``."""

    def __init__(self, count: int) -> None:
        self.count = count

    async def __aiter__(self) -> AsyncIterator[int]:
        for x in range(self.count):
            await asyncio.sleep(0)
            yield x


def ticking(count: int) -> Any:
    kind: Any = _Ticking  # without `__iter__` it is abstract to type checkers
    return kind(count)


def _diamond() -> Any:
    first, second = numbers(12).shuffle().sharding_filter().fork(2)
    return first.map(double).zip(second).map(total)


def _classified() -> Any:
    first, second, third = numbers(15).sharding_filter().demux(3, mod3)
    return first.concat(third.map(double), second)


# Graphs that give the same items with and without workers.
GRAPHS: dict[str, Callable[[], Any]] = {
    "plain": lambda: numbers(10).sharding_filter(),
    "empty": lambda: numbers(0).sharding_filter(),
    "one": lambda: numbers(1).sharding_filter(),
    "mapped": lambda: numbers(11).sharding_filter().map(double),
    "mapped before": lambda: numbers(11).map(double).sharding_filter(),
    "shuffled": lambda: numbers(23).shuffle().sharding_filter(),
    "small buffer": lambda: numbers(23).shuffle(buffer_size=4).sharding_filter().map(double),
    "two shuffles": lambda: numbers(20).shuffle().map(double).shuffle(buffer_size=3).sharding_filter(),
    "filtered before": lambda: numbers(30).filter(odd).sharding_filter(),
    "tensors": lambda: numbers(12).sharding_filter().map(as_tensor),
    "batched before": lambda: numbers(17).batch(4).sharding_filter(),
    "collated": lambda: numbers(16).map(as_tensor).batch(4).sharding_filter().collate(),
    "zipped": lambda: numbers(9).sharding_filter().zip(numbers(9, 50).sharding_filter()),
    "enumerated": lambda: numbers(9).sharding_filter().map(double).map(double),
    "diamond": _diamond,
    "unbatched": lambda: numbers(12).batch(3).unbatch().sharding_filter(),
    "concatenated": lambda: numbers(6).concat(numbers(5, 100)).sharding_filter(),
    "muxed": lambda: numbers(6).mux(numbers(6, 100)).sharding_filter(),
    "prefetched": lambda: numbers(14).sharding_filter().prefetch(3),
    "dispatched": lambda: numbers(13).sharding_round_robin_dispatch(MP),
    "dispatched and mapped": lambda: numbers(13).shuffle().sharding_round_robin_dispatch(MP).map(double),
    "dispatched twice": lambda: (
        numbers(8).sharding_round_robin_dispatch(MP).zip(numbers(8, 40).sharding_round_robin_dispatch(MP))
    ),
    "dispatched beside": lambda: numbers(8).sharding_round_robin_dispatch(MP).zip(numbers(8, 40).sharding_filter()),
    "dispatched batches": lambda: numbers(14).batch(3).sharding_round_robin_dispatch(MP).map(total),
    "not replicable": lambda: OnlyHere(numbers(10).sharding_filter().map(double)),
    "not replicable, mapped": lambda: OnlyHere(numbers(10).sharding_filter()).map(double).batch(3),
    "not replicable, shuffled": lambda: OnlyHere(numbers(21).shuffle().sharding_filter()).map(double),
    "dispatched from one": lambda: OnlyHere(numbers(9)).sharding_round_robin_dispatch(MP).map(double),
    "strings": lambda: numbers(10).sharding_filter().map(str),
    "sliced by batches": lambda: numbers(10).batch(2).sharding_filter().unbatch().batch(2),
    "grouped": lambda: numbers(12).groupby(mod3, group_size=2).sharding_filter(),
    "none": lambda: IterableWrapper([None, 0, "", b"", ()]).sharding_filter(),
    "numpy": lambda: IterableWrapper([np.arange(4), np.zeros((2, 2))]).sharding_filter(),
    "dictionaries": lambda: IterableWrapper([{"a": torch.ones(2)}, {"b": [1, 2]}, {}]).sharding_filter(),
}
# Graphs whose order with workers differs from that without workers, because the workers' shares are uneven.
UNEVEN: dict[str, Callable[[], Any]] = {
    "unsharded": lambda: numbers(5),
    "filtered after": lambda: numbers(30).sharding_filter().filter(no_third),
    "batched after": lambda: numbers(17).sharding_filter().batch(4),
    "own shuffle": lambda: numbers(17).sharding_filter().batch(3),
    "classified": _classified,
}


def plain(value: Any) -> Any:
    """Return the value in a form that compares with ``==``: tensors and arrays become lists, with their types."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(each) for each in value]
    return value
