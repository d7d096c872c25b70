"""Requirements of frameworks on a DataLoader, point by point: its iteration.

Points 10 to 15, after those of `test_construction.py`. Each test repeats the actions of the frameworks that its
docstring names.
"""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from asyncloader import AsyncDataLoader, DataLoader, StatefulDataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers, Pids
from tests.helpers.frameworks import epoch
from tests.helpers.running import BOTH, assert_like_torch, await_our_threads, collect, outcomes, run_async

BOTH_CLASSES = pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
Torchs = torch.utils.data.DataLoader


def alive() -> list[Any]:
    """The child processes, and threads of the private loop, that a loader may leave behind."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("asyncloader")]
    return [*multiprocessing.active_children(), *threads]


def await_end() -> None:
    """Wait for the loaders' threads; then no process may be left."""
    await_our_threads()
    assert not alive()


# ------------------------------------------------------------------------------------------- 10


@pytest.mark.parametrize("workers", [0, 2])
def test_point_10_iterators_are_of_torchs_kind(workers: int) -> None:
    """An iterator derives from torch's base; torch's `_shutdown_workers` works, also twice (Lightning's end)."""
    loader = DataLoader[Any](Numbers(50), num_workers=workers)
    batches: Any = iter(loader)
    assert issubclass(type(batches), _BaseDataLoaderIter)
    next(batches)
    for _ in range(2):
        batches._shutdown_workers()
        assert not alive()


def test_point_10_asking_for_an_async_iterator_is_no_error() -> None:
    """`tqdm.auto` makes an async iterator of any object with `__aiter__`, and reads the loader by a plain ``for``."""
    loader = DataLoader[Any](Numbers(4))
    batches: Any = aiter(loader)
    assert len(list(loader)) == 4
    with pytest.raises(TypeError, match="read with a plain 'for'"):
        run_async(anext(batches))


def test_point_10_workers_are_known_before_the_first_batch() -> None:
    """`iterator._workers` are running processes, with pids, as soon as the iterator exists."""
    batches: Any = iter(DataLoader[Any](Pids(50), num_workers=2))
    pids = [worker.pid for worker in batches._workers]
    assert sorted(pids) == sorted(process.pid or 0 for process in multiprocessing.active_children())
    assert {int(next(batches)) for _ in range(10)} == set(pids)


@pytest.mark.parametrize("workers", [0, 2])
def test_point_10_iterator_attribute_is_none(workers: int) -> None:
    """`loader._iterator` is None before, while and after iterating without persistent workers (Composer's demand)."""
    loader = DataLoader[Any](Numbers(5), num_workers=workers)
    assert loader._iterator is None
    for _ in loader:
        assert loader._iterator is None
    assert loader._iterator is None


@pytest.mark.parametrize("persistent", [False, True])
def test_point_10_a_dropped_iterator_ends_its_workers(persistent: bool) -> None:
    """Processes and thread end with the last reference, not when garbage is collected (Lightning's end)."""
    loader = DataLoader[Any](Numbers(50), num_workers=2, persistent_workers=persistent)
    gc.disable()
    try:
        for taken in (0, 1, 5):
            batches = iter(loader)
            for _ in range(taken):
                next(batches)
            assert len(alive()) == 3
            loader._iterator = None
            del batches
            await_end()
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------- 11


def test_point_11_several_iterators_live_side_by_side() -> None:
    """Each iterator has workers and batches of its own; ending an iterator does not touch the others."""
    expected = collect("torch", Numbers(12), batch_size=2)
    loader = DataLoader[Any](Numbers(12), batch_size=2, num_workers=1)
    one, two, three = iter(loader), iter(loader), iter(loader)
    got = [[next(batches)] for batches in (one, two, three)]
    del two
    assert_same(got[0] + list(one), expected)
    assert_same(got[2] + list(three), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_point_11_composer_contract(workers: int) -> None:
    """`_iterator` is None when a loader is handed in; a resumed run abandons an iterator for each epoch before it."""
    mine, theirs = (
        make(Numbers(30), batch_size=4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(3))
        for make in (DataLoader[Any], Torchs[Any])
    )
    after = []
    for loader in (mine, theirs):
        assert isinstance(loader, Torchs)
        assert loader._iterator is None
        for _ in range(4):
            for _ in loader:
                break
            assert loader._iterator is None
        await_end()
        after.append(list(loader))
    assert_same(after[0], after[1])


# ------------------------------------------------------------------------------------------- 12


def epoch_set_late(loader: Any, sampler: DistributedSampler[Any]) -> list[Any]:
    """One epoch's batches, with `set_epoch` between `iter()` and the first batch."""
    if not isinstance(loader, AsyncDataLoader):
        batches = iter(loader)
        sampler.set_epoch(1)
        return list(batches)

    async def run() -> list[Any]:
        batches = aiter(loader)
        sampler.set_epoch(1)
        return [batch async for batch in batches]

    return run_async(run())


@BOTH_CLASSES
@pytest.mark.parametrize(
    ("options", "noticed"),
    [
        ({"num_workers": 0, "batch_size": 2}, True),
        ({"num_workers": 0, "batch_size": None}, False),
        ({"num_workers": 2, "batch_size": 2}, False),
        ({"num_workers": 2, "batch_size": None}, False),
    ],
    ids=str,
)
def test_point_12_set_epoch_after_iter(make: Any, options: dict[str, Any], noticed: bool) -> None:
    """Like torch, `iter()` takes the sampler's first indices for the workers, so a later `set_epoch` holds for the next
    epoch; without workers, and with batching, the sampler is first read for the first batch.
    """
    got: dict[Any, list[Any]] = {}
    for kind in (make, Torchs):
        sampler: DistributedSampler[Any] = DistributedSampler(Numbers(16), num_replicas=2, rank=0)
        loader = kind(Numbers(16), sampler=sampler, **options)
        got[kind] = [epoch_set_late(loader, sampler), epoch(loader)]
    assert_same(got[make], got[Torchs])
    late, following = got[Torchs]
    assert all(torch.equal(a, b) for a, b in zip(late, following, strict=True)) == noticed


# ------------------------------------------------------------------------------------------- 13


# ------------------------------------------------------------------------------------------- 14


class Told(IterableDataset[Any]):
    """Gives the values of `get_worker_info`, and the seeds."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            yield None
            return
        assert info.dataset is self
        yield info.id, info.num_workers, info.seed, torch.initial_seed(), list(INITS)


INITS: list[tuple[int, int, int]] = []


def note_init(worker: int) -> None:
    """Like timm's `worker_init_fn`: check the worker's id and seed, and draw a number."""
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    assert info.seed == torch.initial_seed()
    INITS.append((worker, info.seed, int(torch.randint(1 << 30, ()))))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_point_14_worker_info(kind: str, workers: int) -> None:
    """Workers have id, count, seed and dataset, and `worker_init_fn` runs seeded; None in the main process."""
    run = assert_like_torch(
        kind,
        Told(),
        num_workers=workers,
        batch_size=None,
        collate_fn=list if workers else None,
        worker_init_fn=note_init,
    )
    assert len(run.epochs[0]) == max(1, workers)
    assert get_worker_info() is None
    assert not INITS


# ------------------------------------------------------------------------------------------- 15


class Fails(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("no such sample")
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", BOTH)
def test_point_15_a_workers_error_keeps_its_type_and_traceback(kind: str) -> None:
    """The error keeps its type, has the worker's traceback, and replaces its batch only."""
    got = outcomes(kind, Fails(8), batch_size=2, num_workers=2)
    expected = outcomes("torch", Fails(8), batch_size=2, num_workers=2)
    assert [type(a) for a in got] == [type(b) for b in expected]
    assert got[1][0] is KeyError
    for words in ("Caught KeyError in DataLoader worker process 1", "Original Traceback", "in __getitem__"):
        assert words in got[1][1]
        assert words in expected[1][1]


class Length(Dataset[int]):
    """Counts the calls of `__len__`, which in a real dataset may open a file."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return 8

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("kind", ["sync", "asyncio", "stateful"])
@pytest.mark.parametrize("sampler", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_dataset_is_not_asked_for_its_length(kind: str, sampler: str, seed: int | None) -> None:
    """With the user's own sampler the length is not asked for, as in torch's loader; only `state_dict` needs it."""
    dataset, order = Length(), [[0, 1], [2, 3]] if sampler == "batch_sampler" else [3, 1, 2]
    options: dict[str, Any] = {sampler: order, "num_workers": 1, "multiprocessing_context": "fork"}
    if kind == "stateful":
        loader: Any = StatefulDataLoader[Any](dataset, **options)
    else:
        loader = (AsyncDataLoader[Any] if kind == "asyncio" else DataLoader[Any])(dataset, seed=seed, **options)

    async def read() -> None:
        async with loader:
            assert len([batch async for batch in loader]) == len(order)

    if kind == "asyncio":
        run_async(read())
    else:
        for _ in range(2):
            assert len([batch for batch in loader]) == len(order)  # noqa: C416 - `list` asks for the loader's length
    assert dataset.asked == 0
    assert loader.state_dict()["length"] == 8
