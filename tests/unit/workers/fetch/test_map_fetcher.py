"""Batches of map datasets in seeded mode: each sample is made under the random numbers of its position."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import StackDataset, Subset

from asyncloader.workers.fetch.map_fetcher import MapFetcher
from asyncloader.workers.fetch.sample import SampleMaker
from asyncloader.workers.fetch.sample_errors import ErrorPolicy, SampleErrorHandler
from asyncloader.workers.fetch.seeding import EpochSeeding, SampleSeeder
from tests.unit.workers.fetch.drawing import at_sample, drawn


def at_batch(position: int) -> tuple[float, ...]:
    SampleSeeder(1, 0).batch(position)
    return drawn()


def at_collation(position: int) -> tuple[float, ...]:
    SampleSeeder(1, 0).collation(position)
    return drawn()


class Drawing:
    """A sample is its index and the numbers drawn for it."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: Any) -> Any:
        return index, drawn()


class Getitems(Drawing):
    """Makes whole batches."""

    def __getitems__(self, indices: list[Any]) -> Any:
        return [(index, None) for index in indices] + [drawn()]


def fetcher(dataset: Any, *, auto: bool = True, replicas: int = 1, collate: Any = None) -> MapFetcher:
    seeder = SampleSeeder(1, 0)
    seeding = EpochSeeding(seeder, None if collate is None else seeder, replicas)
    return MapFetcher(SampleMaker(dataset, seeding), auto, collate or (lambda data: data))


def test_each_sample_has_the_numbers_of_its_position() -> None:
    """Positions count on from the position of the first sample, whatever the indices."""
    batch = fetcher(Drawing()).fetch((10, [7, 3, 7]))
    assert batch == [(7, at_sample(10)), (3, at_sample(11)), (7, at_sample(12))]


def test_batches_made_at_once_are_seeded_at_once() -> None:
    """`__getitems__` has the batch's numbers; without automatic batching it is not used, as in torch."""
    assert fetcher(Getitems()).fetch((6, [1, 2])) == [(1, None), (2, None), at_batch(6)]
    assert fetcher(Getitems(), auto=False).fetch((6, 1)) == (1, at_sample(6))


def test_the_users_collation_has_numbers_of_its_own() -> None:
    """The collation's numbers depend on the first sample's position, and not on the samples' draws."""

    class Uneven(Drawing):
        def __getitem__(self, index: Any) -> Any:
            return [drawn() for _ in range(index)]

    for index in ([1, 2], [5, 0, 3]):
        assert fetcher(Uneven(), collate=lambda data: drawn()).fetch((6, index)) == at_collation(6)


def test_a_batchs_two_makers_do_not_draw_the_same() -> None:
    """The collation does not repeat the numbers that `__getitems__` drew."""
    both = fetcher(Getitems(), collate=lambda data: (data[-1], drawn())).fetch((6, [1]))
    assert both[0] != both[1]


def test_samples_through_views_are_seeded_one_by_one() -> None:
    """A sample of a Subset has the numbers that it has without the Subset."""
    view = Subset[Any](Drawing(), [9, 8, 7])  # type: ignore[arg-type]
    assert fetcher(view).fetch((0, [2, 0])) == [(7, at_sample(0)), (9, at_sample(1))]
    pair = StackDataset(Drawing(), Drawing())  # type: ignore[arg-type]
    ((first, second),) = fetcher(pair).fetch((5, [1]))
    assert first == (1, at_sample(5))
    assert second[1] != first[1]  # the second goes on with the same sample's numbers


def test_the_end_of_a_substitute_is_not_the_end_of_the_epoch() -> None:
    """Any exception of `on_error` is an error, also a StopIteration."""

    def ask(index: Any, error: Exception) -> Any:
        raise StopIteration

    handler = SampleErrorHandler(ErrorPolicy(ask), 0, 0, asynchronous=False)
    with pytest.raises(RuntimeError, match="StopIteration"):
        MapFetcher(SampleMaker({0: 1}, handler=handler), True, list).fetch([0, 5])
