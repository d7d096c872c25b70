"""DataLoader2 in this process: epochs, iterators, seeds, limits, ends, errors with the documented messages."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import asyncloader.dataloader2 as dl2
from asyncloader.dataloader2 import (
    CheckpointableReadingServiceInterface,
    DataLoader2,
    InProcessReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
)
from asyncloader.dataloader2.random import SeedGenerator
from asyncloader.dataloader2.utils import WorkerInfo
from tests.dataloader2.parts import GRAPHS, Seeded, double, fails_at_5, numbers, plain
from tests.helpers.forking import fork
from tests.helpers.running import PATIENCE_S


class Recording(ReadingServiceInterface):
    """A user's service with the documented interface. It records calls on the class."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, name: str = "") -> None:
        self.name = name

    def initialize(self, datapipe: Any) -> Any:
        self.calls.append(f"initialize{self.name}")
        return datapipe

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        self.calls.append(f"begin{self.name}")
        return iter_reset_fn

    def finalize_iteration(self) -> None:
        self.calls.append(f"end{self.name}")

    def finalize(self) -> None:
        if type(self).__name__ in ("Recording", "Saving"):
            self.calls.append(f"finalize{self.name}")

    def __del__(self) -> None:
        pass  # the original, which the loader has cloned


class Saving(Recording, CheckpointableReadingServiceInterface):
    def checkpoint(self) -> bytes:
        self.calls.append(f"checkpoint{self.name}")
        return b"state" + self.name.encode()

    def restore(self, datapipe: Any, serialized_state: bytes) -> Any:
        self.calls.append((f"restore{self.name}", serialized_state))
        return datapipe


def _once(datapipe: Any, info: WorkerInfo) -> Any:
    Recording.calls.append(info)
    return datapipe.map(double)


def _each_time(datapipe: Any, info: WorkerInfo, seeds: SeedGenerator) -> Any:
    Recording.calls.append(info)
    assert seeds.generate_seed() != seeds.generate_seed()
    return datapipe.map(double)


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    Recording.calls.clear()


def test_names_are_torchdatas() -> None:
    """`__all__` is that of `torchdata.dataloader2`."""
    assert sorted(dl2.__all__) == [
        "CheckpointableReadingServiceInterface",
        "DataLoader2",
        "DataLoader2Iterator",
        "DistributedReadingService",
        "InProcessReadingService",
        "MultiProcessingReadingService",
        "PauseIteration",
        "PrototypeMultiProcessingReadingService",
        "ReadingServiceInterface",
        "SequentialReadingService",
        "ShuffleSpec",
    ]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_read_as_it_is(name: str) -> None:
    """With and without a service two epochs give the items of a plain ``for`` over the graph, in any order."""
    expected = sorted(map(repr, map(plain, GRAPHS[name]())))
    for service in (None, InProcessReadingService(), InProcessReadingService(prefetch_cnt=3)):
        with DataLoader2[Any](GRAPHS[name](), reading_service=service) as loader:
            for _ in range(2):
                assert sorted(map(repr, map(plain, loader))) == expected


def test_the_callers_graph_and_service_stay_as_they_are() -> None:
    """Both are cloned."""
    graph, service = numbers(3).shuffle(), InProcessReadingService(2)
    loader = DataLoader2[int](graph, reading_service=service)
    assert sorted(loader) == [0, 1, 2]
    assert loader.datapipe is not graph
    assert service._end_datapipe is None
    loader.shutdown()


def test_a_loader_is_copied_before_it_is_read() -> None:
    """Pickled or copied, as for a rank's spawned process, it reads the same items."""
    loader = DataLoader2[int](numbers(3), reading_service=InProcessReadingService())
    loader.seed(1)
    for copied in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert list(copied) == [0, 1, 2]
        copied.shutdown()


def test_a_lambda_is_cloned_where_cloudpickle_is() -> None:
    """A graph that pickle refuses is cloned with its code; a lock cannot be cloned, and pickle's error is raised."""
    with pytest.warns(UserWarning, match="pickle"):
        graph = numbers(3).map(lambda x: x + 1)
    assert list(DataLoader2[int](graph)) == [1, 2, 3]
    with pytest.raises(TypeError, match="cannot pickle"):
        DataLoader2(IterableWrapper([1], deepcopy=False).map(double, __import__("threading").Lock()))


def test_a_map_datapipe_is_read_by_its_indices() -> None:
    """It is read like `to_iter_datapipe`, which can also read other indices."""
    graph = SequenceWrapper([5, 6, 7]).map(double)
    assert list(DataLoader2[int](graph)) == [10, 12, 14]
    assert list(graph.to_iter_datapipe([2, 0])) == [14, 10]
    assert len(graph.to_iter_datapipe()) == 3


def test_an_older_iterator_is_invalid() -> None:
    """It raises torchdata's error; the newest iterator continues. If no item was read, the epoch continues, too."""
    loader = DataLoader2[int](numbers(4), reading_service=Recording())
    first = iter(loader)
    second = iter(loader)
    assert Recording.calls == ["initialize", "begin"]
    assert next(second) == 0
    with pytest.raises(
        RuntimeError, match=r"^This iterator has been invalidated because another iterator has been crea"
    ):
        next(first)
    third = iter(loader)
    assert next(third) == 0
    with pytest.raises(RuntimeError, match=r"only allow|single iterator per DataLoader2 constraint"):
        next(second)
    assert list(third) == [1, 2, 3]
    loader.shutdown()
    loader.shutdown()
    assert Recording.calls == ["initialize", "begin", "begin", "end", "end", "finalize"]


def test_no_datapipe_and_shut_down() -> None:
    """The documented errors."""
    with pytest.raises(
        RuntimeError, match=r"^Please provide datapipe or use load_state_dict to load datapipe from state$"
    ):
        iter(DataLoader2[int](None))
    with pytest.raises(RuntimeError, match=r"^Please provide datapipe"):
        DataLoader2[int](None).state_dict()
    with DataLoader2[int](numbers(2)) as loader:
        assert list(loader) == [0, 1]
    with pytest.raises(RuntimeError, match=r"^Cannot iterate over the DataLoader as it has already been shut down$"):
        iter(loader)


def test_an_error_shuts_down() -> None:
    """An exception of the graph reaches the caller, and ends the loader."""
    loader = DataLoader2[int](numbers(9).map(fails_at_5), reading_service=Recording())
    with pytest.raises(ValueError, match="five is right out"):
        list(loader)
    iterator = DataLoader2[int](numbers(9).map(fails_at_5))
    with pytest.raises(ValueError, match="five"):
        list(iterator)
    assert Recording.calls[-1] == "finalize"
    with pytest.raises(RuntimeError, match="already been shut down"):
        iter(loader)


def test_a_dropped_loader_shuts_down() -> None:
    """No reference cycle keeps it, in the middle of an epoch either."""
    loader = DataLoader2[int](numbers(9).prefetch(2), reading_service=Recording())
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader, iterator
        assert gone() is None
    finally:
        gc.enable()
    # a finalizer does not wait: a thread ends the processes and threads that exist
    for thread in threading.enumerate():
        if thread.name == "asyncloader-stop":
            thread.join(PATIENCE_S)
    assert Recording.calls[-2:] == ["end", "finalize"]


def test_a_dropped_loader_changes_no_pickle() -> None:
    """Its finalizer's thread does not walk the graph as torch does: during such a walk a graph that another thread
    pickled, as each new loader does, became "STUB", or torch complained of two walks at a time.
    """
    loader = DataLoader2[int](numbers(9), reading_service=InProcessReadingService(2))
    assert next(iter(loader)) == 0
    reading = [thread for thread in threading.enumerate() if thread.name == "asyncloader-read-ahead"]
    assert reading
    with pytest.MonkeyPatch.context() as patch:
        for kind in (IterDataPipe, MapDataPipe):
            patch.setattr(kind, "reduce_ex_hook", lambda _: pytest.fail("pickled"))  # as if another thread walked
        del loader
        gc.collect()
        for thread in threading.enumerate():
            if thread.name in {"asyncloader-stop", "asyncloader-read-ahead"}:
                thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in reading)


def test_seeds() -> None:
    """The same seed gives the same epochs; it seeds one epoch, and later epochs continue its stream."""

    def epochs(seed: int) -> list[list[int]]:
        loader = DataLoader2[int](numbers(20).shuffle(), reading_service=InProcessReadingService())
        loader.seed(seed)
        found = [list(loader), list(loader)]
        loader.seed(seed)
        assert list(loader) == found[0]
        return found

    first = epochs(3)
    assert first == epochs(3) != epochs(4)
    assert first[0] != first[1]
    loader = DataLoader2[int](numbers(2))
    for bad in (-1, 1 << 64):
        with pytest.raises(ValueError, match=rf"^Expected an uint64 seed, but got {bad}\.$"):
            loader.seed(bad)
    with pytest.raises(TypeError):
        loader.seed(1.5)  # type: ignore[arg-type]
    loader.seed((1 << 64) - 1)
    loader.seed(np.int64(7))  # type: ignore[arg-type]
    assert loader.state_dict()["randomness_state"][0] == 7


def test_without_a_seed_epochs_follow_the_global_generator() -> None:
    """It is read, and not advanced: two epochs have the same order until other code draws from it."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = DataLoader2[int](numbers(20).shuffle(), reading_service=InProcessReadingService())
    found = [list(loader), list(loader)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    found.append(list(loader))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_limit_pause_and_resume(prefetch: int) -> None:
    """A limit pauses without ending the epoch; after `resume` it holds again, and counts from 0."""
    loader = DataLoader2[int](numbers(8), reading_service=InProcessReadingService(prefetch))
    iterator = iter(loader)
    iterator.limit(3)
    assert list(iterator) == [0, 1, 2]
    assert list(iterator) == []
    iterator.resume()
    assert list(iterator) == [3, 4, 5]
    iterator.limit(None)
    iterator.resume()
    assert next(iterator) == 6
    iterator._pause()
    assert list(iterator) == []
    iterator.resume()
    assert list(iterator) == [7]
    with pytest.warns(UserWarning, match="Resume is called when `DataLoader2` is not paused"):
        iterator.resume()
    loader.shutdown()


def test_a_service_that_cannot_pause() -> None:
    """The documented warnings are given; reading continues."""
    loader = DataLoader2[int](numbers(3), reading_service=Recording())
    iterator = iter(loader)
    with pytest.warns(UserWarning, match=r"^ReadingService doesn't support `limit`\.$"):
        iterator.limit(1)
    with pytest.warns(UserWarning, match=r"^ReadingService doesn't support `pause`\.$"):
        next(iterator)
    with pytest.warns(UserWarning, match=r"^ReadingService doesn't support `resume`\.$"):
        iterator.resume()
    iterator.limit_threshold = None
    assert list(iterator) == [1, 2]


def test_the_iterator_gives_the_graphs_attributes() -> None:
    """Attributes of the graph's own iterator can be read; an unknown attribute is an AttributeError."""
    loader = DataLoader2[int](numbers(3))
    iterator: Any = iter(loader)
    assert iterator.gi_frame is not None
    with pytest.raises(AttributeError):
        _ = iterator.nonsense


def test_functions_of_the_service_in_this_process() -> None:
    """`init_fn` changes the graph once, `reset_fn` that of each epoch, also after another service's function."""
    loader = DataLoader2[int](numbers(2), reading_service=InProcessReadingService(0, _once, _each_time))
    assert [list(loader), list(loader)] == [[0, 4], [0, 4]]
    assert Recording.calls == [WorkerInfo(1, 0)] * 3
    loader.shutdown()
    services = [InProcessReadingService(reset_fn=_each_time) for _ in range(2)]
    with DataLoader2[int](numbers(2), reading_service=SequentialReadingService(*services)) as loader:
        assert [list(loader), list(loader)] == [[0, 4], [0, 4]]


def test_services_in_a_row() -> None:
    """Services begin in order and end in reverse; states are in order, with a warning for a missing state."""
    service = SequentialReadingService(Saving("A"), Recording("B"), Saving("C"))
    loader = DataLoader2[int](numbers(1), reading_service=service)
    list(loader)
    with pytest.warns(UserWarning, match="Recording has no checkpoint"):
        state = loader.state_dict()
    loader.shutdown()
    assert Recording.calls == [
        *("initializeA", "initializeB", "initializeC", "beginA", "beginB", "beginC", "endC", "endB", "endA"),
        *("checkpointA", "checkpointC", "endC", "endB", "endA", "finalizeC", "finalizeB", "finalizeA"),
    ]
    del loader
    Recording.calls.clear()
    loader = DataLoader2.from_state(state, service)
    with pytest.warns(UserWarning, match="Recording has no restore"):
        assert list(loader) == [0]
    assert Recording.calls[:3] == [("restoreA", b"stateA"), "initializeB", ("restoreC", b"stateC")]


class Failing(Recording):
    """A service whose first ends fail."""

    failures: ClassVar[int] = 0

    def finalize_iteration(self) -> None:
        self.finalize()

    def finalize(self) -> None:
        if Failing.failures:
            Failing.failures -= 1
            raise ConnectionError("end")


def test_a_service_that_cannot_end() -> None:
    """Its error is raised, and the other services end."""
    service = SequentialReadingService(Recording("A"), Failing("B"))
    loader = DataLoader2[int](numbers(2), reading_service=service)
    next(iter(loader))
    Failing.failures = 2  # and none in the finalizers
    with pytest.raises(ConnectionError):
        loader.shutdown()
    assert Recording.calls[-1] == "finalizeA"


class Pausing(Recording):
    """A service with pauses and limits, each of which returns a function."""

    def _pause(self, pause_fn: Any) -> Any:
        assert pause_fn is None
        return self._recorded

    def _resume(self, resume_fn: Any) -> Any:
        assert resume_fn is None
        return self._recorded

    def _limit(self, num_batches: int | None, limit_fn: Any) -> Any:
        assert limit_fn is None
        return self._recorded

    def _recorded(self, datapipe: Any, *numbers: Any) -> Any:
        self.calls.append(numbers)
        return datapipe


class Stoppable(Seeded):
    """A user's part that can pause."""

    def pause(self) -> None:
        Recording.calls.append("pause")

    def resume(self) -> None:
        Recording.calls.append("resume")


def test_pauses_go_through_services_in_a_row() -> None:
    """Each service that can pause gets the function of the service before it; the loader calls the last function.
    All parts of the graph that can pause are paused.
    """
    loader = DataLoader2[Any](
        Stoppable(numbers(4)),
        reading_service=SequentialReadingService(Recording(), Pausing(), InProcessReadingService(1)),
    )
    iterator = iter(loader)
    Recording.calls.clear()
    iterator.limit(2)
    assert [x for x, _ in iterator] == [0, 1]
    iterator.resume()
    assert [x for x, _ in iterator] == [2, 3]
    assert Recording.calls[:5] == [(2,), "pause", (), "resume", ()]
    loader.shutdown()


def test_a_state_of_a_service_that_cannot_restore() -> None:
    """The documented TypeError."""
    loader = DataLoader2[int](numbers(1), reading_service=Saving())
    state = loader.state_dict()
    assert state["reading_service_state"] == b"state"
    other = DataLoader2.from_state(state, Recording())
    with pytest.raises(TypeError, match=r"^Cannot restore from non-checkpointable reading service$"):
        iter(other)


def test_a_pause_ends_with_its_epoch() -> None:
    """The next epoch is read from its beginning."""
    loader = DataLoader2[int](numbers(4), reading_service=InProcessReadingService(2))
    iterator = iter(loader)
    iterator.limit(3)
    assert list(iterator) == [0, 1, 2]
    assert list(loader) == [0, 1, 2, 3]
    loader.shutdown()


BEGAN, GO = threading.Event(), threading.Event()


def waits_for_go(number: int) -> int:
    BEGAN.set()
    GO.wait(PATIENCE_S)
    return number


def test_a_child_that_is_forked_while_a_thread_reads() -> None:
    """It reads its copy of the loader, and need not wait for a thread that only its parent has."""
    with DataLoader2[int](numbers(3).map(waits_for_go)) as loader, ThreadPoolExecutor(1) as threads:
        reading = threads.submit(list, loader)
        assert BEGAN.wait(PATIENCE_S)

        def read() -> None:
            GO.set()
            assert list(loader) == [0, 1, 2]

        try:
            fork(read).wait()
        finally:
            GO.set()
        assert reading.result() == [0, 1, 2]


@pytest.mark.parametrize("name", ["stats", "metrics", "progress", "trace", "dashboard", "explain"])
def test_what_was_removed(name: str) -> None:
    """The error names what takes its place."""
    loader = DataLoader2[Any](numbers(3))
    with pytest.raises(AttributeError, match=rf"DataLoader\(graph, .* has {name}\(\)"):
        getattr(loader, name)
    assert not hasattr(loader, "other")
