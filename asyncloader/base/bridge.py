"""Runs coroutines for sync code: a private event loop in a daemon thread.

Data path: loader -> [bridge] -> pipeline.

The loop never runs in the caller's thread, so it works in scripts, threads, notebooks and under a running loop. The
thread exists only between the first `acquire` and the last `release`: between epochs a process that forks has no thread
of ours.

Guarantees: `call_soon` returns at once and keeps the order of the calls from one thread; the loop is woken once for
several calls. After a fork the child's copy raises an error instead of waiting for a thread that does not exist there.
`release_soon`, for finalizers, takes no lock and does not wait. `wait_for_releases` waits for the iterators that were
dropped this way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from time import monotonic
from typing import Any, Generic, TypeVar, cast

from asyncloader.base.process_hooks import THIS_PROCESS, own_pid
from asyncloader.errors import LoaderClosed

try:
    # Imported with this module, not at the first `iter()`: it takes as long as starting a worker.
    import uvloop
except ImportError:  # not on Windows, and not required elsewhere
    uvloop = None  # type: ignore[assignment]

T = TypeVar("T")

_GONE = "the loader's event loop is gone: {}; make a new iterator"
_CLOSED = _GONE.format("it was closed")
_INHERITED = _GONE.format("this is a forked child of the process that made it")

RELEASE_SECONDS = 10.0
"""Longest wait for the end of dropped iterators: more than workers and datasets get to end."""
SIGNALS_S = 1.0
"""Seconds after which a thread that waits handles signals, if none has ended its wait. CPython looks for signals before
it waits for a lock, and a signal that comes just then, or to another thread, does not end the wait: without a limit
Ctrl-C would be lost.
"""

# Loop threads of this process that have not ended.
_running: set[threading.Thread] = set()


def join_all(seconds: float) -> None:
    """Wait until no loop thread runs, at most this long. For the exit of the process, after all iterators were closed.

    Finalization ends a running daemon thread wherever it is, and aborts the process if that is in C++ code.
    """
    deadline = monotonic() + seconds
    # A copy: each thread takes itself out when it ends.
    for thread in list(_running):
        thread.join(max(0.0, deadline - monotonic()))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's loop where it is installed, asyncio's otherwise.

    Also asyncio's in a program without standard input, output or error, as a daemon may be: the loop would get one of
    their numbers, and libuv aborts the process when it closes a descriptor below 3.
    """
    if uvloop is None:
        return asyncio.new_event_loop
    try:
        for descriptor in range(3):
            os.fstat(descriptor)
    except OSError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class Bridge:
    """A loop thread that starts when first acquired and ends when last released."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._releasing: deque[object] = deque()  # one entry per `release_soon` that is not finished
        self._thread: threading.Thread | None = None
        self._last_thread: threading.Thread | None = None  # the newest thread, also while it is ending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = threading.Event()  # set when the loop's thread must end
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._woken = False
        self._owner = os.getpid()

    @property
    def in_loop_thread(self) -> bool:
        """Whether the caller is the loop's own thread, which must not wait for itself."""
        return self._thread is threading.current_thread()

    @property
    def running(self) -> bool:
        """Whether the thread runs in this process."""
        return self._thread is not None and os.getpid() == self._owner

    def acquire(self) -> None:
        """Start the thread unless it runs. Pair with `release`."""
        with self._lock:
            if self._thread is None:
                self._start()
            # Counted only now: the caller of a start that failed does not release.
            self._users += 1

    def _start(self) -> None:
        # Made in its thread, where Ctrl-C does not come: a loop that is half made would leave its descriptors.
        made, ready, over = list[asyncio.AbstractEventLoop | BaseException](), threading.Event(), threading.Event()
        thread = threading.Thread(target=_run, args=(made, ready, over), name="asyncloader-loop", daemon=True)
        try:
            thread.start()
            ready.wait()
            loop = made[0]
            if isinstance(loop, BaseException):
                raise loop
            self._owner = THIS_PROCESS.pid or own_pid()
            # Calls of iterators that have ended: this loop must not run them, and its first call must wake it. Not only
            # in `release`: another thread's call may come just behind it, and the loop of before accept it without
            # running it.
            self._calls.clear()
            self._woken = False
            self._last_thread = thread
            self._loop, self._thread, self._over = loop, thread, over
        except BaseException:  # Ctrl-C: the thread may run already
            self._loop = self._thread = None
            over.set()
            for each in made:
                if not isinstance(each, BaseException):
                    with contextlib.suppress(RuntimeError):  # it is closed
                        each.call_soon_threadsafe(each.stop)
            raise

    def release(self) -> None:
        """End the thread if this was the last user, and wait for it, except in its own thread."""
        with self._lock:
            self._users -= 1
            if self._users or self._thread is None or self._loop is None:
                return
            thread, loop, over = self._thread, self._loop, self._over
            self._thread = self._loop = None
            # Calls of iterators that have ended: they must not keep these in memory until the next start.
            self._calls.clear()
        if os.getpid() != self._owner:
            return
        # In this order: a loop that is stopped before the thread knows that it is over would be run again.
        over.set()
        loop.call_soon_threadsafe(loop.stop)
        # Outside of the lock, which the loop's thread takes when a dropped iterator has ended (`_on_ended`).
        if thread is not threading.current_thread():
            thread.join()

    def release_soon(self, ending: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """`release` for finalizers: the loop runs ``ending(*args)`` and then releases. Does not wait. Any thread."""
        # No lock, no wait: a finalizer runs in any thread, which may hold a lock that the loop's thread needs; and a
        # daemon thread never runs again once the interpreter is finalizing.
        loop = self._loop
        if loop is None or os.getpid() != self._owner:
            return
        # Before the call: the loop may run it, and take an entry out, at once. Entries are only counted, so it does not
        # matter whose is taken out.
        self._releasing.append(ending)
        try:
            loop.call_soon_threadsafe(self._start_ending, ending, args)
        except RuntimeError:  # the loop is closed, so there is nothing to end
            self._releasing.pop()

    def _start_ending(self, ending: Callable[..., Coroutine[Any, Any, None]], args: tuple[Any, ...]) -> None:
        task = asyncio.get_running_loop().create_task(ending(*args))
        task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "the end of an iterator that was dropped failed", "exception": error}
            )
        # In this order: `wait_for_releases` must not count an ending whose user has left, or it would wait for a thread
        # that others use.
        self._releasing.popleft()
        self.release()

    def wait_for_releases(self, seconds: float = RELEASE_SECONDS) -> None:
        """Wait for all pending `release_soon` and the end of the thread, at most this long. Returns at once if the loop
        has other users. Not for finalizers.
        """
        thread = self._last_thread
        if thread is None or os.getpid() != self._owner or thread is threading.current_thread():
            return
        # All users are about to release, and the last of them ends the thread.
        if self._users <= len(self._releasing):
            thread.join(seconds)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function` in the loop, after all earlier calls. Does not wait.

        Raises:
            LoaderClosed: the loop has ended.
        """
        loop = self._loop
        if loop is None or THIS_PROCESS.pid != self._owner:
            loop = self._live_loop()  # raises
        # Added before `_woken` is read: `_run_calls` clears that before it reads the calls. So it either finds this
        # call, or the loop is woken again.
        self._calls.append((function, args))
        if not self._woken:
            try:
                # Before the loop is woken: it may run `_run_calls` before this thread goes on.
                self._woken = True
                loop.call_soon_threadsafe(self._run_calls)
            except BaseException as error:  # Ctrl-C: the caller repeats the call, or the next call wakes the loop
                self._woken = False
                if isinstance(error, RuntimeError):  # `release`, in another thread, has closed the loop since
                    self._live_loop()  # raises
                raise

    def _run_calls(self) -> None:
        # Cleared first, so that any later call wakes the loop again.
        self._woken = False
        calls = self._calls
        while calls:
            function, args = calls.popleft()
            try:
                function(*args)
            except Exception as error:  # the remaining calls must not wait for the next wake-up
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"call of {function!r} through the bridge failed", "exception": error}
                )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it. Ctrl-C cancels it.

        Raises:
            LoaderClosed: the loop has ended.
            RuntimeError: called from the loop's own thread.
        """
        call = Call(coroutine)
        try:
            return self.wait(call)
        except BaseException:
            loop = self._loop
            if not call.over and loop is not None:  # Ctrl-C
                # In the loop, which may not have launched it yet: the two calls keep their order.
                loop.call_soon_threadsafe(call.cancel)
            raise

    def wait(self, call: Call[T]) -> T:
        """Run a call in the loop and wait for it, as `run`; but after Ctrl-C it goes on and can be waited for again."""
        if self.in_loop_thread:
            call.discard()
            raise RuntimeError("a loader's own loop cannot wait for itself")
        try:
            loop = self._live_loop()
            # Again after Ctrl-C, which may have come before it: a call that was launched ignores it.
            loop.call_soon_threadsafe(call.launch, loop)
        except BaseException as error:
            if isinstance(error, (RuntimeError, LoaderClosed)):  # not Ctrl-C
                call.discard()
                self._live_loop()  # raises, as in `call_soon`
            raise
        call.join()
        try:
            return call.result()
        except asyncio.CancelledError:
            if self._loop is not loop:  # `release`, in another thread, has ended the loop, which cancelled it
                raise LoaderClosed(_CLOSED) from None
            raise

    def _live_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is None or os.getpid() != self._owner:
            raise LoaderClosed(_CLOSED if os.getpid() == self._owner else _INHERITED)
        return loop


class Call(Generic[T]):
    """A coroutine that runs in a bridge's loop, for a thread that waits for it, by `Bridge.wait`."""

    # Not run_coroutine_threadsafe: its two futures refer to each other, and would keep the result, such as a batch,
    # until the garbage collector runs.
    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine: Coroutine[Any, Any, T] | None = coroutine
        self._task: asyncio.Task[T] | None = None
        self._answers: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.over = False
        """Whether it has raised, or has not run: it cannot be waited for again."""

    def launch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to run, the first time that this is called. In the loop's thread."""
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            self._task = loop.create_task(coroutine)
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # marked as retrieved: perhaps no thread waits any more
        self._answers.put(None)

    def cancel(self) -> None:
        """Cancel it. In the loop's thread."""
        if self._task is None:
            self.discard()
        else:
            self._task.cancel()

    def discard(self) -> None:
        """Do not run it: it was not launched."""
        self.over = True
        coroutine, self._coroutine = self._coroutine, None
        if coroutine is not None:
            coroutine.close()  # Python would warn that it was never awaited

    def join(self) -> None:
        """Wait until it has ended."""
        # The task is asked, as Ctrl-C may lose the answer that was taken.
        while self._task is None or not self._task.done():
            with contextlib.suppress(queue.Empty):
                self._answers.get(timeout=SIGNALS_S)

    def result(self) -> T:
        """Return the result, or raise the error."""
        task = self._task
        assert task is not None
        try:
            return task.result()
        except BaseException:
            self.over, self._task = True, None
            raise
        finally:
            del task  # an error's traceback refers to this frame


async def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function in a thread that has ended when this returns; in this thread if none can be started.

    Not in the loop's default executor: its threads may all be busy with calls of the program that take long, and it
    keeps the interpreter from exiting until they end. If the caller is cancelled, the call continues and its result, or
    its error, is dropped. The context is a copy of the caller's.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    outcome: list[tuple[T | None, BaseException | None]] = []

    def call() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_finish, done)

    thread = threading.Thread(target=copy_context().run, args=(call,), name="asyncloader-call", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at exit
        return function()
    await done
    # Passing the outcome on is the thread's last act, so this hardly holds up the loop.
    thread.join()
    result, error = outcome.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame
    return cast("T", result)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():  # the caller may have been cancelled
        done.set_result(None)


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new loop and thread, which has ended when this returns. Works under a running loop, too. The
    context is a copy of the caller's.
    """
    bridge = Bridge()
    try:
        bridge.acquire()
    except BaseException:
        coroutine.close()  # Python would warn that it was never awaited
        raise
    try:
        return bridge.run(coroutine)
    finally:
        bridge.release()


def run_until(over: Callable[[], bool], run: Callable[[], object]) -> None:
    """Run an event loop again and again until `over`."""
    while not over():
        # A task that raises one of these stops the loop; the code that awaits the task gets the error, too.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            run()


def _run(made: list[asyncio.AbstractEventLoop | BaseException], ready: threading.Event, over: threading.Event) -> None:
    _running.add(threading.current_thread())
    try:
        loop = loop_factory()()
        made.append(loop)  # in this order: who sets `over` looks for a loop to be stopped afterwards
    except BaseException as error:
        made.append(error)
        _running.discard(threading.current_thread())
        return
    finally:
        ready.set()
    asyncio.set_event_loop(loop)
    try:
        run_until(over.is_set, loop.run_forever)
    finally:
        # In the order of `asyncio.run`: tasks, asynchronous generators, the loop.
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        _running.discard(threading.current_thread())
