"""MultiProcessingReadingService: order, cut, dispatch, seeds, errors, deaths, ends."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import get_worker_info
from torch.utils.data.graph_settings import apply_sharding

from asyncloader.dataloader2 import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    PrototypeMultiProcessingReadingService,
    SequentialReadingService,
)
from asyncloader.dataloader2.datapipes.read_ahead import ReadAhead
from asyncloader.dataloader2.graph import list_dps, traverse_dps
from asyncloader.dataloader2.utils import WorkerInfo
from asyncloader.errors import LoaderClosed, WorkerDied
from tests.dataloader2.parts import (
    GRAPHS,
    MP,
    UNEVEN,
    OnlyHere,
    Seeded,
    as_tensor,
    dies_at_5,
    double,
    drawn,
    fails_at_5,
    numbers,
    odd,
    plain,
    process,
    slow_double,
)
from tests.pairwise import quickly

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def alone(graph: Any, seed: int = 1) -> list[Any]:
    with DataLoader2[Any](graph, reading_service=InProcessReadingService()) as loader:
        loader.seed(seed)
        return [plain(item) for item in loader]


@pytest.mark.parametrize("name", GRAPHS)
def test_order_is_that_without_workers(name: str) -> None:
    """Two and three workers, two epochs: the unsharded graph's items; unshuffled ones in its order."""
    expected = alone(GRAPHS[name]())
    shuffled = any(hasattr(each, "set_shuffle") for each in list_dps(traverse_dps(GRAPHS[name]())))
    for workers in (2, 3):
        with DataLoader2[Any](GRAPHS[name](), reading_service=MultiProcessingReadingService(workers)) as loader:
            loader.seed(1)
            for _ in range(2):
                found = [plain(item) for item in loader]
                if shuffled:
                    assert sorted(map(repr, found)) == sorted(map(repr, expected))
                else:
                    assert found == expected


def in_turn(shares: list[list[Any]]) -> Iterator[Any]:
    """One of each, as long as it has any."""
    iterators = [iter(share) for share in shares]
    while iterators:
        for each in list(iterators):
            try:
                yield next(each)
            except StopIteration:
                iterators.remove(each)


def share(graph: Any, workers: int, worker: int) -> list[Any]:
    apply_sharding(graph, workers, worker)
    return list(graph)


@pytest.mark.parametrize("name", UNEVEN)
def test_shares_are_interleaved(name: str) -> None:
    """Whatever the workers' shares are, one item of each comes in turn, and those that have ended are passed over."""
    for workers in (1, 2, 3):
        expected = list(in_turn([share(UNEVEN[name](), workers, worker) for worker in range(workers)]))
        with DataLoader2[Any](UNEVEN[name](), reading_service=MultiProcessingReadingService(workers)) as loader:
            assert list(loader) == expected


@settings(max_examples=12, deadline=None)
@given(
    items=st.integers(0, 60),
    workers=st.integers(1, 3),
    ahead=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    dispatched=st.booleans(),
    keeps=st.booleans(),
)
def test_drawn_graphs(items: int, workers: int, ahead: tuple[int, int], dispatched: bool, keeps: bool) -> None:
    """However many items, workers and items ahead, and with a filter that leaves workers unequal parts."""
    graph = numbers(items)
    graph = graph.sharding_round_robin_dispatch(MP) if dispatched else graph.sharding_filter()
    if not keeps:
        graph = graph.filter(odd)
    shares = [[x for x in range(worker, items, workers) if keeps or odd(x)] for worker in range(workers)]
    service = MultiProcessingReadingService(workers, None, *ahead)
    with DataLoader2[int](graph, reading_service=service) as loader:
        iterator = iter(loader)
        expected = list(in_turn(shares))
        assert [next(iterator) for _ in range(min(3, len(expected)))] == expected[:3]
        assert list(loader) == expected
        assert list(loader) == expected


@pytest.mark.parametrize("method", quickly(["fork", "spawn", "forkserver"], "fork"))
def test_start_methods(method: str) -> None:
    """Also with a dispatching process."""
    for graph in (numbers(7).sharding_filter().map(double), numbers(7).sharding_round_robin_dispatch(MP).map(double)):
        with DataLoader2[int](graph, reading_service=MultiProcessingReadingService(2, method)) as loader:
            assert list(loader) == [0, 2, 4, 6, 8, 10, 12]


def test_where_the_parts_run() -> None:
    """Replicable parts in the workers, others and those after them here, what is dispatched in one process."""
    graph = OnlyHere(numbers(4).sharding_round_robin_dispatch(MP).map(process)).map(process)
    dealt = numbers(6).map(process).sharding_round_robin_dispatch(MP).map(process)
    with DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(2)) as loader:
        items = list(loader)
        assert {here for _, here in items} == {os.getpid()}
        assert len({worker for (_, worker), _ in items}) == 2
    with DataLoader2[Any](dealt, reading_service=MultiProcessingReadingService(2)) as loader:
        items = list(loader)
        assert len({dealer for (_, dealer), _ in items}) == 1
        assert [worker for _, worker in items[:2]] == [worker for _, worker in items[2:4]]
        assert len({os.getpid(), *(dealer for (_, dealer), _ in items), *(worker for _, worker in items)}) == 4


def test_batches_come_through_shared_memory() -> None:
    """A tensor of a worker is a view of its ring; one that the user keeps stays as it is."""
    with DataLoader2[torch.Tensor](
        numbers(40).sharding_filter().map(as_tensor), reading_service=MultiProcessingReadingService(2)
    ) as loader:
        kept = list(loader)
        assert [x.tolist() for x in kept] == [[x] * 3 for x in range(40)]
    assert "memfd:asyncloader" in Path("/proc/self/maps").read_text()
    assert [x.tolist() for x in kept] == [[x] * 3 for x in range(40)]


def _once(datapipe: Any, info: WorkerInfo) -> Any:
    assert info.num_workers == 2
    return _tagged_once(datapipe, info)


def _tagged_once(datapipe: Any, info: WorkerInfo) -> Any:
    return datapipe.map(_Tag(info.worker_id))


class _Tag:
    def __init__(self, tag: Any) -> None:
        self.tag = tag

    def __call__(self, x: Any) -> Any:
        return x, self.tag


def _each_time(datapipe: Any, info: WorkerInfo, seeds: Any) -> Any:
    datapipe.fn.tag = (info.worker_id, seeds.generate_shared_seed(), seeds.generate_seed())
    return datapipe


def test_functions_in_the_workers() -> None:
    """`worker_init_fn` once, `worker_reset_fn` in each epoch; shared seeds are equal, own ones are not."""
    service = MultiProcessingReadingService(2, worker_init_fn=_once, worker_reset_fn=_each_time)
    with DataLoader2[Any](numbers(4).sharding_filter(), reading_service=service) as loader:
        loader.seed(1)
        first, second = list(loader), list(loader)
    assert [(x, tag[0]) for x, tag in first] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    (zero, one), (later, _) = [[tag for _, tag in epoch[:2]] for epoch in (first, second)]
    assert zero[1] == one[1] != later[1]
    assert zero[2] != one[2]


def test_seeds_in_the_workers() -> None:
    """Parts before the filter have one seed in all workers, those after it one each; another one in each epoch. The
    workers' global generators follow from the seed, and the user's stay as they are.
    """
    graph = Seeded(Seeded(numbers(4)).sharding_filter()).map(drawn)
    before = torch.get_rng_state()

    def epochs() -> list[Any]:
        with DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(2)) as loader:
            loader.seed(9)
            return [list(loader), list(loader)]

    found = epochs()
    assert found == epochs()
    assert torch.equal(torch.get_rng_state(), before)
    seeds = [[(shared, own) for (((_, shared), own), *_) in epoch] for epoch in found]
    assert len({shared for shared, _ in seeds[0]}) == 1
    assert seeds[0][0] == seeds[0][2] != seeds[0][1]
    assert seeds[0][0][0] != seeds[1][0][0]
    assert len({tuple(item[1:]) for epoch in found for item in epoch}) == 8


def test_seeds_in_the_dispatching_process() -> None:
    """Its global generators follow from the seed, another one in each epoch, and so does a position in it."""
    graph = numbers(6).map(drawn).sharding_round_robin_dispatch(MP)

    def epochs() -> list[Any]:
        with DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(2)) as loader:
            loader.seed(9)
            return [list(loader), list(loader)]

    found = epochs()
    assert found == epochs()
    assert len({item[1:] for epoch in found for item in epoch}) == 12


def _worker_info(x: int) -> Any:
    return get_worker_info()


def test_workers_are_none_of_torchs() -> None:
    """As in torchdata: a part that shares itself out among torch's workers gives all its items."""
    with DataLoader2[Any](
        numbers(4).sharding_filter().map(_worker_info), reading_service=MultiProcessingReadingService(2)
    ) as loader:
        assert [list(loader), list(loader)] == [[None] * 4] * 2


def _seeded_alike(datapipe: Any) -> Any:
    return datapipe.set_seed(7)


class _OwnSeeds(InProcessReadingService):
    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        return _seeded_alike


def _tagged_each_time(datapipe: Any, info: WorkerInfo, seeds: Any) -> Any:
    return datapipe.map(_Tag("tag"))


def test_each_epoch_begins_with_the_same_graph() -> None:
    """What a function makes of it is for one epoch; a service's own seeds come after those of the epoch."""
    service = SequentialReadingService(_OwnSeeds(), MultiProcessingReadingService(1, worker_reset_fn=_tagged_each_time))
    with DataLoader2[Any](numbers(9).shuffle(), reading_service=service) as loader:
        first, second = list(loader), list(loader)
    assert first == second
    assert {tag for _, tag in first} == {"tag"}


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle:UserWarning")
@pytest.mark.parametrize("method", quickly(["fork", "spawn"], "fork"))
def test_functions_that_pickle_refuses(method: str) -> None:
    """Local ones reach workers that are spawned, too, where cloudpickle is."""

    def more(x: int) -> int:
        return x + 1

    def once(datapipe: Any, info: WorkerInfo) -> Any:
        return datapipe.map(double)

    service = MultiProcessingReadingService(2, method, worker_init_fn=once)
    with DataLoader2[int](numbers(5).sharding_filter().map(more), reading_service=service) as loader:
        assert list(loader) == [2, 4, 6, 8, 10]


class _TwoArgumentsError(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)


def _fails_oddly(x: int) -> int:
    if x == 3:

        class LocalError(Exception):
            pass

        raise LocalError("of a class that cannot be pickled")
    if x == 5:
        raise _TwoArgumentsError("of a class", "that cannot be unpickled")
    return x


@pytest.mark.parametrize(("start", "words"), [(0, "LocalError: of a class"), (4, "Two.* of a class")])
@pytest.mark.parametrize("dispatched", [False, True])
def test_errors_of_odd_classes(start: int, words: str, dispatched: bool) -> None:
    """Their text comes, in a RuntimeError."""
    graph = numbers(6, start).map(_fails_oddly)
    graph = graph.sharding_round_robin_dispatch(MP) if dispatched else graph.sharding_filter()
    loader = DataLoader2[int](graph, reading_service=MultiProcessingReadingService(2))
    with pytest.raises(RuntimeError, match=rf"(?s)^Caught .*Original Traceback .*{words}"):
        list(loader)


@pytest.mark.parametrize("here", [False, True])
def test_a_forked_process_leaves_them_alone(here: bool) -> None:
    """A child of the main process that ends its copy of the loader, or reads it, or just ends."""
    graph: Any = numbers(40).sharding_round_robin_dispatch(MP)
    if here:
        graph = OnlyHere(graph)
    with DataLoader2[int](graph, reading_service=MultiProcessingReadingService(2)) as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(3)]
        for what in (loader.shutdown, lambda: next(iterator), lambda: sys.exit(7)):
            child = os.fork()
            if not child:
                code = 1
                try:
                    what()
                    code = 7
                except LoaderClosed:
                    code = 7
                except SystemExit:
                    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
                    code = 7
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert found + list(iterator) == list(range(40))


def _sleeps_at_3(x: int) -> int:
    if x == 3:
        time.sleep(3600)
    return x


def test_a_slow_worker_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a thread of the main process waits for its item: workers end first."""
    waits: list[float] = []
    monkeypatch.setattr(ReadAhead, "stop", lambda self, seconds=0: waits.append(self._thread.join(60) or 0))
    loader = DataLoader2[int](
        OnlyHere(numbers(8).sharding_filter().map(_sleeps_at_3)), reading_service=MultiProcessingReadingService(2)
    )
    assert next(iter(loader)) == 0
    loader.shutdown()
    assert waits


def test_a_dropped_circle_is_ended_once() -> None:
    """The finalizers of the loader and of its service come in any order, each in a thread."""
    for _ in range(6):
        loader: Any = DataLoader2[int](
            numbers(60).sharding_round_robin_dispatch(MP), reading_service=MultiProcessingReadingService(2)
        )
        loader.iterator = iter(loader)
        next(loader.iterator)
        loader.itself = loader
        del loader
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "asyncloader-stop":
                thread.join(60)


def test_shuffled_shards_make_the_whole() -> None:
    """In each epoch, in another order; also when the shuffle runs in the dispatching process."""
    for graph in (numbers(30).shuffle().sharding_filter(), numbers(30).shuffle().sharding_round_robin_dispatch(MP)):
        with DataLoader2[int](graph, reading_service=MultiProcessingReadingService(3)) as loader:
            loader.seed(2)
            found = [list(loader) for _ in range(3)]
        assert [sorted(epoch) for epoch in found] == [list(range(30))] * 3
        assert len(set(map(tuple, found))) == 3


def test_an_epoch_that_is_left() -> None:
    """The next one begins anew, with workers that go on living, and also while paused by a limit."""
    for graph in (
        numbers(50).sharding_filter().map(process),
        numbers(50).sharding_round_robin_dispatch(MP).map(process),
    ):
        with DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(2)) as loader:
            iterator = iter(loader)
            pids = {next(iterator)[1] for _ in range(2)}
            for taken in (1, 30, 50):
                iterator = iter(loader)
                found = [next(iterator) for _ in range(taken)]
                assert [x for x, _ in found] == list(range(taken))
                assert {pid for _, pid in found} <= pids
            iterator = iter(loader)
            iterator.limit(4)
            assert [x for x, _ in iterator] == [0, 1, 2, 3]
            iterator.resume()
            assert [x for x, _ in iterator] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("graph", "where"),
    [
        (numbers(10).sharding_filter().map(fails_at_5), "worker process 1"),
        (numbers(10).sharding_round_robin_dispatch(MP).map(fails_at_5), "worker process 1"),
        (numbers(10).map(fails_at_5).sharding_round_robin_dispatch(MP), "dispatching process 0"),
    ],
)
def test_errors(graph: Any, where: str) -> None:
    """The items before it, then its type and the documented words; after that the loader is shut down."""
    loader = DataLoader2[int](graph, reading_service=MultiProcessingReadingService(2))
    found: list[int] = []
    with pytest.raises(ValueError, match=rf"Caught ValueError in {where}\.\nOriginal Traceback ") as caught:
        found.extend(loader)
    assert str(caught.value).startswith("Caught ValueError in worker process 1.\nOriginal Traceback")
    assert "five is right out" in str(caught.value)
    with pytest.raises(RuntimeError, match="already been shut down"):
        iter(loader)


def test_items_before_an_error() -> None:
    """They come first, in the order without workers."""
    loader = DataLoader2[int](
        numbers(10).sharding_filter().map(fails_at_5), reading_service=MultiProcessingReadingService(2)
    )
    iterator = iter(loader)
    assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(iterator)


def _refuses(datapipe: Any, info: WorkerInfo) -> Any:
    raise LookupError(f"not in {info.worker_id}")


def test_an_error_of_the_init_function() -> None:
    """As any error of that worker."""
    loader = DataLoader2[int](numbers(4), reading_service=MultiProcessingReadingService(2, worker_init_fn=_refuses))
    with pytest.raises(LookupError, match="Caught LookupError in worker process 0"):
        list(loader)


@pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning")
@settings(max_examples=8, deadline=None)
@given(kills=st.lists(st.integers(0, 23), min_size=1, max_size=3), workers=st.integers(1, 3))
def test_workers_that_are_killed(kills: list[int], workers: int) -> None:
    """Each is replaced, and reads its part again: the items are those of undisturbed epochs, random numbers and all. A
    worker may also be killed after the last item of the first epoch.
    """
    graph = Seeded(numbers(12).shuffle().sharding_filter()).map(drawn).map(process)

    def items(kills: list[int]) -> Iterator[Any]:
        with DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(workers)) as loader:
            loader.seed(4)
            for epoch in range(2):
                for position, (item, pid) in enumerate(loader):
                    if 12 * epoch + position in kills:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    yield item

    assert list(items(kills)) == list(items([]))


def test_a_replacement_is_told() -> None:
    """By a RuntimeWarning, which says on what it depends that nothing is lost."""
    with DataLoader2[Any](
        numbers(40).sharding_filter().map(process), reading_service=MultiProcessingReadingService(2)
    ) as loader:
        iterator = iter(loader)
        os.kill(next(iterator)[1], signal.SIGKILL)
        with pytest.warns(
            RuntimeWarning, match=r"^DataLoader worker 0 died .* if the items follow from the seeds, none"
        ):
            assert [x for x, _ in iterator] == list(range(1, 40))


@pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning")
@pytest.mark.parametrize(
    ("dispatched", "why"),
    [
        (False, "It had been replaced 3 times in this epoch"),
        (True, "what the dispatching process dealt to it is gone"),
    ],
)
def test_a_worker_that_dies_for_good(tmp_path: Path, dispatched: bool, why: str) -> None:
    """WorkerDied says why, and what to do. That is done here: what kills is taken away, and the rest is read."""
    bomb = tmp_path / "bomb"
    bomb.touch()
    graph = numbers(12).sharding_round_robin_dispatch(MP) if dispatched else numbers(12).sharding_filter()
    loader = DataLoader2[int](graph.map(_Dies(bomb)), reading_service=MultiProcessingReadingService(2))
    found: list[int] = []
    with pytest.raises(WorkerDied, match="killed by signal: Killed") as caught:
        found.extend(iter(loader))
    assert f"{why}. Mend what ended it, and go on from where this loader was: DataLoader2.from_state(" in str(
        caught.value
    )
    bomb.unlink()
    with DataLoader2.from_state(loader.state_dict(), MultiProcessingReadingService(2)) as rest:
        assert found + list(rest) == list(range(12))


class _Dies:
    """As long as a file is there."""

    def __init__(self, bomb: Path) -> None:
        self.bomb = bomb

    def __call__(self, x: int) -> int:
        if x == 5 and self.bomb.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_dispatching_process_that_dies() -> None:
    """WorkerDied, whether it kills itself or is killed between two epochs."""
    loader = DataLoader2[int](
        numbers(10).map(dies_at_5).sharding_round_robin_dispatch(MP), reading_service=MultiProcessingReadingService(2)
    )
    with pytest.raises(
        WorkerDied, match=r"dispatching process \(pid .*\) ended unexpectedly, killed by signal: Killed\. Mend"
    ):
        list(loader)
    service: Any
    loader = DataLoader2[int](
        numbers(10).sharding_round_robin_dispatch(MP), reading_service=MultiProcessingReadingService(2)
    )
    assert list(loader) == list(range(10))
    service = loader.reading_service
    os.kill(service._dispatcher.pid, signal.SIGKILL)
    with pytest.raises(
        WorkerDied, match=r"dispatching process \(pid .*\) ended unexpectedly, killed by signal: Killed\. Mend"
    ):
        list(loader)


def test_no_branch_or_two() -> None:
    """The documented AssertionError."""
    words = "^MultiProcessingReadingService only supports single replicable branch currently$"
    for graph in (OnlyHere(numbers(4)).zip(numbers(4)), OnlyHere([1, 2]).map(double)):
        loader = DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(2))
        with pytest.raises(AssertionError, match=words):
            iter(loader)
        loader.shutdown()


def test_no_workers_and_the_old_name() -> None:
    """Both warn in the documented words; the old name makes one of the new class."""
    with pytest.warns(UserWarning, match=r"^Please use `InProcessReadingService` for num_workers=0$"):
        service = MultiProcessingReadingService()
    assert list(DataLoader2[int](numbers(3).sharding_filter(), reading_service=service)) == [0, 1, 2]
    with pytest.warns(UserWarning, match="for num_workers=0"):
        service = MultiProcessingReadingService(worker_init_fn=_tagged_once, worker_reset_fn=_each_time)
    ((item, tag),) = DataLoader2[Any](numbers(1), reading_service=service)
    assert (item, tag[0], len(tag)) == (0, 0, 3)
    with pytest.warns(
        UserWarning, match=r"^`PrototypeMultiProcessingReadingService` is deprecated and will be removed in"
    ):
        old: Any = PrototypeMultiProcessingReadingService(num_workers=2)
    assert type(old) is MultiProcessingReadingService
    assert old.num_workers == 2
    with pytest.raises(AssertionError, match="Please choose one available multiprocessing context"):
        MultiProcessingReadingService(2, "threads")


def test_coroutines_in_the_workers() -> None:
    """`amap` runs in each of them."""
    with DataLoader2[int](
        numbers(20).sharding_filter().amap(slow_double, concurrency=3), reading_service=MultiProcessingReadingService(2)
    ) as loader:
        assert list(loader) == [2 * x for x in range(20)]


def test_a_service_before_the_workers() -> None:
    """In a row after one that changes the graph in each epoch: the workers' copies are changed."""
    service = SequentialReadingService(_Tagging(), MultiProcessingReadingService(2))
    with DataLoader2[Any](numbers(4).sharding_filter(), reading_service=service) as loader:
        assert list(loader) == [(x, "tag") for x in range(4)]


def _tagged(datapipe: Any) -> Any:
    return datapipe.map(_Tag("tag"))


class _Tagging(InProcessReadingService):
    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        return _tagged


def test_processes_end_with_their_parent() -> None:
    """A main process that is killed leaves neither workers nor the dispatching process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        loader = DataLoader2[int](
            numbers(10**6).sharding_round_robin_dispatch(MP), reading_service=MultiProcessingReadingService(2)
        )
        next(iter(loader))
        pids = [each.pid for each in psutil.Process().children()]
        os.write(write, repr(pids).encode())
        signal.pause()
    os.close(write)
    try:
        pids = [int(each) for each in os.read(read, 1000).decode().strip("[]").split(",")]
        assert len(pids) == 3
        processes = [psutil.Process(pid) for pid in pids]
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not psutil.wait_procs(processes, timeout=20)[1]
