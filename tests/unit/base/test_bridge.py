from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncloader.base.bridge import Bridge, in_thread, run_in_thread
from asyncloader.errors import LoaderClosed
from tests.helpers.interrupting import Interrupt, Interruption, unnoticed_signal

pytestmark = pytest.mark.loops


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    bridge = Bridge()
    bridge.acquire()
    yield bridge
    bridge.release()


async def loop_thread() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    return asyncio.get_running_loop(), threading.current_thread()


def test_run_gives_the_result_or_the_error(bridge: Bridge) -> None:
    """The caller gets the coroutine's outcome."""

    async def give(value: int) -> int:
        await asyncio.sleep(0)
        if value < 0:
            raise KeyError(value)
        return value

    assert bridge.run(give(5)) == 5
    with pytest.raises(KeyError):
        bridge.run(give(-1))


def test_calls_keep_their_order(bridge: Bridge) -> None:
    """All calls of one thread are made, in the order in which they were requested."""
    seen: list[int] = []
    for number in range(1000):
        bridge.call_soon(seen.append, number)
    done = threading.Event()
    bridge.call_soon(done.set)
    assert done.wait(60)
    assert seen == list(range(1000))


def test_a_failing_call_does_not_hold_up_the_others(bridge: Bridge, caplog: pytest.LogCaptureFixture) -> None:
    """Calls behind a call that raises are still made; the error goes to the loop's handler."""
    caplog.set_level(logging.CRITICAL + 1, logger="asyncio")
    go, done = threading.Event(), threading.Event()
    told: list[BaseException | None] = []

    async def listen() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))

    def fail() -> None:
        raise KeyError("mine")

    bridge.run(listen())
    bridge.call_soon(go.wait, 60)
    bridge.call_soon(fail)
    bridge.call_soon(done.set)
    go.set()
    assert done.wait(60)
    assert [repr(error) for error in told] == ["KeyError('mine')"]


def test_the_loops_thread_cannot_wait_for_itself(bridge: Bridge) -> None:
    """`run` in the loop's own thread raises instead of hanging, and the coroutine is not left unawaited."""

    async def reenter() -> str:
        assert bridge.in_loop_thread
        with pytest.raises(RuntimeError, match="cannot wait for itself"):
            bridge.run(asyncio.sleep(0))
        return "refused"

    assert bridge.run(reenter()) == "refused"


def test_thread_lives_from_first_acquire_to_last_release() -> None:
    """Users share one thread; the last release ends it."""
    bridge = Bridge()
    bridge.acquire()
    first = bridge.run(loop_thread())[1]
    bridge.acquire()
    assert bridge.run(loop_thread())[1] is first
    bridge.release()
    assert first.is_alive()
    bridge.release()
    assert not first.is_alive()


def test_a_call_that_a_release_overtakes_does_not_stop_the_next_loop() -> None:
    """The call may reach the loop that was released, which runs it no more or is closed. The next loop does not run it
    either, and runs the calls after it.
    """
    bridge = Bridge()
    seen: list[str] = []
    for closed in (False, True):
        bridge.acquire()

        class Released:
            """The loop, released while the call is on its way. It is closed, or about to be."""

            def call_soon_threadsafe(self, *_: object, loop: Any = bridge._loop, closed: bool = closed) -> None:
                bridge._loop = loop
                bridge.release()
                bridge._calls.append((seen.append, ("late",)))
                bridge._woken = True
                if closed:
                    loop.call_soon_threadsafe(print)

        bridge._loop = cast("Any", Released())
        if closed:
            with pytest.raises(LoaderClosed, match="it was closed"):
                bridge.call_soon(seen.append, "late")
        else:
            bridge.call_soon(seen.append, "late")
    bridge.acquire()
    done = threading.Event()
    bridge.call_soon(done.set)
    assert done.wait(60)
    bridge.release()
    assert not seen


def test_a_closed_bridge_says_so_every_time_and_can_start_again() -> None:
    """Without a loop each call and each run raises; a later start is not harmed."""
    bridge = Bridge()
    for _ in range(3):
        with pytest.raises(LoaderClosed, match="it was closed"):
            bridge.call_soon(print, "never")
        with pytest.raises(LoaderClosed, match="it was closed"):
            bridge.run(asyncio.sleep(0))
    bridge.acquire()
    done = threading.Event()
    bridge.call_soon(done.set)
    assert done.wait(60)
    bridge.release()


def test_release_cancels_what_is_still_running() -> None:
    """Tasks of the loop are cancelled and awaited before its thread ends."""
    bridge = Bridge()
    bridge.acquire()
    ended: list[str] = []

    async def forever(started: threading.Event) -> None:
        started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("cleaned up")

    async def spawn(started: threading.Event) -> asyncio.Task[None]:
        return asyncio.ensure_future(forever(started))

    started = threading.Event()
    task = bridge.run(spawn(started))
    assert started.wait(60)
    bridge.release()
    assert ended == ["cleaned up"]
    assert task.cancelled()


def test_release_ends_a_call_that_another_thread_waits_for() -> None:
    """The caller learns that the loop has ended, and gets no CancelledError, which `except Exception` lets pass."""
    bridge, running = Bridge(), threading.Event()

    async def wait_for_ever() -> None:
        running.set()
        await asyncio.Event().wait()

    bridge.acquire()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(bridge.run, wait_for_ever())
        assert running.wait(60)
        bridge.release()
        with pytest.raises(LoaderClosed, match="it was closed"):
            waiting.result(60)
        del waiting


def test_release_from_the_loops_own_thread() -> None:
    """The loop's thread may release the bridge itself: it ends when the call is done."""
    bridge = Bridge()
    bridge.acquire()
    _, thread = bridge.run(loop_thread())
    bridge.call_soon(bridge.release)
    thread.join(60)
    assert not thread.is_alive()


def in_child(check: object) -> int:
    """Run `check` in a forked child; 0 if it passes there."""
    assert callable(check)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_at_once(bridge: Bridge) -> None:
    """In a forked child the thread is missing: waiting for it raises, and releasing it does nothing."""

    def check() -> None:
        for _ in range(2):
            with pytest.raises(LoaderClosed, match="forked child"):
                bridge.run(asyncio.sleep(0))
            with pytest.raises(LoaderClosed, match="forked child"):
                bridge.call_soon(print, "never")
        bridge.release()

    assert in_child(check) == 0
    assert bridge.run(asyncio.sleep(0, "alive")) == "alive"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_may_start_its_own(bridge: Bridge) -> None:
    """Once the child has released its parent's loop, it can have a loop of its own."""

    def check() -> None:
        bridge.release()
        bridge.acquire()
        assert bridge.run(asyncio.sleep(0, "own")) == "own"
        bridge.release()

    assert in_child(check) == 0


def test_a_program_without_standard_files() -> None:
    """Has loops that do not abort it: libuv does, when it closes a descriptor below 3."""

    def check() -> None:
        for descriptor in range(3):
            os.close(descriptor)
        assert run_in_thread(asyncio.sleep(0, "done")) == "done"

    assert in_child(check) == 0


def test_an_interrupted_call_does_not_stop_those_after_it(bridge: Bridge) -> None:
    """Ctrl-C may strike just where the loop is to be woken: the next call wakes it, for both calls."""
    loop = bridge._loop
    assert loop is not None
    done: list[int] = []
    heard = threading.Event()

    class Interrupted:
        def call_soon_threadsafe(self, *_: object) -> None:
            raise KeyboardInterrupt

    bridge._loop = Interrupted()  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            bridge.call_soon(done.append, 1)
    finally:
        bridge._loop = loop
    bridge.call_soon(done.append, 2)
    bridge.call_soon(heard.set)
    assert heard.wait(60)
    assert done == [1, 2]


@pytest.mark.parametrize("leaving", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("fast", [True, False])
def test_a_task_that_exits_ends_the_call_and_not_the_loop(
    leaving: type[BaseException], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets the exception of the task, or of a task it waits for; the thread goes on until it is released."""
    if not fast:
        monkeypatch.setattr("asyncloader.base.bridge.uvloop", None)
    bridge = Bridge()
    bridge.acquire()
    _, thread = bridge.run(loop_thread())

    async def leave() -> None:
        raise leaving("why")

    async def wait_for_it() -> None:
        await asyncio.ensure_future(leave())

    for coroutine in (leave(), wait_for_it()):
        with pytest.raises(leaving, match="why"):
            bridge.run(coroutine)
    assert bridge.run(loop_thread())[1] is thread
    bridge.release()
    assert not thread.is_alive()


def test_a_signal_ends_a_coroutine_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes just before the wait. The coroutine is cancelled, and its thread has ended when the caller
    gets the KeyboardInterrupt.
    """
    waiting, ended = threading.Event(), list[threading.Thread]()

    class Answers(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            waiting.set()
            return super().get(block, timeout)

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(threading.current_thread())

    monkeypatch.setattr("asyncloader.base.bridge.queue", SimpleNamespace(SimpleQueue=Answers, Empty=queue.Empty))
    with unnoticed_signal(waiting.is_set), pytest.raises(Interrupt):
        run_in_thread(wait())
    (thread,) = ended
    assert not thread.is_alive()


async def test_a_thread_gives_its_call_s_result_or_error() -> None:
    """No reference to the call's error is kept once it was caught; the end of an iterator is an error here."""

    class Held:
        pass

    async def fails() -> None:
        held = Held()
        refs.append(weakref.ref(held))
        await in_thread(partial(dict[Any, Any]().__getitem__, held))

    refs: list[weakref.ref[Held]] = []
    assert await in_thread(partial(divmod, 7, 2)) == (3, 1)
    gc.disable()
    try:
        with pytest.raises(KeyError):
            await fails()
        await asyncio.sleep(0)  # the callback that woke this task holds the future
        assert refs[0]() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError):
        await in_thread(partial(next, iter(())))


async def test_a_call_whose_caller_is_cancelled_goes_on() -> None:
    """Neither its result nor its error reaches the cancelled caller."""
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        released.wait(60)
        ended.set()
        raise KeyError

    caller = asyncio.ensure_future(in_thread(call))
    await in_thread(partial(begun.wait, 60))
    caller.cancel()
    await asyncio.wait([caller])
    assert not ended.is_set()
    released.set()
    assert await in_thread(partial(ended.wait, 60))


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coroutine is closed, so Python does not warn that it was never awaited."""

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    coroutine = loop_thread()
    with pytest.raises(RuntimeError, match="can't start"):
        run_in_thread(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_ctrl_c_at_every_place_of_the_start() -> None:
    """It leaves no thread, and no descriptors of a loop (the leak check would find them)."""
    struck = at = 0
    while struck == at:
        at += 1
        bridge = Bridge()
        try:
            with Interruption(at, [Bridge._start]):
                bridge.acquire()
        except KeyboardInterrupt:
            struck += 1
            assert not bridge.running
        else:
            bridge.release()
    assert struck > 5
