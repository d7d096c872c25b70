"""`LoaderTimeout` reports the state of each worker when no batch came."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader, DataLoader, LoaderTimeout
from tests.helpers.datasets import Numbers
from tests.helpers.faulty import Faults, Faulty
from tests.helpers.running import BOTH, KINDS, collect, run_async


def report_of(kind: str, dataset: Any, **options: Any) -> tuple[str, list[int]]:
    """The notes of the time-out that is raised, and the workers' pids."""
    if kind == "sync":
        loader = DataLoader[Any](dataset, **options)
        batches: Any = iter(loader)
        with pytest.raises(LoaderTimeout) as caught:
            for _ in batches:
                pass
        assert str(caught.value) == f"DataLoader timed out after {options['timeout']} seconds"
        pids = [process.pid for process in batches._workers]
        loader.close()
        return "\n".join(caught.value.__notes__), pids

    async def load() -> tuple[str, list[int]]:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            batches: Any = aiter(loader)
            with pytest.raises(LoaderTimeout) as caught:
                async for _ in batches:
                    pass
            return "\n".join(caught.value.__notes__), [process.pid for process in batches.pool.processes]

    return run_async(load())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("way", ["hang", "hang in C"])
def test_report_shows_where_the_worker_is(kind: str, way: str, tmp_path: Path) -> None:
    """The stack of a worker that hangs in Python, or in C with the GIL; its ring; the oldest task's indices."""
    dataset = Faulty(12, Faults(tmp_path, {6: way}))
    report, pids = report_of(kind, dataset, batch_size=4, num_workers=2, timeout=1.5)
    assert "indices [4, 5, 6, 7]" in report
    assert "Waiting for task 1 at worker 1" in report
    for worker, pid in enumerate(pids):
        assert f"worker {worker} (pid {pid}) is " in report
    assert "in strike" in report
    assert "in __getitem__" in report
    assert "slots x" in report
    assert "pytest" not in report  # the calls in progress before the fork


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_report_on_a_stopped_worker(kind: str, tmp_path: Path) -> None:
    """A stopped worker cannot answer; the report says that it is stopped."""
    report, _ = report_of(kind, Faulty(12, Faults(tmp_path, {6: "stop"})), num_workers=1, timeout=1.5)
    assert "stopped by a signal (SIGSTOP)" in report


class SlowStart(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def never_started(worker: int) -> None:
    import threading

    threading.Event().wait()


@pytest.mark.thorough
def test_report_on_start_up_code() -> None:
    """A worker that hangs in `worker_init_fn` is reported as still in its start-up code."""
    report, _ = report_of("sync", SlowStart(), num_workers=1, timeout=1.5, worker_init_fn=never_started)
    assert "still at its start-up code" in report
    assert "never_started" in report


class AsyncStuck(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise TypeError("await it")

    async def __aiter__(self) -> Any:
        yield torch.zeros(1)
        await asyncio.get_running_loop().create_future()


@pytest.mark.thorough
def test_report_on_an_async_worker() -> None:
    """The report shows the event loop of a worker that awaits."""
    report, _ = report_of("asyncio", AsyncStuck(), num_workers=1, timeout=1.5)
    assert "the next batch of its stream" in report
    assert "worker.py" in report


@pytest.mark.thorough
@pytest.mark.parametrize("number", [0, 1])
async def test_report_while_a_worker_dies(number: int) -> None:
    """A worker dies and is replaced while all workers report their stacks: no report shows another process's state."""
    async with AsyncDataLoader[Any](Hanging(), num_workers=2, max_worker_restarts=1) as loader:
        batches: Any = aiter(loader)
        await anext(batches)
        await batches._pipeline.begun()  # the other worker, too, is past its start-up
        pids = [process.pid for process in batches.pool.processes]
        asking = asyncio.ensure_future(batches._pipeline.report())
        await asyncio.sleep(0)
        os.kill(pids[number], signal.SIGKILL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            report = await asking
    # The killed worker has died, or had answered before.
    assert re.findall(r"^worker (\d) \(pid (\d+)\)", report, re.MULTILINE) == [
        (str(worker), str(pid)) for worker, pid in enumerate(pids)
    ]
    other = report.partition(f"worker {1 - number} (pid {pids[1 - number]}) is ")[2]
    assert "worker_main" in other.partition("worker 1 ")[0]


class Hanging(Dataset[Any]):
    """Delivers its first sample only; the others hang."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index:
            threading.Event().wait()
        return index


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_timeout_is_none(kind: str) -> None:
    """``timeout=float("inf")`` waits as long as it takes."""
    assert len(collect(kind, Numbers(3), num_workers=1, timeout=float("inf"))) == 3
