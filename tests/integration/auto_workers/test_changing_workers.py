"""num_workers="auto" in seeded mode, with a tuner that decides as planned: whatever the number of workers does while an
epoch runs, the batches are those of a fixed number, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, RemoteIterableDataset
from asyncloader.options.auto import choice_of
from asyncloader.telemetry.tuner import Decision, Measured, WorkerTuner
from asyncloader.workers.memory.ring_manager import RingManager
from tests.helpers.comparing import assert_same
from tests.helpers.running import KINDS, run_async
from tests.helpers.seeded_datasets import AllDraws, Rows
from tests.helpers.shards_of_formats import write
from tests.service.definitions import fields_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SAMPLES = 600


class Planned(WorkerTuner):
    """Goes through these numbers of workers, one with each window; of each pair of changes the second is kept."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(numbers[0])
        self.numbers = list(numbers[1:])

    @property
    def window(self) -> tuple[float, int]:
        return 0.0, 4

    def observe(self, window: Measured) -> Decision | None:
        del window
        if not self.numbers:
            return None
        self.before, self.value = self.value, self.numbers.pop(0)
        return Decision(self.value, kept=len(self.numbers) % 2 == 0, reason="it is planned")

    def failed(self, reason: str, most: int) -> Decision | None:
        del most
        self.value = self.before
        return Decision(self.value, kept=True, reason=reason)


class Trying(Planned):
    """Keeps no number for good."""

    def observe(self, window: Measured) -> Decision | None:
        found = super().observe(window)
        return None if found is None else found._replace(kept=False)


def choice(loader: Any) -> Any:
    """The loader's choice of the number."""
    return choice_of(getattr(loader, "_asyncloader_spec", loader))


def planned(loader: Any, *numbers: int) -> Any:
    """Have the loader go through these numbers of workers."""
    choice(loader).tuner = Planned(*numbers)
    return loader


class Growing(Rows):
    """The samples of the last batches are large."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 << 16) if index >= len(self) - 160 else torch.zeros(1)


class DyingOnce(Rows):
    """The process that makes sample 200 kills itself, once."""

    def __init__(self, length: int, mark: Path) -> None:
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        if index == 200 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def epochs(kind: str, numbers: tuple[int, ...], count: int, dataset: Any, **options: Any) -> tuple[list[Any], Any]:
    """The batches of the first epochs, and the loader's figures once it has had all planned numbers."""
    found: list[Any] = []
    if kind == "sync":
        with planned(DataLoader(dataset, num_workers="auto", **options), *numbers) as loader:
            while len(found) < count or choice(loader).tuner.numbers:
                found.append(list(loader))
            return found[:count], (loader.stats(), loader.explain())

    async def run() -> Any:
        async with planned(AsyncDataLoader(dataset, num_workers="auto", **options), *numbers) as loader:
            while len(found) < count or choice(loader).tuner.numbers:
                found.append([batch async for batch in loader])
            return found[:count], (loader.stats(), loader.explain())

    return run_async(run(), kind)  # type: ignore[no-any-return]


OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "shuffle": True}


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Two epochs of a loader without workers."""
    with DataLoader[Any](AllDraws(SAMPLES), **OPTIONS) as loader:
        return [list(loader) for _ in range(2)]


@pytest.mark.loops
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_forked_workers_that_come_and_go(kind: str, persistent: bool, expected: list[Any]) -> None:
    """Up and down in both epochs: every batch, all random numbers, and the number in `stats` and `explain`."""
    numbers = (2, 5, 1, 4, 4, 2, 3)
    found, (stats, text) = epochs(kind, numbers, 2, AllDraws(SAMPLES), persistent_workers=persistent, **OPTIONS)
    assert_same(found, expected)
    assert stats["data/worker_restarts"] == 0.0
    assert "num_workers: tries 5 workers instead of 2: it is planned" in text
    assert "num_workers: goes to 3 workers instead of 2: it is planned" in text


def test_workers_that_an_earlier_epoch_had_no_time_to_start() -> None:
    """The next epochs start them."""
    with planned(
        DataLoader[Any](Rows(SAMPLES), num_workers="auto", persistent_workers=True, **OPTIONS), 1, 4
    ) as loader:
        tuner: Any = choice(loader).tuner
        for _ in loader:
            if not tuner.numbers:
                break
        assert any(len(list(loader)) and loader.stats()["data/num_workers"] == 4.0 for _ in range(50))


@pytest.mark.parametrize(
    "options",
    [
        {"workers": "threads"},
        pytest.param({"in_order": False}, marks=pytest.mark.thorough),
        pytest.param({"prefetch_factor": 1, "drop_last": True}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_other_ways(kind: str, options: dict[str, Any]) -> None:
    """Threads; batches out of order; a single credit for each worker."""
    dataset: Any = Rows(SAMPLES)
    found, _ = epochs(kind, (1, 4, 2, 2, 1, 3), 1, dataset, **OPTIONS, **options)
    fixed: Any = {**OPTIONS, **options, "workers": None}
    with DataLoader[Any](dataset, num_workers=2, **fixed) as loader:
        wanted = list(loader)
    if not options.get("in_order", True):
        for each in (found[0], wanted):
            each.sort(key=lambda batch: batch.tolist())
    assert_same(found[0], wanted)


@pytest.mark.spawns
@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "method"), [("sync", "spawn"), ("asyncio", "forkserver")])
def test_workers_that_start_slowly(kind: str, method: str, expected: list[Any]) -> None:
    """An epoch that ends while they start; an epoch that goes on until they work, and is left early."""
    dataset = AllDraws(SAMPLES)
    found, _ = epochs(kind, (1, 3), 1, dataset, multiprocessing_context=method, **OPTIONS)
    assert_same(found[0], expected[0])
    # The dataset is long enough for any start: the loop is left once all are at work.
    with planned(
        DataLoader[Any](AllDraws(10**7), num_workers="auto", multiprocessing_context=method, **OPTIONS), 1, 3
    ) as loader:
        batches = iter(loader)
        while loader.stats()["data/num_workers"] < 3:
            next(batches)
        state, following = loader.state_dict(), [next(batches) for _ in range(30)]
    with DataLoader[Any](AllDraws(10**7), num_workers=2, **OPTIONS) as other:
        other.load_state_dict(state)
        resumed = iter(other)
        assert_same([next(resumed) for _ in range(30)], following)


def test_a_worker_that_is_killed_while_the_number_changes(tmp_path: Path) -> None:
    """Its tasks are made again, by a replacement or by others: nothing is lost or doubled."""
    for round_, numbers in enumerate([(2, 4, 6, 3, 5), (4, 4, 1, 1, 1, 3)]):
        dataset = DyingOnce(SAMPLES, tmp_path / str(round_))
        found, (stats, _) = epochs("sync", numbers, 1, dataset, batch_size=4, seed=3)
        assert [batch.tolist() for batch in found[0]] == [[*range(at, at + 4)] for at in range(0, SAMPLES, 4)]
        assert stats["data/worker_restarts"] == 1.0


def test_a_state_that_is_saved_during_a_change(expected: list[Any]) -> None:
    """It is resumed with a fixed number, and the state of a fixed number with a number that changes."""
    with planned(DataLoader[Any](AllDraws(SAMPLES), num_workers="auto", **OPTIONS), 1, 4, 2, 5) as loader:
        batches = iter(loader)
        for at in range(1, 40):
            assert_same(next(batches), expected[0][at - 1])
            if at % 19:
                continue
            with DataLoader[Any](AllDraws(SAMPLES), num_workers=3, **OPTIONS) as other:
                other.load_state_dict(loader.state_dict())
                assert_same(next(iter(other)), expected[0][at])
                state = other.state_dict()
            with planned(DataLoader[Any](AllDraws(SAMPLES), num_workers="auto", **OPTIONS), 2, 3, 1) as third:
                third.load_state_dict(state)
                assert_same(list(third), expected[0][at + 1 :])


@pytest.mark.thorough
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_is_left_while_workers_start(persistent: bool, expected: list[Any]) -> None:
    """At each of the first batches; the next epoch begins anew with the number so far."""
    options: Any = {**OPTIONS, "persistent_workers": persistent}
    with planned(DataLoader[Any](AllDraws(SAMPLES), num_workers="auto", **options), 1, 6, 2, 5, 1, 4) as loader:
        for stop in (1, 2, 3, 5, 6, 9, 14):
            for number, batch in enumerate(loader, 1):
                if number == stop:
                    assert_same(batch, expected[0][stop - 1])
                    break
        assert_same(list(loader), expected[0])


@pytest.mark.parametrize("numbers", [(1, 4, 2, 6, 1), (5, 1, 3, 3)])
def test_fixed_streams(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """A stream of shards whose order does not depend on workers: its streams move to others."""
    write(tmp_path, "tar")

    def loader_of(workers: Any, **options: Any) -> DataLoader[Any]:
        dataset = RemoteIterableDataset(f"{tmp_path}/", shuffle_buffer=5, streams=2)
        return DataLoader[Any](dataset, batch_size=1, seed=3, decode=fields_of, num_workers=workers, **options)

    with loader_of(0) as loader:
        expected = [list(loader) for _ in range(2)]
    with planned(loader_of("auto", multiprocessing_context="fork"), *numbers) as loader:
        assert_same([list(loader) for _ in range(2)], expected)


def test_an_excused_worker_that_is_killed_before_it_is_needed_again() -> None:
    """It had no tasks, so nothing replaced it at its death."""
    samples = AllDraws(8 * SAMPLES)  # changes take their time, and batches do not
    with DataLoader[Any](samples, **OPTIONS) as loader:
        expected = list(loader)
    with DataLoader[Any](samples, num_workers="auto", **OPTIONS) as loader:
        choice(loader).tuner = tuner = Trying(4, 2)
        batches: Any = iter(loader)
        found: list[Any] = []
        while loader.stats()["data/num_workers"] != 2.0:
            found.append(next(batches))
        found += [next(batches) for _ in range(40)]  # all that they had when they were excused
        for process in batches._workers[2:]:
            process.kill()
        found += [next(batches) for _ in range(20)]
        tuner.numbers.append(4)
        assert_same([*found, *batches], expected)
        stats = loader.stats()
    assert (stats["data/num_workers"], stats["data/worker_restarts"]) == (4.0, 2.0)


def test_an_iterator_that_outlives_the_first() -> None:
    """It goes on with the number that the first one has left, and changes it from then on."""
    options: Any = {**OPTIONS, "multiprocessing_context": "fork"}
    with planned(DataLoader[Any](AllDraws(SAMPLES), num_workers="auto", **options), 1, 3) as loader:
        first, second = iter(loader), iter(loader)
        next(first)
        next(second)
        assert len(list(first)) == SAMPLES // 4 - 1
        while len(second._workers) < 3:
            next(second)


class Owner:
    """It has a loader and its iterator, and the loader calls it."""

    def __init__(self, method: str) -> None:
        options: Any = {**OPTIONS, "multiprocessing_context": method}
        self.loader = DataLoader[Any](Rows(SAMPLES), num_workers="auto", collate_fn=self.collate, **options)
        self.batches: Any = iter(self.loader)

    def collate(self, samples: list[Any]) -> int:
        return len(samples)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_loader_that_is_dropped(method: str) -> None:
    """In the middle of an epoch, with the object that its options refer to."""
    owner = Owner(method)
    assert next(owner.batches) == 4
    # Behind the work on that delivery, which refers to the options for a moment.
    owner.batches._bridge.run(asyncio.sleep(0))
    freed = weakref.ref(owner)
    del owner
    gc.collect()
    assert freed() is None


def test_each_ring_knows_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that grows after workers have come or gone looks whether there is memory for all rings of now."""
    asked: list[int] = []
    check = RingManager._check_room

    def noted(self: RingManager) -> None:
        asked.append(self.workers)
        check(self)

    monkeypatch.setattr(RingManager, "_check_room", noted)
    dataset = Growing(20_000)  # whose small samples last until three processes have begun
    with planned(DataLoader[Any](dataset, num_workers="auto", batch_size=4, seed=3), 1, 3, 3) as loader:
        batches = iter(loader)
        while choice(loader).tuner.numbers or loader.stats()["data/num_workers"] < 3.0:
            next(batches)
        assert sum(1 for _ in batches) > 0
    assert asked[-1] == 3  # rings may have grown before, as workers are ahead of the consumer
