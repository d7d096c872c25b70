"""What a DataLoader2 shows of its run: the counts, metrics, traces and words of a DataLoader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import pytest
from torch.autograd.profiler import profile

from asyncloader.dataloader2 import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)
from asyncloader.errors import WorkerDied
from tests.dataloader2.parts import MP, as_tensor, dies_at_5, double, fails_at_5, numbers
from tests.helpers.counting import counted
from tests.helpers.trace_events import read_trace

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create")]

WAY = ["main_loop", "tasks", "ready_batches", "consumer"]


def workers(number: int) -> MultiProcessingReadingService:
    return MultiProcessingReadingService(number, multiprocessing_context="fork")


@pytest.mark.parametrize("service", [None, InProcessReadingService()], ids=["none", "in process"])
def test_without_workers(service: Any, tmp_path: Path) -> None:
    """An item is a batch, which this process fetches. Items are traced and timed one by one from when that is asked for
    on; what is waiting is known of the items before, too.
    """
    graph = numbers(12).map(double)
    with DataLoader2[Any](graph, reading_service=service) as loader:
        list(loader)
        assert "for an item" not in loader.explain()
        assert 0 < loader._statistics.times()[1] < loader._statistics.times()[0]
        with loader.trace(tmp_path / "a.json"):
            list(loader)
        assert loader.stats()["data/batches"] == 24
        assert loader.stats("train/", interval=True)["train/stage/fetch/count"] == 12
        assert loader.stats(interval=True)["data/batches"] == 0
        words = loader.explain()
    found = read_trace(tmp_path / "a.json")
    assert found.delivered == [(2, seq) for seq in range(12)]
    (main_track,) = found.tracks
    assert found.spans[main_track, "stages"]["fetch"] == 12
    assert "in this process: " in words
    assert "Mapper" in words


class Wrapped:
    """Not a datapipe, as a service of a framework's may return, with a method of its own."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.lock = graph, Lock()

    def __iter__(self) -> Iterator[Any]:
        self.items = iter(self.graph)
        return self

    def __next__(self) -> Any:
        return next(self.items)

    def twice(self, number: int) -> int:
        return 2 * number


class Wrapping(MultiProcessingReadingService):
    def initialize(self, datapipe: Any) -> Any:
        return Wrapped(super().initialize(datapipe))


def test_a_service_that_returns_no_datapipe() -> None:
    """Is read as any other, with the figures of this process alone, and goes on from a state."""
    with DataLoader2[Any](numbers(12).sharding_filter(), reading_service=Wrapping(2)) as loader:
        assert sorted(loader) == [*range(12)]
        items: Any = iter(loader)
        first = [next(items), next(items)]
        assert items.twice(4) == 8
        assert "in this process: Wrapped" in loader.explain()
        assert loader.stats()["data/batches"] == 14
        state = loader.state_dict()
    with DataLoader2[Any](None, reading_service=Wrapping(2)) as other:
        other.load_state_dict(state)
        assert sorted([*first, *other]) == [*range(12)]


@pytest.mark.parametrize("within", [False, True], ids=["alone", "in a row"])
def test_with_workers(within: bool, tmp_path: Path) -> None:
    """The workers' batches have the way of a loader's, each is one worker's, and two epochs are told apart; the items
    are counted as the user gets them, and bytes and busy time as the workers send them.
    """
    service: Any = SequentialReadingService(workers(2)) if within else workers(2)
    graph = numbers(40).sharding_filter().map(as_tensor)
    with DataLoader2[Any](graph, reading_service=service) as loader, loader.trace(tmp_path / "a.json"):
        for _ in range(2):
            assert len(list(loader)) == 40
        stats, words = loader.stats(), loader.explain()
        names = {each.name: each for each in loader.metrics()}
    found = read_trace(tmp_path / "a.json")
    assert found.ways == dict.fromkeys(found.delivered, WAY)
    assert {run for run, _ in found.delivered} == {1, 2}
    assert {seq % 2 for _, seq in found.delivered} == {0, 1}
    main_track, *tracks = sorted(found.tracks, key=lambda each: (each.startswith("worker"), each))
    assert main_track.startswith("DataLoader2 ")
    assert [each.partition(" (")[0] for each in tracks] == ["worker 0", "worker 1"]
    assert sum(found.spans[each, "tasks"]["batch"] for each in tracks) == len(found.delivered)
    # A batch of a worker ends its epoch, and may have items besides; each of the others has one at least.
    assert 4 <= len(found.delivered) <= 84
    assert (stats["data/batches"], stats["data/num_workers"]) == (80, 2)
    assert stats["data/bytes"] >= 80 * 3 * 8
    assert 0 < stats["data/worker_busy_frac"] <= 1
    assert stats["stage/fetch/count"] + stats["stage/first_read/count"] >= 4
    assert names["asyncloader_data_batches"].samples[0].value == 80
    assert {each.labels["worker"] for each in names["asyncloader_stage_seconds"].samples} == {"main", "0", "1"}
    assert "with 2 workers" in words
    assert "in each worker, started by fork: " in words
    assert "Mapper, ShardingFilter, IterableWrapper" in words
    assert "in this process: nothing" in words


def test_a_thread_of_this_process_reads_the_workers(tmp_path: Path) -> None:
    """Where a dispatching process deals items, and a part of this process reads ahead; a trace that begins within an
    epoch has what follows.
    """
    graph = numbers(40).sharding_round_robin_dispatch(MP).map(double).prefetch(2)
    with DataLoader2[Any](graph, reading_service=workers(1)) as loader:
        items = iter(loader)
        first = [next(items) for _ in range(3)]
        with loader.trace(tmp_path / "a.json"):
            rest = [*items, *loader]
        assert loader.stats()["data/batches"] == 80
        words = loader.explain()
    assert len(first + rest) == 80
    assert "in a process that deals its items to the workers" in words
    found = read_trace(tmp_path / "a.json")
    assert {run for run, _ in found.delivered} >= {2}


def test_async_for_counts_what_was_delivered(tmp_path: Path) -> None:
    """And a loader that ends writes its trace, once."""
    loader = DataLoader2[Any](numbers(8).sharding_filter(), reading_service=workers(1))

    async def load() -> None:
        async with loader:
            loader.trace(tmp_path / "a.json")
            assert [item async for item in loader] == list(range(8))

    asyncio.run(load())
    assert loader.stats()["data/batches"] == 8
    assert read_trace(tmp_path / "a.json").delivered
    (tmp_path / "a.json").unlink()
    loader.shutdown()
    assert not (tmp_path / "a.json").exists()


def test_errors_and_deaths(tmp_path: Path) -> None:
    """An error of the graph is the user's, whatever becomes of the trace; a death is an event of its worker's track."""
    with DataLoader2[Any](numbers(8).map(fails_at_5)) as loader:
        folder = tmp_path / "gone"
        folder.mkdir()
        trace = loader.trace(folder / "a.json")
        folder.rmdir()
        with pytest.raises(ValueError, match="five is right out"):
            list(loader)
        assert loader.stats()["data/batches"] == 5
        with pytest.raises(FileNotFoundError):
            trace.close()
    graph = numbers(8).sharding_filter().map(dies_at_5)
    with DataLoader2[Any](graph, reading_service=workers(2)) as loader, loader.trace(tmp_path / "b.json"):
        with pytest.warns(RuntimeWarning), pytest.raises(WorkerDied):
            list(loader)
        assert loader.stats()["data/worker_restarts"] == 3
    events = read_trace(tmp_path / "b.json").events["worker died"]
    assert {each["track"].partition(" (")[0] for each in events} == {"worker 1"}


@pytest.mark.parametrize("service", [None, workers(1)], ids=["none", "workers"])
def test_what_nobody_asks_for_costs_nothing(service: Any) -> None:
    """Without workers one item in 50 ms is looked at closely, and each item once that is asked for. With workers none
    is: their messages are timed, from the beginning.
    """
    with DataLoader2[Any](numbers(600).sharding_filter(), reading_service=service) as loader:
        for asked in (False, True):
            began = perf_counter()
            calls = counted(lambda: deque(loader, 0)).functions
            looks = calls["asyncloader/dataloader2/graph_statistics.py GraphStatistics.end_look"]
            if service is None:
                assert looks == 600 if asked else 1 <= looks <= 1 + (perf_counter() - began) / 0.05
            else:
                assert looks == 0
            assert calls["asyncloader/dataloader2/iterator.py DataLoader2Iterator.__next__"] == 601
            stats = loader.stats()
            assert stats["data/batches"] == 600 * (1 + asked)
            assert (stats.get("stage/wait/count", 0) > 0) == (asked or service is not None)


def test_the_time_of_an_epoch() -> None:
    """Goes on while an iterator is in use, and no longer: not between epochs, nor once a loop was left."""
    with DataLoader2[Any](numbers(6)) as loader:
        times = loader._statistics.times
        assert times() == times() == (0, 0)
        items = iter(loader)
        next(items)
        assert times()[0] < times()[0]
        again = iter(loader)
        del items
        assert times()[0] < times()[0], "the new iterator is in use"
        assert len(list(again)) == 6
        assert times()[0] == times()[0] > times()[1] > 0
        for _ in loader:
            assert times()[0] < times()[0]
            break
        assert times()[0] == times()[0]
        items = iter(loader)
        assert times()[0] < times()[0]
        loader.shutdown()
        del items
        assert times()[0] == times()[0]


def ranges_of(profiler: Any) -> set[str]:
    return {each.key for each in profiler.key_averages()}


def test_the_profiler_has_ranges() -> None:
    """Those of the workers' loaders, and torch's own of the parts in this process."""
    with DataLoader2[Any](numbers(8).sharding_filter(), reading_service=workers(1)) as loader, profile() as profiler:
        list(loader)
    names = ranges_of(profiler)
    assert "asyncloader::wait" in names
    assert any(name.startswith("enumerate(DataLoader)#") for name in names)
    with DataLoader2[Any](numbers(8).map(double)) as loader, profile() as profiler:
        list(loader)
    assert any(name.startswith("Mapper(") for name in ranges_of(profiler))
