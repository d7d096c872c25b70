"""MultiProcessingReadingService when something fails: errors, deaths, forks, slow workers, ends."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterDataPipe

from asyncloader.dataloader2 import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
)
from asyncloader.dataloader2.datapipes.read_ahead import ReadAhead
from asyncloader.dataloader2.utils import WorkerInfo
from asyncloader.errors import LoaderClosed, StateError, WorkerDied
from tests.dataloader2.parts import (
    MP,
    OnlyHere,
    Seeded,
    Unreadable,
    dies_at_5,
    double,
    drawn,
    fails_at_5,
    hangs_at_3,
    numbers,
    process,
)
from tests.pairwise import quickly

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle:UserWarning")
@pytest.mark.parametrize("method", quickly(["fork", "spawn"], "fork"))
def test_functions_that_pickle_refuses(method: str) -> None:
    """With cloudpickle, local functions reach spawned workers, too."""

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
    if x == 7:
        raise ExceptionGroup("of a class that takes two", [ValueError(x)])
    return x


@pytest.mark.parametrize(
    ("start", "words"), [(0, "LocalError: of a class"), (4, "Two.* of a class"), (6, "Group: of a class")]
)
@pytest.mark.parametrize("dispatched", [False, True])
def test_errors_of_odd_classes(start: int, words: str, dispatched: bool) -> None:
    """A RuntimeError with their text is raised."""
    graph = numbers(6, start).map(_fails_oddly)
    graph = graph.sharding_round_robin_dispatch(MP) if dispatched else graph.sharding_filter()
    loader = DataLoader2[int](graph, reading_service=MultiProcessingReadingService(2))
    with pytest.raises(RuntimeError, match=rf"(?s)^Caught .*Original .*Traceback .*{words}"):
        list(loader)


@pytest.mark.parametrize("here", [False, True])
def test_a_forked_process_leaves_them_alone(here: bool) -> None:
    """A forked child may end its copy of the loader, read it, or exit: the parent's processes go on."""
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


def test_a_slow_worker_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for even if a thread waits for its item: workers are ended before that thread."""
    waits: list[float] = []
    monkeypatch.setattr(ReadAhead, "stop", lambda self, seconds=0: waits.append(self._thread.join(60) or 0))
    loader = DataLoader2[int](
        OnlyHere(numbers(8).sharding_filter().map(hangs_at_3)), reading_service=MultiProcessingReadingService(2)
    )
    assert next(iter(loader)) == 0
    loader.shutdown()
    assert waits


def test_a_dropped_cycle_is_ended_once() -> None:
    """The finalizers of the loader and of its service run in any order, each in a thread."""
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


@pytest.mark.parametrize(
    ("graph", "where"),
    [
        (numbers(10).sharding_filter().map(fails_at_5), "worker process 1"),
        (numbers(10).sharding_round_robin_dispatch(MP).map(fails_at_5), "worker process 1"),
        (numbers(10).map(fails_at_5).sharding_round_robin_dispatch(MP), "dispatching process 0"),
    ],
)
def test_errors(graph: Any, where: str) -> None:
    """The error has its type and the documented message, and shuts the loader down."""
    loader = DataLoader2[int](graph, reading_service=MultiProcessingReadingService(2))
    with pytest.raises(ValueError, match=rf"Caught ValueError in {where}\.\nOriginal Traceback ") as caught:
        list(loader)
    assert str(caught.value).startswith("Caught ValueError in worker process 1.\nOriginal Traceback")
    assert "five is right out" in str(caught.value)
    with pytest.raises(RuntimeError, match="already been shut down"):
        iter(loader)


def test_a_loader_that_failed_is_no_cycle() -> None:
    """It is freed at once after an error of a worker."""
    gc.collect()
    gc.disable()
    try:
        loader = DataLoader2[int](numbers(6).map(fails_at_5), reading_service=MultiProcessingReadingService(1))
        with pytest.raises(ValueError, match="five"):
            list(loader)
        freed = weakref.ref(loader)
        del loader
        assert freed() is None
    finally:
        gc.enable()


def test_items_before_an_error() -> None:
    """They are given before the error, in the order without workers."""
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
    """It is raised like any error of that worker."""
    loader = DataLoader2[int](numbers(4), reading_service=MultiProcessingReadingService(2, worker_init_fn=_refuses))
    with pytest.raises(LookupError, match="Caught LookupError in worker process 0"):
        list(loader)


def _stops(*_: Any) -> Any:
    raise StopIteration("cannot begin")


@pytest.mark.parametrize(
    ("graph", "service"),
    [
        (numbers(4), MultiProcessingReadingService(1, worker_init_fn=_stops)),
        (numbers(4), MultiProcessingReadingService(1, worker_reset_fn=_stops)),
        (Unreadable(StopIteration), MultiProcessingReadingService(1)),
        (Unreadable(StopIteration), InProcessReadingService(2)),
    ],
    ids=["init", "reset", "worker", "prefetch"],
)
def test_an_epoch_that_stops_before_it_begins(graph: Any, service: Any) -> None:
    """StopIteration of the user's code is an error, and no epoch without items."""
    with (
        DataLoader2[int](graph, reading_service=service) as loader,
        pytest.raises(RuntimeError, match="raised StopIteration: cannot begin"),
    ):
        list(loader)


@pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning")
@settings(max_examples=8, deadline=None)
@given(kills=st.lists(st.integers(0, 23), min_size=1, max_size=3), workers=st.integers(1, 3))
def test_workers_that_are_killed(kills: list[int], workers: int) -> None:
    """Each is replaced, and its replacement reads its part again: the items are those of undisturbed epochs, with
    the same random numbers. A worker may also be killed after the last item of the first epoch.
    """
    graph = Seeded(numbers(12).shuffle().sharding_filter()).map(drawn).map(process)

    def items(kills: list[int]) -> Iterator[Any]:
        with DataLoader2[Any](graph, reading_service=MultiProcessingReadingService(workers, "fork")) as loader:
            loader.seed(4)
            for epoch in range(2):
                for position, (item, pid) in enumerate(loader):
                    if 12 * epoch + position in kills:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    yield item

    assert list(items(kills)) == list(items([]))


class _ShorterAgain(IterDataPipe[Any]):
    """A part that has fewer items when it is read again."""

    def __init__(self, read: Path) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        again = self.read.exists()
        self.read.touch()
        for x in range(2 if again else 20):
            yield x, os.getpid()


@pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning")
def test_a_replacement_that_finds_less(tmp_path: Path) -> None:
    """An error reports the number of items that it found."""
    source: Any = _ShorterAgain(tmp_path / "read")
    loader = DataLoader2[Any](source, reading_service=MultiProcessingReadingService(1, None, 1, 0))
    iterator = iter(loader)
    pids = [next(iterator)[1] for _ in range(5)]
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(
        StateError, match=r"the graph ended after 2 items for the replacement of a worker that had given"
    ):
        list(iterator)


def test_a_replacement_is_reported() -> None:
    """A RuntimeWarning reports it, and the condition under which no item is lost."""
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
def test_a_worker_that_is_not_replaced(tmp_path: Path, dispatched: bool, why: str) -> None:
    """WorkerDied gives the reason and advice. The test follows the advice: it removes the cause and reads the rest."""
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
    """Kills its process at item 5 while a file exists."""

    def __init__(self, bomb: Path) -> None:
        self.bomb = bomb

    def __call__(self, x: int) -> int:
        if x == 5 and self.bomb.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_dispatching_process_that_dies() -> None:
    """WorkerDied is raised, whether it kills itself or is killed between two epochs."""
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


def test_processes_end_with_their_parent() -> None:
    """A main process that is killed leaves neither workers nor the dispatching process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        loader = DataLoader2[int](
            numbers(10**6).sharding_round_robin_dispatch(MP), reading_service=MultiProcessingReadingService(2, "fork")
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
