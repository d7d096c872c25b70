"""Lives of the facade's iterators: break, close, `with`, persistent workers, and torch's promises about `_iterator`."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader, LoaderClosed
from asyncloader.base.bridge import Bridge
from asyncloader.workers.pool import WorkerPool
from tests.helpers.datasets import AsyncNumbers, Numbers, Pids
from tests.helpers.running import PATIENCE_S, Deaths, await_our_threads
from tests.helpers.sealed import Sealed


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncloader")]


@pytest.mark.thorough
def test_break_frees_the_workers() -> None:
    """Leaving the loop with `break` ends the processes and the private loop's thread by themselves, while the loader
    lives on. The next iterator waits for that before it forks, and so does `close()`.
    """
    loader = DataLoader[Any](Pids(100), num_workers=2)
    deaths = Deaths([])
    for batch in loader:
        deaths = Deaths([int(batch[0])])
        break
    deaths.wait()
    await_our_threads()
    for _ in range(2):
        for batch in loader:
            deaths = Deaths([int(batch[0])])
            break
        batches = iter(loader)
        assert deaths.ended()
        deaths.close()
        assert our_threads() == ["asyncloader-loop"]
        del batches
    loader.close()
    assert our_threads() == []


def test_the_workers_of_a_dropped_iterator_are_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """No worker is replaced, although a busy loop thread sees the workers' exit before it can end the epoch."""
    loader = DataLoader[Any](Numbers(100), num_workers=2, seed=1)
    batches: Any = iter(loader)
    next(batches)
    busy = threading.Event()
    batches._bridge.call_soon(busy.wait)
    del batches  # waits until the workers have exited
    busy.set()
    loader.close()
    assert not [record for record in caplog.records if "is replaced" in record.message]


def test_exhaustion_ends_the_workers_before_the_loop_does() -> None:
    """When a `for` loop is over the processes have exited, although the iterator still exists."""
    batches = iter(DataLoader[Any](Numbers(5), num_workers=2))
    assert len(list(batches)) == 5
    assert not multiprocessing.active_children()
    assert our_threads() == []
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_and_close(workers: int) -> None:
    """`with` and `close()` return when the processes have exited; closing twice is allowed; a closed loader raises."""
    with DataLoader[Any](Pids(50), num_workers=workers, persistent_workers=bool(workers)) as loader:
        batches = iter(loader)
        deaths = Deaths([int(next(batches)[0])] if workers else [])
    assert deaths.ended()
    deaths.close()
    loader.close()
    with pytest.raises(LoaderClosed, match="closed; make a new loader"):
        iter(loader)
    if workers:
        with pytest.raises(LoaderClosed):
            next(batches)
    assert our_threads() == []


class Held:
    """A batch sampler whose first look waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[list[int]]:
        self.reached.set()
        assert self.go.wait(PATIENCE_S)
        return iter([[0, 1], [2]])


def make_iterator(loader: DataLoader[Any] | AsyncDataLoader[Any]) -> Any:
    """The loader's iterator; an async loader's is made in a loop of its own."""
    if isinstance(loader, DataLoader):
        return iter(loader)

    async def begin() -> Any:
        return aiter(loader)

    return asyncio.run(begin())


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_close_by_another_thread_while_an_iterator_is_made(kind: Any, workers: int, persistent: bool) -> None:
    """`iter` raises LoaderClosed, instead of an iterator that no call would end and that may wait for ever."""
    sampler = Held()
    loader = kind(Numbers(3), batch_sampler=sampler, num_workers=workers, persistent_workers=persistent)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(make_iterator, loader)
        assert sampler.reached.wait(PATIENCE_S)
        loader.close()
        sampler.go.set()
        with pytest.raises(LoaderClosed, match="is closed; make a new loader"):
            making.result(PATIENCE_S)
        del making


def test_two_threads_in_one_iterator() -> None:
    """The second gets an error, and the first all batches. One after the other they may take turns."""
    held = threading.Event()
    dataset = Sealed(lambda index: index + (not held.wait(PATIENCE_S)), 3)
    with DataLoader[Any](dataset, num_workers=1, workers="threads") as loader, ThreadPoolExecutor(1) as threads:
        batches: Any = iter(loader)
        first = threads.submit(next, batches)
        while batches._taker is None:
            pass
        with pytest.raises(RuntimeError, match=r"while another thread is in it: .*under a lock"):
            next(batches)
        held.set()
        assert [int(first.result(PATIENCE_S)), *map(int, batches)] == [0, 1, 2]


def test_two_threads_close_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the first still waits for the loop, only the loop's thread takes the workers out of the loop."""
    loader = DataLoader[Any](Numbers(40), num_workers=1, workers="threads")
    batches: Any = iter(loader)
    bridge = batches._bridge
    second = threading.Event()
    safe: list[bool] = []

    def detach(pool: WorkerPool, original: Any = WorkerPool.detach) -> None:
        safe.append(bridge.in_loop_thread or pool._loop is None)
        second.set()
        original(pool)

    def run(self: Bridge, coroutine: Any, original: Any = Bridge.run) -> Any:
        if threading.current_thread() is threading.main_thread():
            second.set()
        return original(self, coroutine)

    monkeypatch.setattr(WorkerPool, "detach", detach)
    monkeypatch.setattr(Bridge, "run", run)
    bridge.call_soon(second.wait, PATIENCE_S)  # the loop's thread is busy until both have come
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(batches._shutdown_workers)
        while not batches._shutdown:
            pass
        loader.close()
        first.result(PATIENCE_S)
    assert len(safe) > 1
    assert all(safe)


def test_persistent_workers_are_one_iterator() -> None:
    """`_iterator` is the only iterator, `iter()` resets and returns it, and the processes stay, as in torch."""
    for make in (torch.utils.data.DataLoader, DataLoader):
        loader = make(Pids(10), num_workers=2, persistent_workers=True)
        assert loader._iterator is None
        first = iter(loader)
        assert loader._iterator is first
        pids = {int(batch[0]) for batch in first}
        assert iter(loader) is first
        assert {int(batch[0]) for batch in loader} == pids
        next(iter(loader))
        assert len(list(loader)) == 10
        assert loader._iterator is first
        deaths = Deaths(pids)
        loader._iterator = None
        del first
        gc.collect()
        deaths.wait()


def test_iterator_that_the_loop_collects() -> None:
    """An iterator in a cycle may be collected in the loop's own thread. Batches that were ready are freed, too: no
    descriptor of a batch in a segment of its own stays open.
    """
    before = set(Path("/proc/self/fd").iterdir())
    loader = DataLoader[Any](Pages(), num_workers=1, prefetch_factor=3)
    batches: Any = iter(loader)
    next(batches)
    batches._queue.wait(None)  # a batch is ready that is never taken
    (loop,) = (thread for thread in threading.enumerate() if thread.name == "asyncloader-loop")
    gc.disable()
    try:
        cycle: list[Any] = [batches]
        cycle.append(cycle)
        del batches, cycle
        loader._asyncloader_state.bridge.call_soon(gc.collect)
        loop.join()
    finally:
        gc.enable()
    loader.close()
    for thread in threading.enumerate():
        if thread.name == "asyncloader-stop":
            thread.join()
    assert set(Path("/proc/self/fd").iterdir()) <= before


class Pages(Dataset[Any]):
    """Each sample is larger than the sample before, and than a slot."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.zeros((index + 1) << 18)


def test_async_dataset_without_workers_leaves_no_thread() -> None:
    """The private loop that serves an async dataset ends with its iterator: exhausted, dropped or closed."""
    loader = DataLoader[Any](AsyncNumbers(5))
    assert len(list(loader)) == 5
    for _ in loader:
        break
    await_our_threads()
    batches = iter(loader)
    next(batches)
    loader.close()
    assert our_threads() == []
    del batches
