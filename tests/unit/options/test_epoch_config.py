"""The options of an epoch: resolved when iteration begins, and fixed from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, ClassVar

import pytest
import torch

from asyncloader import (
    DataLoader,
    DeviceOptions,
    Recovery,
    RemoteIterableDataset,
    StatefulDataLoader,
    Tuning,
)
from asyncloader.base.topology import Topology
from asyncloader.options.epoch_config import EpochConfig
from tests.helpers.datasets import AsyncNumbers, CountedStream, Numbers


def config(dataset: Any = None, kind: Any = DataLoader, **options: Any) -> EpochConfig:
    return EpochConfig.of(kind(Numbers(6) if dataset is None else dataset, **options))


def test_it_is_fixed() -> None:
    """Attributes that torch lets a user change on the loader are read once."""
    loader = DataLoader[Any](Numbers(6), num_workers=1)
    found = EpochConfig.of(loader)
    loader.num_workers, loader.collate_fn = 3, len
    assert found.num_workers == 1
    assert found.collate_fn is torch.utils.data.default_collate
    with pytest.raises(AttributeError, match="num_workers cannot become 3"):
        found.num_workers = 3


def test_ranks_wait_for_each_other_over_map_datasets_with_a_seed() -> None:
    """Without a seed the sampler does the sharding; over a stream ranks do not wait for equal numbers of batches."""
    ranks = {"rank": 1, "world_size": 3}
    assert (config().topology, config().even_ranks) == (Topology(0, 1), 1)
    assert (config(seed=1, **ranks).topology, config(seed=1, **ranks).even_ranks) == (Topology(1, 3), 3)
    assert config(CountedStream(6, said=6), seed=1, **ranks).even_ranks == 1


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, 0),
        ({"seed": 1}, 16),
        ({"seed": 1, "in_order": False}, 0),
        ({"seed": 1, "tuning": Tuning(reorder_window=3)}, 3),
    ],
    ids=str,
)
def test_batches_run_ahead_in_seeded_order_only(options: dict[str, Any], ahead: int) -> None:
    """In other modes torch's rules fix the worker of each batch, or no order has to be kept."""
    assert config(num_workers=2, **options).reorder_window == ahead
    assert config(CountedStream(6, said=6), num_workers=2, **options).reorder_window == 0


def test_what_is_resumed_exactly() -> None:
    """`allow_replay` decides between exact resuming and replay; torchdata's loader never resumes exactly."""
    exact, replay = config(), config(recovery=Recovery(allow_replay=True))
    assert [(each.exact, each.replays) for each in (exact, replay)] == [(True, False), (False, True)]
    assert not config(kind=StatefulDataLoader).exact
    assert [config(snapshot_every_n_steps=every).snapshot_every for every in (None, 0, 5)] == [0, 0, 5]


def test_how_shards_that_are_assigned_are_resumed() -> None:
    """Shards are read again: they give the same samples. Out of order, the dataset's state is saved at every step."""
    shards = RemoteIterableDataset("none.tar")
    found = [config(shards, seed=1, snapshot_every_n_steps=5, in_order=in_order) for in_order in (True, False)]
    assert [(each.exact, each.replays) for each in found] == [(True, True)] * 2
    assert [(each.snapshot_every, each.dataset_snapshot_every) for each in found] == [(5, 5), (5, 1)]
    other = config(CountedStream(6, said=6), seed=1, snapshot_every_n_steps=5, in_order=False)
    assert (other.replays, other.dataset_snapshot_every) == (False, 5)


@pytest.mark.parametrize(
    ("dataset", "threads", "concurrent"),
    [(Numbers(6), 4, True), (AsyncNumbers(6), 0, True), (CountedStream(6, said=6), 0, False)],
)
def test_what_reads_several_samples_at_a_time(dataset: Any, threads: int, concurrent: bool) -> None:
    """Threads read a blocking map dataset, an event loop an async map dataset; a blocking stream is not concurrent."""
    found = config(dataset, num_workers=1, concurrency=4)
    assert (found.fetch_threads, found.concurrent) == (threads, concurrent)


class Watched(DataLoader[Any]):
    """Records the names of the attributes that are read from it within `listening`."""

    asked: ClassVar[list[str] | None] = None

    def __getattribute__(self, name: str) -> Any:
        if Watched.asked is not None:
            Watched.asked.append(name)
        return super().__getattribute__(name)


@contextlib.contextmanager
def listening() -> Generator[list[str]]:
    found: list[str] = []
    Watched.asked = found
    try:
        yield found
    finally:
        Watched.asked = None


OPTIONS: list[dict[str, Any]] = [
    {},
    {"seed": 1},
    {"on_error": "skip", "device": "cpu", "device_options": DeviceOptions(static_buffers=True)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_is_asked_nothing_after_iter(workers: int, options: dict[str, Any]) -> None:
    """To the end of the epoch the loader's attributes are not read."""
    with Watched(Numbers(6), num_workers=workers, **options) as loader:
        iterator = iter(loader)
        with listening() as asked:
            assert len(list(iterator)) == 6
    assert asked == []
