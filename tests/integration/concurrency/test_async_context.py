"""Clients opened once per worker: `__aenter__` and `__aexit__` of a dataset."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.datasets import Numbers
from tests.helpers.running import BOTH, outcomes, run_async
from tests.helpers.seeded_runs import Stepwise
from tests.integration.concurrency.test_samples_in_flight import collect

WORKERS = [0, 1, 2]


class Opens(Dataset[Any]):
    """Leaves a file behind for each time its context was entered or left."""

    def __init__(self, folder: Path, n: int = 12) -> None:
        self.folder = folder
        self.n = n
        self.client: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return self.n

    def note(self, what: str) -> None:
        number = len(list(self.folder.glob(f"{what}-*")))
        (self.folder / f"{what}-{os.getpid()}-{number}").touch()

    async def __aenter__(self) -> Self:
        await asyncio.sleep(0)
        self.note("entered")
        self.client = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)
        self.client = None
        self.note("left")

    async def __getitem__(self, index: int) -> int:
        assert self.client is asyncio.get_running_loop()
        await asyncio.sleep(0)
        return index


class OpensStream(Opens):
    async def __aiter__(self) -> AsyncIterator[int]:
        info = get_worker_info()
        for number in range(0 if info is None else info.id, self.n, 1 if info is None else info.num_workers):
            yield await self[number]


def noted(folder: Path, what: str) -> list[str]:
    """Pids of the processes that wrote a note of this kind, sorted."""
    return sorted(path.name.split("-")[1] for path in folder.glob(f"{what}-*"))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("make", [Opens, OpensStream])
def test_entered_and_left_once_a_worker(kind: str, workers: int, make: Any, tmp_path: Path) -> None:
    """The dataset is entered before its first sample, left after its last, and read in the loop that entered it."""
    got = collect(kind, make(tmp_path), batch_size=2, num_workers=workers)
    assert sorted(torch.cat(got).tolist()) == list(range(12))
    entered = noted(tmp_path, "entered")
    assert len(set(entered)) == len(entered) == max(1, workers)
    assert noted(tmp_path, "left") == entered
    assert (str(os.getpid()) in entered) == (workers == 0)


@pytest.mark.parametrize("kind", BOTH)
def test_persistent_workers_stay_open(kind: str, tmp_path: Path) -> None:
    """Persistent workers enter once and leave when the loader is closed; without workers each iterator does both."""
    for workers, times in ((2, 2), (0, 3)):
        folder = tmp_path / str(workers)
        folder.mkdir()
        options: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "persistent_workers": bool(workers)}
        if kind == "sync":
            with DataLoader[Any](Opens(folder), **options) as loader:
                for _ in range(3):
                    assert len(list(loader)) == 6
        else:

            async def run() -> None:
                async with AsyncDataLoader[Any](Opens(folder), **options) as loader:  # noqa: B023
                    for _ in range(3):
                        assert len([batch async for batch in loader]) == 6

            run_async(run())
        assert len(noted(folder, "entered")) == len(noted(folder, "left")) == times


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_left_when_the_epoch_is_not_finished(kind: str, workers: int, tmp_path: Path) -> None:
    """Closing the loader in the middle of an epoch leaves the dataset, too."""
    if kind == "sync":
        with DataLoader[Any](Opens(tmp_path), num_workers=workers) as loader:
            next(iter(loader))
    else:

        async def run() -> None:
            async with AsyncDataLoader[Any](Opens(tmp_path), num_workers=workers) as loader:
                await anext(aiter(loader))

        run_async(run())
    assert noted(tmp_path, "entered") == noted(tmp_path, "left") != []


@pytest.mark.parametrize("workers", [0, 1])
def test_views_enter_what_they_view(workers: int, tmp_path: Path) -> None:
    """Subset and ConcatDataset enter the datasets that they hold; a dataset held twice is entered once."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    shared = Opens(one)
    dataset: Any = ConcatDataset([Subset(shared, [3, 4]), Opens(other, 2), Subset(shared, [5])])
    got = collect("sync", dataset, batch_size=5, num_workers=workers)
    assert got[0].tolist() == [3, 4, 0, 1, 5]
    assert len(noted(one, "entered")) == len(noted(other, "entered")) == 1
    assert len(noted(one, "left")) == len(noted(other, "left")) == 1


class Refuses(Opens):
    """Raises when it is entered the first time."""

    async def __aenter__(self) -> Self:
        if not noted(self.folder, "refused"):
            self.note("refused")
            raise ConnectionError("no store")
        return await super().__aenter__()


@pytest.mark.parametrize("kind", BOTH)
def test_an_error_at_entering_is_one_of_start_up(kind: str, tmp_path: Path) -> None:
    """No batch is lost to it: another loop has the workers enter again."""
    for persistent in (False, True):
        folder = tmp_path / str(persistent)
        folder.mkdir()
        options = {"batch_size": 4, "num_workers": 1, "persistent_workers": persistent}
        with Stepwise(kind, Refuses(folder), **options) as run:
            run.begin()
            with pytest.raises(ConnectionError, match="no store"):
                run.step()
            assert [batch.tolist() for batch in run.epoch()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("kind", BOTH)
def test_an_error_at_entering_without_workers(kind: str, tmp_path: Path) -> None:
    """The error is raised instead of the batches that waited for it; later batches try to enter again."""
    got = outcomes(kind, Refuses(tmp_path, 300), batch_size=4, concurrency=4)
    kinds = [each[0] if isinstance(each, tuple) else None for each in got]
    assert kinds[0] is ConnectionError
    assert kinds[-1] is None
    assert noted(tmp_path, "entered") == noted(tmp_path, "left")


class Sticks(Opens):
    async def __aexit__(self, *_: object) -> None:
        await asyncio.Event().wait()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_leaving_holds_nothing_up_for_long(kind: str, workers: int, tmp_path: Path) -> None:
    """The loader stops waiting for an `__aexit__` that never returns; all batches were delivered before."""
    assert len(collect(kind, Sticks(tmp_path), batch_size=4, num_workers=workers)) == 3


class Breaks(Opens):
    async def __aexit__(self, *_: object) -> None:
        raise OSError("lost")


@pytest.mark.parametrize("kind", BOTH)
def test_an_error_at_leaving_is_a_warning(kind: str, tmp_path: Path) -> None:
    """An error of `__aexit__` loses no batch."""
    with pytest.warns(RuntimeWarning, match="__aexit__ raised OSError: lost"):
        assert len(collect(kind, Breaks(tmp_path), batch_size=4)) == 3


async def connect(worker: int) -> None:
    raise AssertionError("nobody awaits it")


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("concurrency", [None, 2])
def test_a_worker_init_fn_is_not_awaited(kind: str, concurrency: int | None) -> None:
    """The error says where to await."""
    with Stepwise(kind, Numbers(4), num_workers=1, worker_init_fn=connect, concurrency=concurrency) as run:
        run.begin()
        with pytest.raises(TypeError, match="await in the dataset's __aenter__"):
            run.step()
