"""What a worker process does: receive tasks, fetch, collate into the slot, answer.

Data path: scheduler -> channel -> [worker: fetch -> collate -> ring slot] -> channel -> reorder.

Two shells around one `TaskRunner`: a blocking loop for plain datasets (an event loop would add its turn to every batch
and could overlap nothing), and an event loop for asynchronous ones, where the tasks in hand are fetched concurrently.

A worker holds no lock and shares no state with anybody: it reads tasks from its socket, writes to the slot that a task
names, and answers. It can be killed at any instruction without harm to others.

It ends when it is told to (STOP), when its socket ends, or when its parent dies, in whatever state it is: the kernel
kills it (`lifeline.py`); where it cannot be asked to, a thread waits for the parent's pidfd. End of the socket alone
would not do: a sibling forked between two `socketpair` calls, or a process that the user's dataset forked, may hold the
other end open.

How a worker process keeps its garbage collector and its allocator from doing the same work over and over.

Data path: worker start-up, before the first task. A worker is ours alone: nobody else's process is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable

from asyncloader.workers import stacks
from asyncloader.workers.fetch.setup import Links, WorkerSetup
from asyncloader.workers.ipc import lifeline, wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.setup_payload import InheritedFd, Payload
from asyncloader.workers.task_runner import TaskRunner

__all__ = [
    "tune",
    "worker_main",
]


def worker_main(worker_id: int, links: Links, setup: WorkerSetup | Payload) -> None:
    """Entry point of a worker process.

    Args:
        worker_id: 0 to ``num_workers - 1``.
        links: the descriptors that it shares with the main process.
        setup: the common set-up, pickled unless the process was forked.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's business; it will stop us
    lifeline.hold(links.lifeline.fd)
    _end_with_parent(links.parent)
    stacks.install(links.stacks.fd)
    channel = Channel(socket.socket(fileno=links.control.fd))
    try:
        runner = TaskRunner(worker_id, channel, setup)
        tune(concurrent=runner.asynchronous)
        if runner.asynchronous:
            _serve_async(runner)
        else:
            _serve_blocking(runner)
    except ConnectionError:
        pass  # the main process closed its end: nobody waits for an answer
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
        queue.control([event], 1, None)


# ------------------------------------------------------------------------------------------------- the two shells


def _serve_blocking(runner: TaskRunner) -> None:
    channel = runner.channel
    inbox: deque[tuple[int, bytes]] = deque()
    while not runner.stopped:
        # Look into the socket before each task: STOP overtakes the tasks before it.
        _receive(channel, inbox, wait=not inbox)
        if channel.ended and not inbox:
            return
        if not inbox:
            continue
        kind, body = inbox.popleft()
        if kind != wire.TASK:
            runner.control(kind, body)
            continue
        if runner.outgrown:
            runner.retire()
            return
        runner.task(body)


def _receive(channel: Channel, inbox: deque[tuple[int, bytes]], *, wait: bool) -> None:
    for kind, body in channel.receive(wait=wait):
        if kind == wire.STOP:
            inbox.clear()  # nobody will look at what comes of them
        # RESET does not overtake: torch's workers carry out the tasks of an abandoned epoch, too, and the random
        # numbers that these take are not there for the next one.
        inbox.append((kind, body))


def _serve_async(runner: TaskRunner) -> None:
    with asyncio.Runner(loop_factory=_loop_factory()) as loop_runner:
        loop_runner.run(_run_shell(runner))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _AsyncShell:
    """The event loop's side of an asynchronous worker: one asyncio task for each task in hand."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._retiring = False

    async def run(self) -> None:
        fd = self._runner.channel.fileno()
        self._loop.add_reader(fd, self._readable)
        opening = self._loop.create_task(self._runner.open()) if self._runner.opens else None
        try:
            await self._done
        finally:
            self._loop.remove_reader(fd)
            if opening is not None:
                self._tasks.add(opening)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._runner.close()

    def _readable(self) -> None:
        channel = self._runner.channel
        try:
            for kind, body in channel.receive():
                self._take(kind, body)
        except Exception as error:
            self._end(error)
        if self._runner.stopped or channel.ended:
            self._end(None)

    def _take(self, kind: int, body: bytes) -> None:
        if self._retiring and kind not in (wire.ASSIGNMENT, wire.RESET, wire.STOP):
            return  # for the one that comes in its place
        if kind == wire.TASK and self._runner.outgrown:
            self._retiring = True
            self._retire()
        elif kind == wire.TASK:
            task = self._loop.create_task(self._runner.task_async(body))
            self._tasks.add(task)
            task.add_done_callback(self._finished)
        elif kind == wire.RESET:
            for task in self._tasks:
                task.cancel()
            if not self._retiring:
                self._runner.control(kind, body)
        else:
            self._runner.control(kind, body)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._end(task.exception())
        elif self._retiring:
            self._retire()

    def _retire(self) -> None:
        """Leave when the tasks in hand are answered. They may have to wait for shard assignments. No more are taken."""
        if not self._tasks and not self._done.done():
            self._runner.retire()
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


async def _run_shell(runner: TaskRunner) -> None:
    await _AsyncShell(runner).run()


_PYTHONS_THRESHOLDS = (700, 2000)
"""New objects after which the youngest are collected where nobody has said otherwise: up to Python 3.12, and since."""

_IN_FLIGHT = 50_000
"""The same where hundreds of samples are in hand. Not more: it bounds what garbage in cycles holds on to."""

# Of <malloc.h>: which setting, and its value.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ((_TRIM_THRESHOLD, 256 << 20), (_TOP_PAD, 16 << 20), (_MMAP_THRESHOLD, 64 << 20))


def tune(*, concurrent: bool) -> None:
    """Set this worker up.

    What was there before the first task (torch's modules, the dataset) is not looked at by the collector again; a
    forked worker's pages stay shared, besides.

    Samples in flight outlive collections of the youngest objects, for nothing: a few hundred are some ten thousand
    objects, so the collector looks when there are several times as many. And the buffers of their bodies come and go by
    the megabyte: glibc would give pages back and fault them in again for each wave. (Together a third of the CPU that a
    remote read costs. A worker's heap stays at its peak; the main process is left alone.) What the user has set stands.

    Args:
        concurrent: hundreds of samples are in hand at a time.
    """
    gc.freeze()
    if not concurrent:
        return
    if gc.get_threshold()[0] in _PYTHONS_THRESHOLDS:
        gc.set_threshold(_IN_FLIGHT, 20, 50)
    if sys.platform.startswith("linux") and not any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another libc has none
        if mallopt is not None:
            for setting, value in _SETTINGS:
                mallopt(setting, value)
