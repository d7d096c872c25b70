"""Workers that die or hang are replaced: each batch is delivered once, in order, and in seeded mode to the bit."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, Recovery, WorkerDied
from tests.helpers.comparing import assert_same
from tests.helpers.faulty import (
    Faults,
    Faulty,
    FaultyStream,
    Growing,
    RaisingStream,
    StatefulFaultyStream,
    StatefulRaisingStream,
)
from tests.helpers.running import BOTH, KINDS, run_async
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning")

NONE = Faults(Path("/"), {})


def epochs_of(kind: str, dataset: Any, epochs: int, **options: Any) -> list[list[Any]]:
    """All batches of `epochs` epochs."""
    torch.manual_seed(7)
    with Stepwise(kind, dataset, **options) as run:
        return [run.epoch() for _ in range(epochs)]


def collect(kind: str, dataset: Any, **options: Any) -> list[Any]:
    return epochs_of(kind, dataset, 1, **options)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT", "exit", "exit 0"])
def test_seeded_run_with_deaths_is_that_without(kind: str, way: str, tmp_path: Path) -> None:
    """Three workers die in an epoch; the batches and their random numbers are those of a run without deaths."""
    expected = collect(kind, Faulty(60, NONE), batch_size=4, seed=11, shuffle=True, num_workers=2)
    faults = Faults(tmp_path, {5: way, 23: way, 41: way})
    got = collect(kind, Faulty(60, faults), batch_size=4, seed=11, shuffle=True, num_workers=2)
    assert_same(got, expected)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("way", ["stop", "hang", "hang in C"])
def test_hanging_worker_is_replaced(kind: str, way: str, tmp_path: Path) -> None:
    """A worker that is stopped, or hangs in Python or C, is killed after `worker_timeout`; its task is done again."""
    expected = collect(kind, Faulty(24, NONE), batch_size=4, seed=1, num_workers=2)
    dataset = Faulty(24, Faults(tmp_path, {9: way}))
    got = collect(kind, dataset, batch_size=4, seed=1, num_workers=2, recovery=Recovery(worker_timeout=0.5))
    assert_same(got, expected)


@pytest.mark.thorough
def test_tasks_of_a_stream_wait_for_one_another() -> None:
    """An asynchronous stream is read by one task after the other: tasks that wait for their turn do not time out."""
    options: dict[str, Any] = {"batch_size": 1, "num_workers": 1, "prefetch_factor": 10, "max_worker_restarts": 0}
    assert len(collect("sync", SlowStream(12, 0.2), recovery=Recovery(worker_timeout=1.2), **options)) == 12


class SlowStream:
    """Gives a number every `seconds`."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(self.count):
            await asyncio.sleep(self.seconds)
            yield number


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", BOTH)
def test_spawned_workers_are_replaced(method: str, kind: str, tmp_path: Path) -> None:
    """Workers that are not forked are replaced, and give the batches of a run without deaths."""
    expected = collect(kind, Faulty(40, NONE), batch_size=4, seed=11, num_workers=2)
    dataset = Faulty(40, Faults(tmp_path, {5: "SIGKILL", 30: "SIGSEGV"}))
    got = collect(kind, dataset, batch_size=4, seed=11, num_workers=2, multiprocessing_context=method)
    assert_same(got, expected)


@pytest.mark.parametrize("kind", BOTH)
def test_torch_mode_keeps_the_order_and_warns(kind: str, tmp_path: Path) -> None:
    """In torch mode a warning reports that the worker's RNG state is lost when it dies. No samples are missing."""
    dataset = Faulty(40, Faults(tmp_path, {5: "SIGKILL"}))
    with pytest.warns(RuntimeWarning, match="worker 1 died and was replaced. Its random numbers begin anew"):
        got = collect(kind, dataset, batch_size=4, num_workers=2, max_worker_restarts=1)
    assert [batch["index"].tolist() for batch in got] == [list(range(i, i + 4)) for i in range(0, 40, 4)]


def test_warning_that_is_an_error_loses_no_batch(tmp_path: Path) -> None:
    """Under ``-W error`` the warning is raised once, and the epoch continues after it."""
    loader = DataLoader[Any](Faulty(12, Faults(tmp_path, {5: "SIGKILL"})), num_workers=2, max_worker_restarts=1)
    got, raised = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches: Any = iter(loader)
        while True:
            try:
                got.append(int(next(batches)["index"]))
            except StopIteration:
                break
            except RuntimeWarning:
                raised += 1
    assert (got, raised) == (list(range(12)), 1)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_persistent_workers(kind: str, tmp_path: Path) -> None:
    """A replacement started in a later epoch serves that epoch and the epochs after it."""
    options: dict[str, Any] = {
        "batch_size": 3, "seed": 5, "shuffle": True, "num_workers": 2, "persistent_workers": True,
    }  # fmt: skip
    expected = epochs_of(kind, Faulty(30, NONE), 3, **options)
    # Each index strikes once: 4 at its first visit, in the first epoch, 9 at its second visit, 17 at its third.
    got = epochs_of(kind, Faulty(30, Later(tmp_path, {4: 0, 9: 1, 17: 2})), 3, **options)
    assert_same(got, expected)
    assert len(list(tmp_path.glob("struck*"))) == 3


class Later(Faults):
    """Index `i` kills its worker when it is visited for the ``places[i]``-th time, counted from 0."""

    def __init__(self, folder: Path, places: dict[int, int]) -> None:
        super().__init__(folder, {})
        self.visits = places

    def strike(self, place: int) -> None:
        if place not in self.visits or Path(f"{self.folder}/struck{place}").exists():
            return
        visit = len(list(Path(self.folder).glob(f"visit{place}.*")))
        Path(f"{self.folder}/visit{place}.{visit}").touch()
        if visit == self.visits[place]:
            Path(f"{self.folder}/struck{place}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", BOTH)
def test_restarts_are_bounded(kind: str, tmp_path: Path) -> None:
    """A worker that dies once more than it may be replaced ends the epoch; the error has the number of replacements."""
    dataset = Faulty(40, Faults(tmp_path, {3: "SIGKILL", 8: "SIGKILL", 13: "SIGKILL"}))
    with pytest.raises(WorkerDied, match=r"Worker 0 had been replaced 2 times in this epoch \(max_worker_restarts\)"):
        collect(kind, dataset, num_workers=1, seed=1, max_worker_restarts=2)


def test_torch_mode_heals_nothing_by_default(tmp_path: Path) -> None:
    """The run ends, as in torch; the error names the option that would have saved it."""
    with pytest.raises(WorkerDied, match="set max_worker_restarts"):
        collect("sync", Faulty(10, Faults(tmp_path, {3: "SIGKILL"})), num_workers=1)


# ------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("every", [1, 3])
def test_stateful_stream_goes_on(kind: str, every: int, tmp_path: Path) -> None:
    """The replacement reads a stream that can save its state from that state on: each sample once, and to the bit."""
    options: dict[str, Any] = {"batch_size": 2, "seed": 3, "num_workers": 2, "snapshot_every_n_steps": every}
    expected = collect(kind, StatefulFaultyStream(21, NONE), **options)
    got = collect(kind, StatefulFaultyStream(21, Faults(tmp_path, {3: "SIGKILL", 12: "exit"})), **options)
    assert_same(got, expected)


@pytest.mark.parametrize("kind", BOTH)
def test_stateless_stream_is_read_again(kind: str, tmp_path: Path) -> None:
    """With ``allow_replay=True`` the replacement reads from the beginning, and drops the batches already answered."""
    options: dict[str, Any] = {"batch_size": 2, "seed": 3, "num_workers": 2, "recovery": Recovery(allow_replay=True)}
    expected = collect(kind, FaultyStream(21, NONE), **options)
    got = collect(kind, FaultyStream(21, Faults(tmp_path, {3: "SIGKILL", 12: "exit"})), **options)
    assert_same(got, expected)


@pytest.mark.parametrize("kind", BOTH)
def test_stateless_stream_cannot_go_on(kind: str, tmp_path: Path) -> None:
    """Without ``allow_replay`` the error names the reason why the worker was not replaced, and the remedy."""
    dataset = FaultyStream(40, Faults(tmp_path, {17: "SIGKILL"}))
    with pytest.raises(WorkerDied, match=r"has no state_dict and load_state_dict.*Recovery\(allow_replay=True\)"):
        collect(kind, dataset, seed=3, num_workers=2)


def results(dataset: Any, **options: Any) -> list[Any]:
    """One epoch's batches as lists, and the texts of the errors between them."""
    found: list[Any] = []
    batches: Any = iter(DataLoader[Any](dataset, **options))
    while True:
        try:
            found.append(next(batches)["index"].tolist())
        except StopIteration:
            return found
        except ValueError as error:
            found.append(str(error).splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("struck", range(12))
@pytest.mark.parametrize("dataset", [RaisingStream, StatefulRaisingStream])
def test_errors_of_a_stream_come_once(dataset: type[RaisingStream], struck: int, every: int, tmp_path: Path) -> None:
    """Errors that a stream raised before its worker died are not raised again, and no later sample is missing."""
    options: dict[str, Any] = {
        "batch_size": 2, "seed": 1, "num_workers": 1, "recovery": Recovery(allow_replay=True),
        "snapshot_every_n_steps": every,
    }  # fmt: skip
    expected = results(dataset(12, NONE, {0, 5, 6, 11}), **options)
    assert results(dataset(12, Faults(tmp_path, {struck: "SIGKILL"}), {0, 5, 6, 11}), **options) == expected
    assert sum(isinstance(each, str) for each in expected) == 4


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("seed", [None, 4])
def test_worker_that_grows_is_replaced_between_tasks(kind: str, seed: int | None) -> None:
    """A worker beyond its memory limit exits; its replacement continues its random numbers, so no batch differs."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2} | ({} if seed is None else {"seed": seed})
    expected = collect(kind, Growing(40), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = collect(kind, Growing(40), recovery=Recovery(worker_memory_limit=6 << 20), **options)
    pids = {int(pid) for batch in got for pid in batch["pid"]}
    assert len(pids) > 2
    for batch in (*got, *expected):
        del batch["pid"]
    assert_same(got, expected)


class Accompanied(Growing):
    """Its process has a thread that never ends, for which the interpreter waits at exit."""

    def __getitem__(self, index: int) -> Any:
        if not self.kept:
            threading.Thread(target=threading.Event().wait).start()
        return super().__getitem__(index)


@pytest.mark.thorough
def test_worker_that_grew_and_cannot_end() -> None:
    """A worker that grew and whose threads keep it from exiting is killed; its replacement does the next task."""
    with DataLoader[Any](Accompanied(5), num_workers=1, recovery=Recovery(worker_memory_limit=7 << 19)) as loader:
        assert [int(batch["index"]) for batch in loader] == list(range(5))
        assert loader.stats()["data/worker_retirements"] >= 1


# ------------------------------------------------------------------------------------------- ends during a heal


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_close_while_a_worker_is_being_replaced(method: str, tmp_path: Path) -> None:
    """An epoch that is closed during a replacement leaves nothing behind (the leak check would find it)."""
    dataset = Faulty(40, Faults(tmp_path, {4: "SIGKILL"}))
    loader = DataLoader[Any](dataset, num_workers=1, seed=1, multiprocessing_context=method)
    batches: Any = iter(loader)
    for _ in range(3):
        next(batches)
    (process,) = batches._workers
    os.kill(process.pid, signal.SIGKILL)
    loader.close()


@pytest.mark.thorough
def test_dropped_async_iterator_while_a_worker_is_being_replaced(tmp_path: Path) -> None:
    """An iterator that is dropped during a replacement leaves nothing behind (the leak check would find it)."""

    async def run() -> None:
        dataset = Faulty(40, Faults(tmp_path, {2: "SIGKILL"}))
        loader = AsyncDataLoader[Any](dataset, num_workers=2, seed=1, multiprocessing_context="spawn")
        async for _ in loader:
            break
        await loader.aclose()

    run_async(run())
