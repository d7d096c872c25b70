from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.utils.data import BatchSampler, Sampler

from asyncloader.samplers.async_sampler import AsyncIndexSource, AsyncSampler, as_async_source, is_async_sampler
from asyncloader.samplers.distributed import RankView
from asyncloader.samplers.index_stream import StateLog


class Counting:
    """An async sampler of 0 to ``count - 1`` that counts how often it was closed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.closed = 0

    def __len__(self) -> int:
        return self.count

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            for index in range(self.count):
                yield index
        finally:
            self.closed += 1


class Endless:
    def __aiter__(self) -> AsyncIterator[int]:
        raise NotImplementedError


class Derived(Endless, Sampler[int]):
    """Has the `__iter__` of torch's base class, which is not implemented."""


class Both(Endless):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@dataclass
class ReadPosition:
    """A position to read from, which records the steps that the reader reports."""

    epoch: int = 0
    first_step: int = 0
    skipped: frozenset[int] = frozenset()
    saved_sampler: dict[str, Any] | None = None
    drained: dict[str, Any] | None = None
    every: int = 1
    log: StateLog | None = None
    view: RankView | None = None
    total: int | None = None
    steps: list[int] = field(default_factory=list)

    def pulled(self, task: int, step: int) -> None:
        assert task == len(self.steps)
        self.steps.append(step)


async def read(source: AsyncIndexSource, position: ReadPosition | None = None) -> list[Any]:
    return [index async for index in source.read(position or ReadPosition())]


def test_only_what_cannot_be_read_plainly_is_async() -> None:
    """A sampler that can be iterated both ways is read plainly, as torch reads it."""
    assert is_async_sampler(Endless())
    assert is_async_sampler(Derived())
    assert not is_async_sampler(Both())
    assert not is_async_sampler([1, 2])
    assert not is_async_sampler(Endless)
    assert isinstance(Counting(1), AsyncSampler)


async def test_reading_goes_on_at_a_position() -> None:
    """Reading from any step gives the rest; steps beyond it that were delivered are left out."""
    source = AsyncIndexSource(Counting(7), 2, drop_last=False)
    for first in range(5):
        position = ReadPosition(first_step=first)
        assert await read(source, position) == [[0, 1], [2, 3], [4, 5], [6]][first:]
        assert position.steps == list(range(first, 4))
    position = ReadPosition(first_step=1, skipped=frozenset({2}))
    assert await read(source, position) == [[2, 3], [6]]
    assert position.steps == [1, 3]


class Remembering(Counting):
    """A sampler that can begin in its middle."""

    start = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(self.start, self.count):
            self.start = index + 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["start"]


async def test_a_stateful_sampler_goes_on_by_its_state() -> None:
    """The sampler's state after each step is kept; restored from it, reading goes on without the items before."""
    for step in range(1, 4):
        source = AsyncIndexSource(Remembering(7), 2, drop_last=False)
        again = ReadPosition(log=source.first_log(1))
        await read(source, again)
        assert again.log is not None
        saved = again.log.at(step)
        assert saved is not None
        assert saved["sampler"] == {"start": 2 * step}
        rest = AsyncIndexSource(Remembering(7), 2, drop_last=False)
        assert (
            await read(rest, ReadPosition(first_step=step, saved_sampler=saved)) == [[0, 1], [2, 3], [4, 5], [6]][step:]
        )


@pytest.mark.parametrize("batch_size", [None, 2])
async def test_closing_the_source_closes_the_sampler(batch_size: int | None) -> None:
    """A sampler that is left early is closed at once, not when garbage is collected."""
    sampler = Counting(10)
    indices = AsyncIndexSource(sampler, batch_size, drop_last=False).read(ReadPosition())
    await anext(indices)
    await indices.aclose()  # type: ignore[attr-defined]
    assert sampler.closed == 1


def test_batch_sampler_around_an_async_sampler_is_taken_apart() -> None:
    """torch wraps a `sampler` in its BatchSampler; the async sampler in it is found, with its batch size."""
    sampler = Counting(5)
    source = as_async_source(BatchSampler(sampler, 2, drop_last=True))  # type: ignore[arg-type]
    assert source is not None
    assert (source.sampler, source.share.batch_size, source.share.drop_last) == (sampler, 2, True)
