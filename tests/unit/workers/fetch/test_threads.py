"""Threads that take jobs from one queue."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextvars import ContextVar
from typing import Any

import pytest

from asyncloader.workers.fetch.threads import JobThreads

variable: ContextVar[int] = ContextVar("variable", default=-1)


class Held(Exception):
    """An error that weak references can follow."""


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def join(name: str) -> None:
    for thread in named(name):
        thread.join(timeout=20)


async def test_calls_run_in_at_most_so_many_threads() -> None:
    """Three threads meet at a barrier; a fourth is not started for more calls."""
    threads = JobThreads(3, "jobs-a")
    barrier = threading.Barrier(3)

    def meet(item: int) -> int:
        barrier.wait(20)
        return item

    assert await asyncio.gather(*(threads.call(meet, item) for item in range(6))) == list(range(6))
    assert len(named("jobs-a")) == 3
    threads.close()
    join("jobs-a")
    assert not named("jobs-a")


async def test_a_call_has_a_copy_of_the_context() -> None:
    """The call sees the caller's context variables; its own changes are not seen outside."""
    threads = JobThreads(1, "jobs-b")

    def look(value: int) -> int:
        before = variable.get()
        variable.set(value)
        return before

    variable.set(3)
    assert [await threads.call(look, value) for value in (7, 8)] == [3, 3]
    assert variable.get() == 3
    threads.close()
    join("jobs-b")


async def test_errors_are_raised_where_it_is_awaited() -> None:
    """Any exception is passed on; StopIteration and StopAsyncIteration become the cause of a RuntimeError."""
    threads = JobThreads(1, "jobs-c")

    def fail(error: BaseException) -> Any:
        raise error

    with pytest.raises(OSError, match="disk"):
        await threads.call(fail, OSError("disk"))
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        await threads.call(fail, StopIteration(1))
    assert isinstance(raised.value.__cause__, StopIteration)
    with pytest.raises(RuntimeError, match="StopAsyncIteration"):
        await threads.call(fail, StopAsyncIteration(1))
    threads.close()
    join("jobs-c")


async def test_a_thread_that_has_not_left_its_call_holds_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that catches it decides how long it lives, even while its thread still wakes the loop."""
    threads = JobThreads(1, "jobs-k")
    go, notify = threading.Event(), threads.notify

    def notify_and_stay(*notice: Any) -> None:
        notify(*notice)
        go.wait(20)

    def fail(_: Any) -> Any:
        raise Held

    monkeypatch.setattr(threads, "notify", notify_and_stay)
    held: list[weakref.ref[Held]] = []
    try:
        await threads.call(fail, None)
    except Held as error:
        held.append(weakref.ref(error))
    await asyncio.sleep(0)  # the callback that woke this task holds the future, which holds the error
    assert held[0]() is None
    go.set()
    threads.close()
    join("jobs-k")


async def test_a_cancelled_call_that_has_not_begun_never_does() -> None:
    """If the call is cancelled while the only thread is busy, its job is skipped."""
    threads = JobThreads(1, "jobs-d")
    go, ran = threading.Event(), list[int]()
    busy = threads.call(lambda _: go.wait(20), None)
    dropped = threads.call(ran.append, 1)
    after = threads.call(ran.append, 2)
    dropped.cancel()
    go.set()
    await busy
    await after
    assert ran == [2]
    threads.close()
    join("jobs-d")


async def test_closing_does_not_wait_for_a_stuck_job() -> None:
    """`close` returns while a job is stuck; jobs put later are dropped; the thread ends with the job."""
    threads = JobThreads(1, "jobs-e")
    begun, go = threading.Event(), threading.Event()

    def stuck(_: Any) -> None:
        begun.set()
        go.wait(20)

    waiting = threads.call(stuck, None)
    await asyncio.to_thread(begun.wait, 20)
    threads.close()
    threads.put(lambda: pytest.fail("a job ran in closed threads"))
    assert not waiting.done()
    go.set()
    join("jobs-e")
    assert not named("jobs-e")


async def test_threads_without_a_user_end() -> None:
    """The threads hold no reference to the `JobThreads` object."""
    threads: JobThreads | None = JobThreads(2, "jobs-f")
    assert threads is not None
    await threads.call(abs, -1)
    del threads
    gc.collect()
    join("jobs-f")
    assert not named("jobs-f")


def test_a_loop_that_is_gone_is_told_nothing() -> None:
    """A job that ends after its loop was closed does no harm."""
    threads = JobThreads(1, "jobs-g")
    go = threading.Event()

    async def leave() -> None:
        threads.call(lambda _: go.wait(20), None)

    asyncio.run(leave())
    go.set()
    threads.close()
    join("jobs-g")
    assert not named("jobs-g")

    async def again() -> int:
        other = JobThreads(1, "jobs-h")
        try:
            return int(await other.call(abs, -2))
        finally:
            other.close()

    assert asyncio.run(again()) == 2
    join("jobs-h")


async def test_without_any_thread_a_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one or more of them all calls run; the next call tries again to start the first."""
    threads = JobThreads(2, "jobs-i")

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.call(abs, -1)
    assert await threads.call(abs, -1) == 1
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert [await threads.call(abs, -number) for number in range(3)] == [0, 1, 2]
    threads.close()
    join("jobs-i")
