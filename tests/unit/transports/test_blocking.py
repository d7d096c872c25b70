from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.errors import ReadFailed, TransportClosed


class Hold:
    """A call that blocks its thread until it is released."""

    def __init__(self, result: object = None) -> None:
        self.begun = threading.Event()
        self.free = threading.Event()
        self.result = result

    def __call__(self) -> object:
        self.begun.set()
        self.free.wait(30)  # a bound for tests that fail; the others release it
        return self.result

    async def wait_begun(self) -> None:
        await asyncio.to_thread(self.begun.wait)


@pytest.fixture
async def pool() -> AsyncIterator[BlockingPool]:
    pool = BlockingPool("test", threads=1)
    yield pool
    await pool.aclose()


async def test_threads_are_bounded() -> None:
    """No more calls run at once than the pool has threads."""
    pool = BlockingPool("test", threads=2)
    running, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait()  # passes only when two calls run at once
        with lock:
            running -= 1

    await asyncio.gather(*(pool.run(call) for _ in range(20)))
    assert most == 2
    await pool.aclose()


async def test_cancelled_in_the_queue_never_runs(pool: BlockingPool) -> None:
    """A call that is cancelled before a thread starts it is dropped."""
    hold, ran = Hold(), []
    holding = asyncio.create_task(pool.run(hold))
    await hold.wait_begun()
    queued = asyncio.create_task(pool.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    hold.free.set()
    await holding
    assert await pool.run(lambda: "usable") == "usable"
    assert ran == []


async def test_cancelled_while_running_leaves_the_pool_usable(pool: BlockingPool) -> None:
    """The caller continues at once, the thread when its call ends."""
    hold = Hold()
    holding = asyncio.create_task(pool.run(hold))
    await hold.wait_begun()
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert not hold.free.is_set()
    hold.free.set()
    assert await pool.run(lambda: "usable") == "usable"


async def test_cancelled_acquire_releases_what_comes_too_late(pool: BlockingPool) -> None:
    """A result without a waiting caller is released, once."""
    hold = Hold("file")
    released: list[object] = []
    acquiring = asyncio.create_task(pool.acquire(hold, released.append))
    await hold.wait_begun()
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    hold.free.set()
    await pool.run(lambda: None)
    assert released == ["file"]


async def test_cancelled_acquire_that_was_served_already_releases(pool: BlockingPool) -> None:
    """The result is released also if it existed before the caller was woken."""
    hold = Hold("file")
    released: list[object] = []
    acquiring = asyncio.create_task(pool.acquire(hold, released.append))
    await hold.wait_begun()
    hold.free.set()
    pool.submit(lambda: None).result()  # blocks this loop until the thread has finished the call
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    assert released == ["file"]


async def test_finish_goes_on_without_its_caller(pool: BlockingPool) -> None:
    """A cleanup runs even if its caller was cancelled while it was queued."""
    hold, cleaned = Hold(), []
    holding = asyncio.create_task(pool.run(hold))
    await hold.wait_begun()
    finishing = asyncio.create_task(pool.finish(lambda: cleaned.append(1)))
    await asyncio.sleep(0)
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    hold.free.set()
    await holding
    await pool.run(lambda: None)
    assert cleaned == [1]


async def test_finish_after_close_runs_at_once() -> None:
    """A cleanup after the threads have ended still runs."""
    pool, cleaned = BlockingPool("test", threads=1), []
    await pool.aclose()
    await pool.finish(lambda: cleaned.append(threading.current_thread()))
    assert cleaned == [threading.current_thread()]


async def test_close_waits_for_the_calls_and_joins_the_threads() -> None:
    """Running and queued calls are finished; then no thread of the pool is left."""
    before = set(threading.enumerate())
    pool, hold = BlockingPool("test", threads=1), Hold("first")
    calls = [asyncio.create_task(pool.run(hold)), asyncio.create_task(pool.run(lambda: "second"))]
    await asyncio.sleep(0)
    closing = asyncio.create_task(pool.aclose())
    await asyncio.sleep(0)
    assert pool.closed
    with pytest.raises(TransportClosed, match="the test transport is closed"):
        await pool.run(lambda: None)
    ended, _ = await asyncio.wait({closing}, timeout=0.1)  # long enough for a close that would not wait
    hold.free.set()
    await closing
    assert not ended
    assert await asyncio.gather(*calls) == ["first", "second"]
    assert {
        each for each in threading.enumerate() if each.name.startswith(("asyncloader-test", "test-close"))
    } <= before


async def test_no_more_threads_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call fails as a failed read, cleanups are done, and the pool closes; closing it again does not wait."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    used, unused, cleaned = BlockingPool("test", threads=1), BlockingPool("test", threads=1), []
    await used.run(lambda: None)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ReadFailed, match="the test transport cannot read in a thread: can't start new thread"):
            await unused.run(lambda: None)
        await unused.finish(lambda: cleaned.append(1))
        await used.aclose()
    assert cleaned == [1]
    await asyncio.wait_for(used.aclose(), 30)
    await unused.aclose()


def test_a_pool_has_at_least_one_thread() -> None:
    """Without threads every read would hang."""
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        BlockingPool("test", threads=0)
