"""`concurrency`: blocking map datasets whose samples several threads of a worker fetch, over all its batches."""

from __future__ import annotations

import asyncio
import threading
import warnings
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader, Recovery, sample_rng
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers
from tests.helpers.faulty import Faults, Faulty
from tests.helpers.running import BOTH, KINDS, collect, outcomes, run_async
from tests.integration.concurrency.test_samples_in_flight import collect as collect_with

WORKERS = [0, 1, 2]
variable: ContextVar[int] = ContextVar("variable", default=-1)


class Barrier(Dataset[Any]):
    """No sample is done before `together` threads of its process read a sample."""

    def __init__(self, n: int, together: int) -> None:
        self.n = n
        self.together = together
        self.barrier: threading.Barrier | None = None
        self.lock: Any = None

    def __len__(self) -> int:
        return self.n

    def __getstate__(self) -> dict[str, Any]:
        return {"n": self.n, "together": self.together, "barrier": None, "lock": None}

    def meet(self) -> None:
        with _lock:
            if self.barrier is None:
                self.barrier = threading.Barrier(self.together)
        self.barrier.wait(30)

    def __getitem__(self, index: int) -> int:
        self.meet()
        return index


_lock = threading.Lock()


class BarrierBatches(Barrier):
    def __getitems__(self, indices: list[int]) -> list[int]:
        self.meet()
        return list(indices)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("size", [1, 2, 16, None])
def test_so_many_threads_are_at_it(kind: str, workers: int, size: int | None) -> None:
    """Eight threads meet, over the number of batches that hold eight samples; the order is the sampler's."""
    n = 64 * max(1, workers)
    got = collect(kind, Barrier(n, 8), batch_size=size, num_workers=workers, concurrency=8)
    assert [int(i) for batch in got for i in torch.as_tensor(batch).reshape(-1)] == list(range(n))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("view", [False, True])
def test_whole_batches_have_a_thread_each(kind: str, workers: int, view: bool) -> None:
    """`__getitems__` of four batches runs at a time."""
    dataset: Any = BarrierBatches(32, 4)
    got = collect(
        kind,
        Subset(dataset, list(range(32))) if view else dataset,
        batch_size=4,
        num_workers=workers,
        concurrency=4,
    )
    assert torch.cat(got).tolist() == list(range(32))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_batches_are_those_without(kind: str, workers: int) -> None:
    """Batches with threads are torch's: also without batching, shuffled, and with `drop_last`."""
    for options in ({"batch_size": 4, "shuffle": True}, {"batch_size": None}, {"batch_size": 3, "drop_last": True}):
        got = collect(kind, Numbers(20), num_workers=workers, concurrency=3, **options)
        assert_same(got, collect("torch", Numbers(20), **options))


class Draws(Dataset[Any]):
    def __init__(self, *, globally: bool = False) -> None:
        self.globally = globally

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        if self.globally:
            return torch.rand(())
        return torch.rand((), generator=sample_rng().torch) + sample_rng().random.random()


class DrawsTogether(Draws):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Draws.__getitem__(self, index) for index in indices]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dataset", [Draws(), DrawsTogether()], ids=["samples", "batches"])
def test_seeded_samples_have_generators_of_their_own(kind: str, dataset: Any) -> None:
    """`sample_rng` gives the numbers that it gives without threads, at any number of workers."""
    options: dict[str, Any] = {"batch_size": 4, "seed": 9, "shuffle": True}
    expected = collect_with(kind, dataset, **options)
    for workers in WORKERS:
        assert_same(collect_with(kind, dataset, num_workers=workers, concurrency=8, **options), expected)


def test_global_generators_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A worker in seeded mode reports it once, as with async datasets. (Warnings are errors here, in the forked worker,
    too: this warning is written to the log, and no batch is lost.)
    """
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    with DataLoader[Any](Draws(globally=True), batch_size=4, seed=1, concurrency=2, **options) as loader:
        assert len(list(loader)) == len(loader)
    assert caplog.text.count("drew from the process-global generators") == 1


class Uses(Dataset[Any]):
    """Each sample sets a context variable, and is its value before and after, and the worker's id."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        before = variable.get()
        variable.set(index)
        info = get_worker_info()
        return torch.tensor([before, variable.get(), -1 if info is None else info.id])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_context_variables_and_worker_info(kind: str, workers: int) -> None:
    """A sample does not see the variable that another sample set; `get_worker_info` gives the worker's id."""
    got = torch.cat(collect(kind, Uses(), batch_size=4, num_workers=workers, concurrency=3))
    assert got[:, 0].tolist() == [-1] * 24
    assert got[:, 1].tolist() == list(range(24))
    expected = [index // 4 % workers if workers else -1 for index in range(24)]
    assert got[:, 2].tolist() == expected


class Bad(Dataset[Any]):
    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise FileNotFoundError(f"sample {index}")
        return index


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_comes_in_its_place(kind: str, workers: int) -> None:
    """The error has a note of its sample; the batches before and after it are delivered."""
    got = outcomes(kind, Bad(9, 20), batch_size=4, num_workers=workers, concurrency=3)
    kinds = [each[0] if isinstance(each, tuple) else each.tolist() for each in got]
    good = [[i, i + 1, i + 2, i + 3] for i in range(0, 24, 4)]
    assert kinds == [*good[:2], FileNotFoundError, *good[3:5], FileNotFoundError]
    with (
        pytest.raises(FileNotFoundError) as raised,
        DataLoader[Any](Bad(9), batch_size=4, num_workers=workers, concurrency=3) as loader,
    ):
        list(loader)
    assert any("sample index 9 (item 1 of the batch)" in note for note in raised.value.__notes__)


def negative(index: int, error: Exception) -> int:
    return -index


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_raise_are_left_out_or_replaced(kind: str, workers: int) -> None:
    """`on_error` gives the batches that it gives without threads, and records in the order of the batch."""
    options: dict[str, Any] = {"batch_size": 4, "seed": 4, "num_workers": workers}
    got = collect_with(kind, Bad(1, 2, 9), on_error="skip", concurrency=4, **options)
    assert [batch.tolist() for batch in got[:3]] == [[0, 3], [4, 5, 6, 7], [8, 10, 11]]
    refill: dict[str, Any] = {"on_error": "refill"}
    assert_same(
        collect_with(kind, Bad(1, 2, 9), concurrency=4, **refill, **options),
        collect_with(kind, Bad(1, 2, 9), **refill, **options),
    )
    got = collect_with(kind, Bad(5), on_error=negative, concurrency=4, **options)
    assert got[1].tolist() == [4, -5, 6, 7]
    with DataLoader[Any](Bad(1, 2, 9), on_error="skip", concurrency=4, **options) as loader:
        list(loader)
        assert [record.index for record in loader.skipped_samples] == [1, 2, 9]


class OnlyWhole(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 5 in indices:
            raise OSError("no batch")
        return list(indices)


class Whole(Dataset[Any]):
    """A dataset that has only `__getitems__`."""

    def __getitems__(self, indices: Any) -> list[int]:
        return list(indices)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_sampler_that_gives_iterators(workers: int) -> None:
    """An iterator can be read only once; ``__getitems__`` nevertheless gets all its indices."""
    batches = [iter([0, 1]), iter([2]), iter([3, 4, 5])]
    got = collect("sync", Whole(), batch_sampler=batches, num_workers=workers, concurrency=2)
    assert [batch.tolist() for batch in got] == [[0, 1], [2], [3, 4, 5]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raises_as_a_whole(workers: int) -> None:
    """Which sample raised is unknown, so that its error fails the batch, whatever `on_error` says."""
    with DataLoader[Any](OnlyWhole(), batch_size=2, num_workers=workers, on_error="skip", concurrency=2) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="no batch"):
            next(batches)
        assert next(batches).tolist() == [6, 7]
        assert not loader.skipped_samples


class Sticks(Dataset[Any]):
    """Samples 3 and 4 are stuck until `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Barrier(3), threading.Event()
        self.freed: list[bool] = []
        self.late: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if self.go.is_set():
            self.late.append(index)
        if index in (3, 4):
            self.begun.wait(20)
            self.freed.append(self.go.wait(60))
        return index

    def let_go(self) -> None:
        """Check that closing the loader waited for neither thread, and that they read no sample afterwards."""
        self.go.set()
        for thread in threading.enumerate():
            if thread.name.startswith("asyncloader-read"):
                thread.join(20)
        assert (self.freed, self.late) == ([True, True], [])


def test_closing_does_not_wait_for_stuck_threads() -> None:
    """Without workers the facade leaves the threads behind; they finish their samples, and read no other."""
    dataset = Sticks()
    with DataLoader[Any](dataset, batch_size=3, concurrency=2) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2]
        dataset.begun.wait(20)
    dataset.let_go()


def test_closing_the_async_loader_does_not_wait_for_stuck_threads() -> None:
    """Closing the async loader leaves the stuck threads behind, too."""
    dataset = Sticks()

    async def run() -> None:
        async with AsyncDataLoader[Any](dataset, batch_size=3, concurrency=2) as loader:
            batches = aiter(loader)
            assert (await anext(batches)).tolist() == [0, 1, 2]
            await asyncio.to_thread(dataset.begun.wait, 20)

    run_async(run())
    dataset.let_go()


class SticksForEver(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 3:
            threading.Event().wait()
        return index


@pytest.mark.parametrize("kind", BOTH)
def test_workers_with_a_stuck_thread_end(kind: str) -> None:
    """Closing in the middle of an epoch ends a worker whose thread is stuck, without a warning."""

    async def run() -> None:
        async with AsyncDataLoader[Any](SticksForEver(), num_workers=1, concurrency=2) as loader:
            async for _ in loader:
                break

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind == "sync":
            with DataLoader[Any](SticksForEver(), num_workers=1, concurrency=2) as loader:
                next(iter(loader))
        else:
            run_async(run())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_a_worker_with_a_stuck_thread_is_replaced(kind: str, tmp_path: Path) -> None:
    """After `worker_timeout` the worker's tasks are done again, each alone, with the batches of a run without
    faults.
    """
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "seed": 5, "concurrency": 3}
    expected = collect_with(kind, Faulty(24, Faults(Path("/"), {})), batch_size=2, seed=5)
    for way in ("hang", "SIGKILL"):
        folder = tmp_path / way
        folder.mkdir()
        got = collect_with(
            kind, SamplesOf(Faulty(24, Faults(folder, {9: way}))), recovery=Recovery(worker_timeout=1.0), **options
        )
        assert [batch["index"].tolist() for batch in got] == [batch["index"].tolist() for batch in expected]
        assert len(list(folder.iterdir())) == 1


class SamplesOf(Dataset[Any]):
    """The indices of another dataset's samples, with that dataset's faults."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.dataset.faults.strike(index)
        return {"index": index}
