"""Runs either loader in steps, for the tests of seeded mode and of states: the same calls for both kinds of loop."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import torch

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.running import LOOPS, PATIENCE_S


class Stepwise:
    """A loader of the kind ("sync", "asyncio", "uvloop") that is iterated a step at a time, and closed after `with`.

    Attributes:
        loader: the loader.
        iterator: the newest iterator.
    """

    def __init__(self, kind: str, dataset: Any, **options: Any) -> None:
        self._runner = None if kind == "sync" else asyncio.Runner(loop_factory=LOOPS[kind])
        make: Any = DataLoader if kind == "sync" else AsyncDataLoader
        decode: Any = getattr(dataset, "decode", None)
        self.loader: Any = make(dataset, **{"decode": decode, **options})
        self.iterator: Any = None

    def begin(self) -> Any:
        """Make and return a new iterator, which `step` and `rest` read from then on."""
        self.iterator = iter(self.loader) if self._runner is None else aiter(self.loader)
        return self.iterator

    def step(self, iterator: Any = None) -> Any:
        """Return the next batch of an iterator, by default the newest. Raises StopIteration at the end."""
        iterator = self.iterator if iterator is None else iterator
        if self._runner is None:
            return next(iterator)
        found, batch = self._runner.run(_next(iterator))
        if not found:
            raise StopIteration
        return batch

    def take(self, count: int) -> list[Any]:
        """Return the next `count` batches of the newest iterator."""
        return [self.step() for _ in range(count)]

    def rest(self) -> list[Any]:
        """Return all further batches of the newest iterator."""
        batches: list[Any] = []
        while True:
            try:
                batches.append(self.step())
            except StopIteration:
                return batches

    def epoch(self) -> list[Any]:
        """Return all batches of a new iterator."""
        self.begin()
        return self.rest()

    def call(self, function: Any, *args: Any) -> Any:
        """Call a function where the loader is iterated: an async loader's in its loop."""
        if self._runner is None:
            return function(*args)
        return self._runner.run(_call(function, args))

    def close(self) -> None:
        """End iterators and workers."""
        self.iterator = None
        if self._runner is None:
            self.loader.close()
            return
        try:
            self._runner.run(self.loader.aclose())
        finally:
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


async def _next(iterator: Any) -> tuple[bool, Any]:
    async with asyncio.timeout(PATIENCE_S):
        try:
            return True, await anext(iterator)
        except StopAsyncIteration:
            return False, None


async def _call(function: Any, args: tuple[Any, ...]) -> Any:
    return function(*args)


def epochs_of(kind: str, dataset: Any, count: int = 1, **options: Any) -> list[list[Any]]:
    """Return the batches of the first epochs."""
    with Stepwise(kind, dataset, **options) as run:
        return [run.epoch() for _ in range(count)]


def joined(ranks: list[list[Any]]) -> list[Any]:
    """Join the ranks' batches (tensors) of each step in rank order."""
    assert len({len(rank) for rank in ranks}) == 1, "every rank gets as many batches"
    return [torch.cat(list(step)) for step in zip(*ranks, strict=True)]
