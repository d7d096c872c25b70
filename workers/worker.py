"""The main function of a worker process: receives frames and has a `TaskRunner` carry out the tasks.

Data path: scheduler -> channel -> [worker: fetch -> collate -> ring slot] -> channel -> reorder.

There are two main loops. Plain datasets have a blocking loop. Asynchronous datasets have an event loop, where several
tasks are fetched concurrently.

A worker holds no lock and shares no state with other processes: it reads tasks from its socket, writes to the slot that
a task names, and answers. So it can be killed at any instruction without harm to others.

A worker ends on a STOP frame, at the end of its socket, or when its parent dies.

`tune` sets the garbage collector and the allocator of the worker process before its first task.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import pickle
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, runtime_checkable

from asyncloader.base.bridge import loop_factory, run_until
from asyncloader.telemetry.counters import RECORD_BYTES, Recorder, record_process
from asyncloader.workers import stacks
from asyncloader.workers.default_signals import set_worker_signals
from asyncloader.workers.fetch.setup import Links, WorkerSetup
from asyncloader.workers.ipc import lifeline, segment, wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.setup_payload import InheritedFd, Payload
from asyncloader.workers.task_runner import TaskRunner


@runtime_checkable
class Program(Protocol):
    """The main function of a process that has more than one worker, as a service's processes have."""

    def run(self, channel: Channel, recorder: Recorder, entered: float) -> None:
        """Run until the main process closes the channel."""


def worker_main(
    started: float, entered: float, worker_id: int, links: Links, setup: WorkerSetup | Payload | Program
) -> None:
    """Entry point of a worker process.

    Args:
        started: when the main process began to start it.
        entered: when it began.
        worker_id: 0 to ``num_workers - 1``.
        links: the descriptors shared with the main process.
        setup: the common set-up, pickled unless the process was forked; or another program.
    """
    # First: until then all signals are blocked in a forked worker, SIGTERM included.
    set_worker_signals()
    # Before the set-up is unpickled, which runs code of the user's: whatever that does, the worker ends with its
    # parent.
    lifeline.hold(links.lifeline.fd)
    # The end of the socket alone would not show that the parent has died: a sibling that was forked between two calls
    # of `socketpair`, or a process that the user's dataset forked, may hold the other end open. Nor does the lifeline
    # work everywhere.
    _end_with_parent(links.parent)
    # After `set_worker_signals`, which removes the handlers of `faulthandler`.
    stacks.install(links.stacks.fd)
    recorder = Recorder(segment.map_segment(links.records.fd, RECORD_BYTES))
    # The mapping stays.
    os.close(links.records.fd)
    record_process(recorder)
    recorder.time("start_process", entered - started)
    channel = Channel(socket.socket(fileno=links.control.fd))
    relay_log(channel.send_all)
    try:
        if isinstance(setup, Program):
            setup.run(channel, recorder, entered)
            return
        runner = TaskRunner(worker_id, channel, setup, recorder, entered)
        tune(concurrent=runner.asynchronous)
        if runner.asynchronous:
            serve_async(AsyncTaskLoop.of(runner))
        else:
            # No event loop: it would cost time for every batch, and could overlap nothing.
            try:
                _serve_blocking(runner)
            finally:
                runner.close_reader()
    except ConnectionError:
        pass  # the main process closed its end
    finally:
        channel.close()


def _end_with_parent(parent: InheritedFd | None) -> None:
    def wait_for_parent() -> None:
        if parent is not None:
            poll = select.poll()
            poll.register(parent.fd, select.POLLIN)
            poll.poll()
        else:
            _wait_for_parent_kqueue()
        # Not `sys.exit`: it would end this thread alone.
        os._exit(1)

    if parent is not None or hasattr(select, "kqueue"):
        threading.Thread(target=wait_for_parent, name="asyncloader-parent", daemon=True).start()


def _wait_for_parent_kqueue() -> None:  # pragma: no cover - macOS
    queue = select.kqueue()  # type: ignore[attr-defined,unused-ignore]
    parent = os.getppid()
    event = select.kevent(  # type: ignore[attr-defined,unused-ignore]
        parent,
        filter=select.KQ_FILTER_PROC,  # type: ignore[attr-defined,unused-ignore]
        flags=select.KQ_EV_ADD,  # type: ignore[attr-defined,unused-ignore]
        fflags=select.KQ_NOTE_EXIT,  # type: ignore[attr-defined,unused-ignore]
    )
    with contextlib.suppress(ProcessLookupError):
        # An error here means that it has ended already.
        queue.control([event], 1, None)


# ---------------------------------------------------------------------------------------------- the main loops


def _serve_blocking(runner: TaskRunner) -> None:
    channel = runner.channel
    inbox: deque[tuple[int, bytes]] = deque()
    readable = select.poll()
    readable.register(channel.sock, select.POLLIN)
    while not runner.stopped:
        # Read the socket before each task: a STOP takes effect before the tasks that are queued.
        _receive(channel, inbox, readable, wait=not inbox)
        if channel.ended:
            return  # the main process leaves, or has ended: it reads no more answers
        if not inbox:
            continue
        kind, body = inbox.popleft()
        if kind != wire.TASK:
            runner.control(kind, body)
            continue
        if runner.over_memory_limit:
            runner.leave()
            return
        runner.task(body)


def _receive(channel: Channel, inbox: deque[tuple[int, bytes]], readable: select.poll, *, wait: bool) -> None:
    # Until nothing is left: a STOP, or the socket's end, may be behind tasks. `poll` takes a seventh of the time of a
    # read that finds nothing and fails.
    while not channel.ended and (wait or readable.poll(0)):
        for kind, body in channel.receive(wait=wait):
            if kind == wire.STOP:
                inbox.clear()  # the main process reads no more answers
            # A RESET waits for the tasks queued before it: torch's workers also finish the tasks of an abandoned epoch,
            # and the random numbers drawn there change those of the next epoch.
            inbox.append((kind, body))
        wait = False


def serve_async(serve: Callable[[], Coroutine[Any, Any, None]], *, in_thread: bool = False) -> None:
    """Run a coroutine on an event loop of its own; `in_thread`: also on after a task has raised SystemExit or
    KeyboardInterrupt, which end a process.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as loop_runner:
        if not in_thread:
            loop_runner.run(serve())
            return
        loop = loop_runner.get_loop()
        serving = loop.create_task(serve())
        run_until(serving.done, partial(loop.run_until_complete, serving))
        serving.result()


class AsyncTaskLoop:
    """The main loop of an asynchronous worker: one asyncio task per task in progress. In the loop's thread."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner
        self._tasks: dict[asyncio.Task[None], int] = {}  # with the bytes of its frame
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._leaving = False

    @classmethod
    def of(cls, runner: TaskRunner) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return a function for `serve_async`, which makes the loop in the event loop, and runs it."""

        async def run() -> None:
            await cls(runner).run()

        return run

    async def run(self) -> None:
        """Carry out the worker's tasks until it is stopped, or its channel ends."""
        unlisten = self._runner.channel.listen(self._loop, self._readable)
        # Not awaited: while the dataset's context is entered, a STOP or the end of the channel must take effect.
        opening = self._loop.create_task(self._runner.open()) if self._runner.opens else None
        if opening is not None:
            opening.add_done_callback(partial(self._finished, at_task=False))
        try:
            await self._done
        finally:
            # First, so that no further task begins.
            unlisten()
            if opening is not None:
                self._tasks[opening] = 0
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # After the last task: the dataset's context is open as long as samples are read.
            await self._runner.close()

    def _readable(self) -> None:
        channel = self._runner.channel
        try:
            for kind, body in channel.receive():
                self._take(kind, body)
        except Exception as error:
            self._end(error)
            return
        if self._runner.stopped or channel.ended:
            self._end(None)

    def _take(self, kind: int, body: bytes) -> None:
        # Tasks in progress may still wait for an assignment; a RESET cancels them.
        if self._leaving and kind not in (wire.ASSIGNMENT, wire.RESET, wire.STOP):
            return  # the replacement gets this task
        if kind == wire.TASK and self._runner.over_memory_limit:
            self._leaving = True
            self._leave()
        elif kind == wire.TASK:
            task = self._loop.create_task(self._runner.task_async(body))
            self._tasks[task] = len(body)
            task.add_done_callback(self._finished)
        elif kind == wire.RESET:
            # Cancelled tasks end after RESET_DONE was sent: each compares its epoch with the worker's before it writes.
            for task in self._tasks:
                task.cancel()
            # A worker that leaves begins no further epoch: its replacement does.
            if not self._leaving:
                self._runner.control(kind, body)
        else:
            self._runner.control(kind, body)

    def _finished(self, task: asyncio.Task[None], *, at_task: bool = True) -> None:
        self._tasks.pop(task, None)
        # `task_async` answers an error of the user's code. An error here comes from answering: the channel has ended,
        # above all.
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._end(error, at_task=at_task)
        elif self._leaving:
            self._leave()

    def _leave(self) -> None:
        """Leave once all tasks in progress are answered."""
        if not self._tasks and not self._done.done():
            self._runner.leave()
            self._end(None)

    def _end(self, error: BaseException | None, *, at_task: bool = False) -> None:
        """Have `run` end, or raise this error; `at_task`: a task raised it. Idempotent."""
        del at_task
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


_DEFAULT_THRESHOLDS = (700, 2000)
"""Default thresholds of the youngest generation, until Python 3.12 and since."""

_CONCURRENT_THRESHOLD = 50_000
"""The threshold with hundreds of samples in flight; it also bounds the memory held by cyclic garbage."""

# Parameters of mallopt, from <malloc.h>, and their values.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ((_TRIM_THRESHOLD, 256 << 20), (_TOP_PAD, 16 << 20), (_MMAP_THRESHOLD, 64 << 20))


def tune(*, concurrent: bool) -> None:
    """Set the garbage collector and the allocator of this worker process. The user's own settings are kept.

    Objects that exist before the first task (torch's modules, the dataset) are frozen: the collector does not visit
    them again, and in a forked worker their pages stay shared.

    glibc would return the pages of freed samples to the system after each batch, and fault them in again for the next;
    so the heap keeps its peak size, up to 256 MiB. For samples of two arrays of 256 KiB, page faults took two thirds of
    a worker's CPU time.

    A few hundred samples in flight are some ten thousand objects, which survive every collection of the youngest
    generation; so the collector runs only after five times that number of allocations.

    Args:
        concurrent: hundreds of samples are in flight at a time.
    """
    gc.freeze()
    # Otherwise the user has set them, in the program that was forked or in `worker_init_fn`.
    if concurrent and gc.get_threshold()[0] in _DEFAULT_THRESHOLDS:
        gc.set_threshold(_CONCURRENT_THRESHOLD, 20, 50)
    if sys.platform.startswith("linux") and not any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
        if mallopt is not None:
            for setting, value in _SETTINGS:
                mallopt(setting, value)


class _Relay(logging.Handler):
    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():  # the channel is the main thread's
            logging.getLogger().callHandlers(record)
            return
        line = record.levelno, record.getMessage(), getattr(record, "store", None), getattr(record, "silent", False)
        with contextlib.suppress(ConnectionError):  # the main process closed its end
            self._send(wire.pack(wire.LOG, pickle.dumps(line)))


def relay_log(send: Callable[[bytes], None]) -> None:
    """Send the lines that this process logs as `asyncloader` to the main process, in frames given to `send`."""
    log = logging.getLogger("asyncloader")
    # In place of the handlers that a forked worker inherits: the main process's log would get each line twice.
    log.handlers[:], log.propagate = [_Relay(send)], False
