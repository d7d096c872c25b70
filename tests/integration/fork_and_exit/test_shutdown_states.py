"""Loaders that are closed in the middle of an action, from every side: no process is left, and no call waits for ever.

The workers here are stuck in every way that they can be (`stuck.py`). One deadline bounds the end of all workers,
whatever their number; the tests wait far longer, and fail when that time is over. See also test_shutdown_scripts.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader, LoaderClosed
from asyncloader.workers import shutdown
from tests.helpers.datasets import Numbers
from tests.helpers.running import BOTH, KINDS, PATIENCE_S, Deaths, run_async
from tests.helpers.stuck import STUCK, StuckAt, Told
from tests.processes import own_children

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

GRANDCHILD = "with a child that holds all descriptors"


@pytest.fixture(autouse=True)
def asked_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the seconds that a worker gets to exit by itself, and after SIGTERM: those here never do, or at once."""
    monkeypatch.setattr(shutdown, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(shutdown, "_TERMINATE_SECONDS", 0.2)


@contextlib.contextmanager
def grandchildren_end(capfd: pytest.CaptureFixture[str]) -> Generator[None]:
    """Kill the processes that the workers forked: they are not children of this process."""
    try:
        yield
    finally:
        for line in capfd.readouterr().err.splitlines():
            if line.startswith("grandchild "):
                os.kill(int(line.split()[1]), signal.SIGKILL)


def run_in(thread: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Run a function in a thread, and keep the error that it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            thread()
        except BaseException as error:
            errors.append(error)

    started = threading.Thread(target=run)
    started.start()
    return started, errors


def joined(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


# ------------------------------------------------------------------------------------------- stuck workers


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("how", STUCK)
def test_close_with_stuck_workers(how: str, workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    """`close` returns, and the workers have exited and are reaped, whatever their number and the way they are stuck."""
    with grandchildren_end(capfd), Told() as told:
        loader = DataLoader[Any](StuckAt(how, told, workers), num_workers=workers, timeout=PATIENCE_S)
        batches = iter(loader)
        assert [int(next(batches)) for _ in range(workers)] == list(range(workers))
        deaths = Deaths(int(pid) for pid in told.lines(workers))
        thread, errors = run_in(loader.close)
        assert joined(thread)
        assert not errors
        assert deaths.ended()
        deaths.close()
        with pytest.raises(LoaderClosed):
            next(batches)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["in C with the GIL, deaf to SIGTERM", "stopped", GRANDCHILD])
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_aclose_with_stuck_workers(how: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """`aclose` ends stuck workers, too; the event loop runs during it."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    async def run(told: Told) -> None:
        loader = AsyncDataLoader[Any](StuckAt(how, told, 2), num_workers=2)
        batches = aiter(loader)
        assert [int(await anext(batches)) for _ in range(2)] == [0, 1]
        deaths = Deaths(int(pid) for pid in await asyncio.to_thread(told.lines, 2))
        counting = asyncio.ensure_future(count())
        await loader.aclose()
        counting.cancel()
        assert deaths.ended()
        deaths.close()

    with grandchildren_end(capfd), Told() as told:
        run_async(run(told), kind)
    assert turns > 1


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["asleep", "in C with the GIL, deaf to SIGTERM"])
@pytest.mark.parametrize("kind", BOTH)
def test_dropped_with_stuck_workers(how: str, kind: str) -> None:
    """Garbage collection in another thread finds the iterator: its workers end, though they are stuck."""

    async def leave(told: Told) -> tuple[Any, list[str]]:
        batches = aiter(AsyncDataLoader[Any](StuckAt(how, told, 2), num_workers=2))
        await anext(batches)
        await anext(batches)
        return batches, await asyncio.to_thread(told.lines, 2)

    with Told() as told:
        cycle: list[Any] = []
        if kind == "sync":
            batches: Any = iter(DataLoader[Any](StuckAt(how, told, 2), num_workers=2))
            next(batches)
            next(batches)
            pids = told.lines(2)
        else:
            batches, pids = run_async(leave(told))  # its loop is closed
        deaths = Deaths(int(pid) for pid in pids)
        cycle += [cycle, batches]
        del batches, cycle
        thread, errors = run_in(gc.collect)
        assert joined(thread)
        assert not errors
        deaths.wait()


# ------------------------------------------------------------------------------------------- start-up


@pytest.mark.spawns
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_close_at_once(kind: str, method: str) -> None:
    """Workers that still import, or have not started yet, are ended."""
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}

    async def run() -> None:
        for turns in (0, 1, 2, 5):
            loader = AsyncDataLoader[Any](Numbers(5), **options)
            first = asyncio.ensure_future(anext(aiter(loader)))
            for _ in range(turns):
                await asyncio.sleep(0)
            await loader.aclose()
            with contextlib.suppress(LoaderClosed):  # unless its batch had arrived already
                assert (await first).shape == (1, 3)

    if kind == "sync":
        loader = DataLoader[Any](Numbers(5), **options)
        batches = iter(loader)
        loader.close()
        with pytest.raises(LoaderClosed):
            next(batches)
    else:
        run_async(run())
    assert not own_children()


# ------------------------------------------------------------------------------------------- waiting and closing


@pytest.mark.thorough
@pytest.mark.parametrize("persistent", [False, True])
def test_close_while_another_thread_waits(persistent: bool) -> None:
    """A thread that waits in `next` gets `LoaderClosed`, and does not wait for ever."""
    with Told() as told:
        loader = DataLoader[Any](StuckAt("asleep", told, 2), num_workers=2, persistent_workers=persistent)
        batches = iter(loader)
        assert [int(next(batches)) for _ in range(2)] == [0, 1]
        thread, errors = run_in(lambda: next(batches))
        told.lines(2)
        loader.close()
        assert joined(thread)
        assert [type(error) for error in errors] == [LoaderClosed]
        errors.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_close_in_the_loops_own_body(kind: str, workers: int) -> None:
    """The next step of the loop raises `LoaderClosed`: a `close` in the body is never taken for the epoch's end."""
    seen: list[float] = []

    async def run() -> None:
        loader = AsyncDataLoader[Any](Numbers(20), num_workers=workers)
        with pytest.raises(LoaderClosed):  # noqa: PT012 - the loop is the subject
            async for batch in loader:
                seen.append(float(batch[0, 0]))
                await loader.aclose()

    if kind == "sync":
        loader = DataLoader[Any](Numbers(20), num_workers=workers)
        with pytest.raises(LoaderClosed):  # noqa: PT012 - the loop is the subject
            for batch in loader:
                seen.append(float(batch[0, 0]))
                loader.close()
    else:
        run_async(run(), kind)
    assert seen == [0.0]
