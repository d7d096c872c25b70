"""Fetchers of seeded mode: each sample is made under the numbers of its own position."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from asyncloader.workers.fetch.seeded_fetch import (
    SeededAsyncIterator,
    SeededIterator,
    SeededMapFetcher,
    fetches_batches,
)
from asyncloader.workers.fetch.seeding import SampleSeeder, global_generators_kept, sample_rng


@pytest.fixture(autouse=True)
def generators_kept() -> Any:
    """These tests seed the process's generators: restore them afterwards."""
    with global_generators_kept():
        yield


def drawn() -> tuple[float, ...]:
    """One number of each generator there is."""
    rng = sample_rng()
    own = rng.random.random(), float(rng.numpy.random()), float(torch.rand((), generator=rng.torch))
    return random.random(), float(np.random.random()), float(torch.rand(())), *own


def at_sample(position: int, *words: int) -> tuple[float, ...]:
    SampleSeeder(1, 0, *words).sample(position)
    return drawn()


def at_batch(position: int) -> tuple[float, ...]:
    SampleSeeder(1, 0).batch(position)
    return drawn()


def at_collation(position: int) -> tuple[float, ...]:
    SampleSeeder(1, 0).collation(position)
    return drawn()


class Drawing:
    """A sample is its index and what was drawn for it."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: Any) -> Any:
        return index, drawn()


class Whole(Drawing):
    """Makes its batches at once."""

    def __getitems__(self, indices: list[Any]) -> Any:
        return [(index, None) for index in indices] + [drawn()]


def fetcher(dataset: Any, *, auto: bool = True, replicas: int = 1, collate: Any = None) -> SeededMapFetcher:
    seeder = SampleSeeder(1, 0)
    return SeededMapFetcher(dataset, auto, collate or (lambda data: data), seeder, replicas, collate is not None)


def test_each_sample_has_the_numbers_of_its_position() -> None:
    """Positions count on from that of the first sample, whatever the indices."""
    batch = fetcher(Drawing()).fetch((10, [7, 3, 7]))
    assert batch == [(7, at_sample(10)), (3, at_sample(11)), (7, at_sample(12))]


def test_batches_may_be_cut_anywhere() -> None:
    """A sample is the same alone, in a small batch, or in a large one."""
    one = fetcher(Drawing())
    large = one.fetch((4, [0, 1, 2, 3]))
    assert one.fetch((4, [0, 1])) + one.fetch((6, [2, 3])) == large
    single = fetcher(Drawing(), auto=False)
    assert [single.fetch((4 + i, i)) for i in range(4)] == large


def test_replicas_stand_apart() -> None:
    """Where a sampler shards, the positions of neighbours differ by the number of replicas."""
    assert fetcher(Drawing(), replicas=3).fetch((2, [8, 9])) == [(8, at_sample(2)), (9, at_sample(5))]


def test_an_empty_batch_is_one() -> None:
    """No index, no sample."""
    assert fetcher(Drawing()).fetch((2, [])) == []


def test_batches_made_at_once_are_seeded_at_once() -> None:
    """`__getitems__` has the batch's numbers; without automatic batching it is not used, as in torch."""
    assert fetcher(Whole()).fetch((6, [1, 2])) == [(1, None), (2, None), at_batch(6)]
    assert fetcher(Whole(), auto=False).fetch((6, 1)) == (1, at_sample(6))


def test_the_users_collation_has_numbers_of_its_own() -> None:
    """They depend on the first sample's position, and not on what the samples drew."""

    class Uneven(Drawing):
        def __getitem__(self, index: Any) -> Any:
            return [drawn() for _ in range(index)]

    for index in ([1, 2], [5, 0, 3]):
        assert fetcher(Uneven(), collate=lambda data: drawn()).fetch((6, index)) == at_collation(6)


def test_a_batchs_two_makers_do_not_draw_the_same() -> None:
    """What `__getitems__` drew is not drawn again by the collation."""
    both = fetcher(Whole(), collate=lambda data: (data[-1], drawn())).fetch((6, [1]))
    assert both[0] != both[1]


def test_views_of_torch_only_pass_indices_on() -> None:
    """A dataset's own `__getitems__` is found through torch's views; a view alone does not count."""
    plain, whole = Drawing(), Whole()
    assert fetches_batches(whole)
    assert fetches_batches(Subset(Subset(whole, [0, 1]), [0]))  # type: ignore[arg-type]
    assert fetches_batches(StackDataset(plain, whole))  # type: ignore[arg-type]
    assert fetches_batches(StackDataset(a=plain, b=whole))  # type: ignore[arg-type]
    for dataset in (plain, TensorDataset(torch.zeros(2)), [1, 2]):
        assert not fetches_batches(dataset)
        assert not fetches_batches(Subset(dataset, [0]))  # type: ignore[arg-type]
        assert not fetches_batches(StackDataset(dataset))  # type: ignore[arg-type]
    assert not fetches_batches(ConcatDataset([plain, plain]))  # type: ignore[list-item]


def test_a_subclass_of_a_view_is_the_users() -> None:
    """A subclass of Subset may have changed `__getitems__`."""

    class Mine(Subset[Any]):
        pass

    assert fetches_batches(Mine(Drawing(), [0]))  # type: ignore[arg-type]


def test_samples_through_views_are_seeded_one_by_one() -> None:
    """A sample of a Subset has the numbers that it has without."""
    view = Subset[Any](Drawing(), [9, 8, 7])  # type: ignore[arg-type]
    assert fetcher(view).fetch((0, [2, 0])) == [(7, at_sample(0)), (9, at_sample(1))]
    pair = StackDataset(Drawing(), Drawing())  # type: ignore[arg-type]
    ((first, second),) = fetcher(pair).fetch((5, [1]))
    assert first == (1, at_sample(5))
    assert second[1] != first[1]  # the same sample's numbers go on


def test_an_error_is_the_datasets() -> None:
    """What a sample raises comes through, and the next batch is as if nothing had been."""
    one = fetcher({0: 1})
    with pytest.raises(KeyError):
        one.fetch((0, [5]))
    assert one.fetch((0, [0])) == [1]


# ------------------------------------------------------------------------------------------------ streams


def numbers(start: int, count: int) -> Iterator[Any]:
    for value in range(start, start + count):
        yield value, drawn()


async def numbers_async(start: int, count: int) -> AsyncIterator[Any]:
    for item in numbers(start, count):
        yield item


def test_a_streams_samples_are_numbered() -> None:
    """Each sample has the random numbers of its number in the stream; the end of the stream is passed on, uncounted."""
    stream = SeededIterator(numbers(0, 3), SampleSeeder(1, 0, 4), 0)
    assert iter(stream) is stream
    assert list(stream) == [(i, at_sample(i, 4)) for i in range(3)]
    assert stream.samples == 3
    assert next(stream, None) is None
    assert stream.samples == 3


def test_a_stream_goes_on_by_number() -> None:
    """A resumed stream has the same samples as the complete one."""
    rest = SeededIterator(numbers(2, 2), SampleSeeder(1, 0, 4), 2)
    assert list(rest) == [(i, at_sample(i, 4)) for i in (2, 3)]
    assert rest.samples == 4


async def test_an_async_streams_samples_are_numbered() -> None:
    """The same numbers as those of a blocking stream."""
    stream = SeededAsyncIterator(numbers_async(2, 2), SampleSeeder(1, 0, 4), 2)
    assert aiter(stream) is stream
    assert [item async for item in stream] == [(i, at_sample(i, 4)) for i in (2, 3)]
    assert stream.samples == 4


def test_an_error_in_a_stream_is_not_a_sample() -> None:
    """A sample that failed has no number; the next one, if there is one, has it."""

    class Stumbling:
        tries = 0

        def __next__(self) -> Any:
            self.tries += 1
            if self.tries == 2:
                raise OSError("once")
            return drawn()

    stream = SeededIterator(Stumbling(), SampleSeeder(1, 0), 0)  # type: ignore[arg-type]
    assert next(stream) == at_sample(0)
    with pytest.raises(OSError, match="once"):
        next(stream)
    assert next(stream) == at_sample(1)
