"""MultiProcessingReadingService: order, shares, dispatch, seeds, errors, deaths, ends."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_sharding

from asyncloader.dataloader2 import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    PrototypeMultiProcessingReadingService,
    SequentialReadingService,
)
from asyncloader.dataloader2.graph import list_dps, traverse_dps
from asyncloader.dataloader2.graph._serialization import dumps
from asyncloader.dataloader2.random import SeedGenerator
from asyncloader.dataloader2.services import dispatching_process
from asyncloader.dataloader2.utils import WorkerInfo
from tests.dataloader2.parts import (
    GRAPHS,
    MP,
    UNEVEN,
    OnlyHere,
    Seeded,
    as_tensor,
    double,
    drawn,
    numbers,
    odd,
    plain,
    process,
    slow_double,
)
from tests.helpers.running import run_script
from tests.pairwise import quickly
from tests.processes import own_children

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def alone(graph: Any, seed: int = 1) -> list[Any]:
    with DataLoader2[Any](graph, reading_service=InProcessReadingService()) as loader:
        loader.seed(seed)
        return [plain(item) for item in loader]


@pytest.mark.parametrize("name", GRAPHS)
def test_order_is_that_without_workers(name: str) -> None:
    """Two and three workers give the unsharded graph's items in two epochs; without a shuffle, in its order."""
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
    """Give an item of each share in turn, until all are empty."""
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
    """Whatever the workers' shares are, each gives an item in turn, and shares that have ended are skipped."""
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
    """This holds for any number of items, workers and items ahead, also if workers have uneven parts after a filter."""
    graph = numbers(items)
    graph = graph.sharding_round_robin_dispatch(MP) if dispatched else graph.sharding_filter()
    if not keeps:
        graph = graph.filter(odd)
    shares = [[x for x in range(worker, items, workers) if keeps or odd(x)] for worker in range(workers)]
    service = MultiProcessingReadingService(workers, "fork", *ahead)  # drawn cases start many processes
    with DataLoader2[int](graph, reading_service=service) as loader:
        iterator = iter(loader)
        expected = list(in_turn(shares))
        assert [next(iterator) for _ in range(min(3, len(expected)))] == expected[:3]
        assert list(loader) == expected
        assert list(loader) == expected


@pytest.mark.parametrize("method", quickly(["fork", "spawn", "forkserver"], "fork"))
def test_start_methods(method: str) -> None:
    """Each start method works, also with a dispatching process."""
    for graph in (numbers(7).sharding_filter().map(double), numbers(7).sharding_round_robin_dispatch(MP).map(double)):
        with DataLoader2[int](graph, reading_service=MultiProcessingReadingService(2, method)) as loader:
            assert list(loader) == [0, 2, 4, 6, 8, 10, 12]


DISPATCHES_FIRST = """
from pathlib import Path
from torch.utils.data.datapipes.iter import IterableWrapper
from asyncloader.dataloader2 import DataLoader2, MultiProcessingReadingService
from tests.dataloader2.parts import MP

def blocked(_):
    return [line for line in Path("/proc/thread-self/status").read_text().splitlines() if line.startswith("SigBlk")]

if __name__ == "__main__":
    graph = IterableWrapper([1]).map(blocked).sharding_round_robin_dispatch(MP)
    with DataLoader2(graph, reading_service=MultiProcessingReadingService(2, {method!r})) as loader:
        print(*loader)
"""


@pytest.mark.skipif(not Path("/proc/thread-self").exists(), reason="needs Linux's /proc/thread-self")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_program_that_dispatches_first(method: str, tmp_path: Path) -> None:
    """The dispatching process accepts signals. So does a fork server that is started for it: else no worker of
    that server would ever be known to have ended, and closing would warn after 16 seconds.
    """
    done = run_script(tmp_path, DISPATCHES_FIRST.format(method=method))
    assert (done.returncode, done.stdout) == (0, "['SigBlk:\\t0000000000000000']\n"), done.stderr
    assert "left behind" not in done.stderr


def test_a_question_that_overtakes_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gets an item of its epoch even if `wait` has missed the order that begins the epoch."""
    (ours, control), (worker, pipe) = multiprocessing.Pipe(), multiprocessing.Pipe()
    monkeypatch.setattr(dispatching_process, "wait", lambda _: [pipe if pipe.poll() else control])
    monkeypatch.setattr(dispatching_process, "reset_graph", lambda graph, *_: graph)  # leaves global generators alone
    dealing = dispatching_process._Dealing(dumps(numbers(3)), 1)
    with ours, control, worker, pipe:
        worker.send_bytes((1).to_bytes(8, "little"))
        ours.send_bytes(dumps(tuple(dispatching_process.EpochOrder(1, SeedGenerator(0), None))))
        ours.send_bytes(dispatching_process._OVER)
        dispatching_process._serve(dealing, control, [pipe])
        assert pickle.loads(worker.recv_bytes()) == ("item", 0)


def test_where_the_parts_run() -> None:
    """Replicable parts run in the workers, dispatched parts in one process, other parts and those after them here."""
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
    """A tensor of a worker is a view of its ring; a tensor that the user keeps stays unchanged."""
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
    """`worker_init_fn` is called once, `worker_reset_fn` in each epoch; shared seeds are equal, own seeds differ."""
    service = MultiProcessingReadingService(2, worker_init_fn=_once, worker_reset_fn=_each_time)
    with DataLoader2[Any](numbers(4).sharding_filter(), reading_service=service) as loader:
        loader.seed(1)
        first, second = list(loader), list(loader)
    assert [(x, tag[0]) for x, tag in first] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    (zero, one), (later, _) = [[tag for _, tag in epoch[:2]] for epoch in (first, second)]
    assert zero[1] == one[1] != later[1]
    assert zero[2] != one[2]


def two_epochs(graph: Any) -> list[list[Any]]:
    with DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(2)) as loader:
        loader.seed(9)
        return [list(loader), list(loader)]


def test_seeds_in_the_workers() -> None:
    """A part before the filter has the same seed in all workers, a part after it a seed in each; each epoch has
    other seeds. The workers' global generators follow from the seed, and the user's are not changed.
    """
    graph = Seeded(Seeded(numbers(4)).sharding_filter()).map(drawn)
    before = torch.get_rng_state()

    found = two_epochs(graph)
    assert found == two_epochs(graph)
    assert torch.equal(torch.get_rng_state(), before)
    seeds = [[(shared, own) for (((_, shared), own), *_) in epoch] for epoch in found]
    assert len({shared for shared, _ in seeds[0]}) == 1
    assert seeds[0][0] == seeds[0][2] != seeds[0][1]
    assert seeds[0][0][0] != seeds[1][0][0]
    assert len({tuple(item[1:]) for epoch in found for item in epoch}) == 8


def test_seeds_in_the_dispatching_process() -> None:
    """Its global generators follow from the seed, and differ in each epoch."""
    graph = numbers(6).map(drawn).sharding_round_robin_dispatch(MP)

    found = two_epochs(graph)
    assert found == two_epochs(graph)
    assert len({item[1:] for epoch in found for item in epoch}) == 12


def _worker_info(x: int) -> Any:
    return get_worker_info()


def test_workers_are_none_of_torchs() -> None:
    """They are not in torchdata either: a part that shares its items among torch's workers gives all of them."""
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
    """A function's changes last for an epoch; a service's own seeds replace those of the epoch."""
    service = SequentialReadingService(_OwnSeeds(), MultiProcessingReadingService(1, worker_reset_fn=_tagged_each_time))
    with DataLoader2[Any](numbers(9).shuffle(), reading_service=service) as loader:
        first, second = list(loader), list(loader)
    assert first == second
    assert {tag for _, tag in first} == {"tag"}


def test_shuffled_shards_make_the_whole() -> None:
    """Each epoch has all items in another order, also when the shuffle runs in the dispatching process."""
    for graph in (numbers(30).shuffle().sharding_filter(), numbers(30).shuffle().sharding_round_robin_dispatch(MP)):
        with DataLoader2[int](graph, reading_service=MultiProcessingReadingService(3)) as loader:
            loader.seed(2)
            found = [list(loader) for _ in range(3)]
        assert [sorted(epoch) for epoch in found] == [list(range(30))] * 3
        assert len(set(map(tuple, found))) == 3


def test_an_epoch_that_is_left() -> None:
    """The next epoch begins at its first item, in the same workers, also after a pause by a limit."""
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


class _Fed(IterDataPipe[int]):
    """A part that gives an item only after the item before was taken, which the test reports through a pipe."""

    def __init__(self, taken: int) -> None:
        self.taken = taken

    def __iter__(self) -> Iterator[int]:
        for x in range(12):
            yield x
            assert os.read(self.taken, 1) == b"x"


def test_a_ready_item_waits_for_no_other() -> None:
    """A source may give its next item only after the last item was taken."""
    taken, taking = os.pipe()
    try:
        source: Any = _Fed(taken)
        with DataLoader2[int](source, reading_service=MultiProcessingReadingService(1, "fork")) as loader:
            found: list[int] = []
            for item in loader:
                found.append(item)
                os.write(taking, b"x")
            assert found == list(range(12))
    finally:
        os.close(taken)
        os.close(taking)


def test_no_branch_or_two() -> None:
    """The documented AssertionError is raised."""
    words = "^MultiProcessingReadingService only supports single replicable branch currently$"
    for graph in (OnlyHere(numbers(4)).zip(numbers(4)), OnlyHere([1, 2]).map(double)):
        loader = DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(2))
        with pytest.raises(AssertionError, match=words):
            iter(loader)
        loader.shutdown()


def test_no_workers_and_the_old_name() -> None:
    """Both warn with the documented message; the old name makes an object of the new class."""
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
    with pytest.raises(ValueError, match="num_workers must be at least 0, not -1"):
        MultiProcessingReadingService(-1)


def test_coroutines_in_the_workers() -> None:
    """`amap` runs in each worker."""
    with DataLoader2[int](
        numbers(20).sharding_filter().amap(slow_double, concurrency=3), reading_service=MultiProcessingReadingService(2)
    ) as loader:
        assert list(loader) == [2 * x for x in range(20)]


def test_a_service_before_the_workers() -> None:
    """A service in front that changes the graph in each epoch changes the workers' copies."""
    service = SequentialReadingService(_Tagging(), MultiProcessingReadingService(2))
    with DataLoader2[Any](numbers(4).sharding_filter(), reading_service=service) as loader:
        assert list(loader) == [(x, "tag") for x in range(4)]


def _tagged(datapipe: Any) -> Any:
    return datapipe.map(_Tag("tag"))


class _Tagging(InProcessReadingService):
    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        return _tagged


def test_ctrl_c_within_the_start_of_the_dispatching_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that comes before the process's number is known: the process is ended all the same."""
    owner, fork = os.getpid(), os.fork

    def interrupted() -> int:
        pid = fork()
        if os.getpid() == owner:
            _thread.interrupt_main()
        return pid

    before = own_children()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dispatching_process.Dispatcher(numbers(4), 2, multiprocessing.get_context("fork"))
    assert own_children() == before


class _Wrapped:
    """Not a datapipe, as a service of a framework's may return, with a method of its own."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.lock = graph, threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        self.items = iter(self.graph)
        return self

    def __next__(self) -> Any:
        return next(self.items)

    def twice(self, number: int) -> int:
        return 2 * number


class _Wrapping(MultiProcessingReadingService):
    def initialize(self, datapipe: Any) -> Any:
        return _Wrapped(super().initialize(datapipe))


def test_a_service_that_returns_no_datapipe() -> None:
    """Is read as any other, and goes on from a state."""
    with DataLoader2[Any](numbers(12).sharding_filter(), reading_service=_Wrapping(2)) as loader:
        assert sorted(loader) == [*range(12)]
        items: Any = iter(loader)
        first = [next(items), next(items)]
        assert items.twice(4) == 8
        state = loader.state_dict()
    with DataLoader2[Any](None, reading_service=_Wrapping(2)) as other:
        other.load_state_dict(state)
        assert sorted([*first, *other]) == [*range(12)]
