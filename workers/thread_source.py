"""A pool's workers in threads of this process.

Data path: loader -> pool -> [thread_source] -> worker thread.

Nothing is pickled and no process starts. A thread cannot be killed: a worker that is given up for taking too long goes
on until its call returns, and what it makes then is dropped.
"""

from __future__ import annotations

import asyncio
import copy
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from time import monotonic, perf_counter
from typing import Any

from torch.utils.data import MapDataPipe, default_collate

from asyncloader.errors import WorkerDied, warn_aside
from asyncloader.telemetry.counters import Recorder
from asyncloader.workers.fetch.dataset_kinds import MessagedDataset, is_async_dataset
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.inline_collate import inline_collate
from asyncloader.workers.ipc.ring import Ring
from asyncloader.workers.ipc.ring_manager import RingManager
from asyncloader.workers.link import ObjectCodec, Table, ThreadChannel, thread_channels
from asyncloader.workers.message_codec import MessageCodec
from asyncloader.workers.source import THREADS, WorkerHandle, WorkerSource
from asyncloader.workers.stacks import Report
from asyncloader.workers.thread_runner import Said, run_thread


class NoRing(RingManager):
    """Counts the tasks of one worker. The memory of outstanding batches is bounded as that of a ring's would be."""

    def __init__(self, credits: int, ring_bytes: int | None, *others: Any) -> None:
        del ring_bytes  # there is no ring that it could bound
        super().__init__(credits, None, *others)

    def replacement(self, most_bytes: int | None = None) -> Ring | None:
        """Return None."""
        del most_bytes
        return None

    def assign(self, epoch: int, seq: int) -> tuple[int, int]:
        """Note the task. Returns no ring and no slot."""
        self.tasks[epoch, seq] = None
        return 0, wire.NO_SLOT

    def answered(self, epoch: int, seq: int, slot: int, nbytes: int) -> Ring | None:
        """Note that the task was answered. The batch's size decides how many may be outstanding."""
        del slot  # there is none
        self.tasks.pop((epoch, seq), None)
        self._learn(nbytes)
        return None


_END_SECONDS = 8.0
"""Seconds that all threads of a pool together may take to end: as worker processes have."""


class ThreadWorker:
    """One worker thread. See `WorkerHandle`."""

    node = ""
    saved_rng_state: bytes | None = None
    outside = lost = False

    def __init__(self, worker_id: int, setup: WorkerSetup, said: Said) -> None:
        self.worker_id = worker_id
        self.pid = os.getpid()
        self.ready = self.started = self.released = False
        self.tasks = self.answers = self.outstanding = 0
        self.recorder = Recorder()
        self.kill_reason = ""
        self.trace = ""
        """Where it was when it was given up."""
        to_worker, to_loop = Table(), Table()
        self.codec: MessageCodec = ObjectCodec(to_worker, to_loop)
        self.dumps = self.codec.dumps
        self._readable: Callable[[], None] | None = None
        self._died: Callable[[], None] | None = None
        self._over = _Over()
        self.channel, self._theirs = thread_channels()
        arguments = said, worker_id, self._theirs, setup, self.recorder, perf_counter(), ObjectCodec(to_loop, to_worker)
        self.process = threading.Thread(
            target=_main,
            args=(self._over, self.channel, arguments),
            name=f"asyncloader-worker-{worker_id}",
            # At exit the pool's own hook waits for it, within bounds.
            daemon=True,
        )
        self.process.start()
        self.place = f"thread {self.process.native_id}"

    def listen(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None], died: Callable[[], None]) -> None:
        """Have the loop call these. See `WorkerHandle.listen`."""
        self._readable, self._died = readable, died
        # Weakly: the thread must not keep the pool, whose finalizer ends it.
        method = weakref.WeakMethod(self._look)
        self.channel.listen(loop, lambda: _call(method))

    def unlisten(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `listen`."""
        del loop
        self.channel.bell.detach()
        self._readable = self._died = None

    def _look(self) -> None:
        over = self._over.over  # before the frames are read: those of a thread that has ended are all there
        if self._readable is not None:
            self._readable()
        died = self._died
        if over and died is not None:
            died()

    @property
    def alive(self) -> bool:
        """Whether it runs, and was not given up."""
        return not self._over.over

    @property
    def left(self) -> bool:
        """Whether it has ended."""
        return not self.process.is_alive()

    def death(self) -> WorkerDied:
        """Return the error of its end."""
        reason = self.kill_reason or f"Its thread ended: {self._over.reason}."
        return WorkerDied(self.worker_id, 0, None, reason, "", self.trace)

    def distrust(self, error: ValueError) -> bool:
        """Return False: it is of this process, so a frame that cannot be read is an error of the loader."""
        del error
        return False

    def stack(self) -> str:
        """Return the Python stack of its thread, the newest call last; empty if it has ended."""
        frame = sys._current_frames().get(self.process.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def kill_for(self, reason: str) -> None:
        """Give it up: a thread cannot be killed. What it still sends is dropped."""
        self.kill_reason = (
            reason.replace("The loader killed it", "The loader gave it up")
            + " A thread cannot be killed: it goes on until its call returns, and its result is dropped."
        )
        self.trace = self.stack()
        self.kill()

    def kill(self) -> None:
        """Give it up."""
        self._theirs.close()
        self._over.over = True
        self.channel.bell.ring()

    def request_stop(self) -> None:
        """Ask it to end. Does not wait."""
        self._theirs.close()

    def join(self, deadline: float) -> bool:
        """Wait for its end until this time by `monotonic`. Returns whether it has ended."""
        # A finalizer may run in any thread, also in this one.
        if self.process is not threading.current_thread():
            self.process.join(max(0.0, deadline - monotonic()))
        return not self.process.is_alive()

    def release(self) -> None:
        """Drop what it has sent. Idempotent."""
        self.released = True
        self._theirs.close()
        self.channel.close()

    def __repr__(self) -> str:
        return f"<ThreadWorker {self.worker_id}>"


class _Over:
    """Whether a worker thread has ended, and why."""

    over = False
    reason = "without an error"


def _call(method: Any) -> None:
    found = method()
    if found is not None:
        found()


def _main(over: _Over, channel: ThreadChannel, arguments: tuple[Any, ...]) -> None:
    try:
        run_thread(*arguments)
    # Not the user's code, whose errors are answers: the loop has to report that the worker is no more.
    except BaseException as error:
        over.reason = f"{type(error).__name__}: {error}"
    finally:
        over.over = True
        channel.bell.ring()


class ThreadWorkers(WorkerSource):
    """Worker threads of this process. See `WorkerSource`."""

    start_method = THREADS
    ring_manager: type[RingManager] = NoRing

    def __init__(self) -> None:
        self._said = Said()
        # One for all: the memory of large batches that the consumer has dropped serves whichever worker comes next.
        self._collate = inline_collate()
        self._pristine: Any = None  # what the workers' own datasets are copies of

    def make(self, workers: Iterable[int], setup: WorkerSetup) -> Generator[WorkerHandle]:
        """Start these threads, one at each step.

        Raises:
            TypeError: each needs a dataset of its own, which cannot be copied.
        """
        shared = is_shared(setup.dataset, iterable=setup.iterable)
        if not shared and self._pristine is None:
            # A replacement gets what the first workers got, whatever the consumer has done to its object since.
            self._pristine = own_copy(setup.dataset)
        if setup.collate_fn is default_collate:
            setup = setup._replace(collate_fn=self._collate)
        for worker in workers:
            dataset = setup.dataset if shared else own_copy(self._pristine)
            yield ThreadWorker(worker, setup._replace(dataset=dataset), self._said)

    async def look(self, workers: Sequence[ThreadWorker], seconds: float) -> dict[int, Report]:
        """Report the stacks of these workers' threads."""
        del seconds
        return {each.worker_id: Report("running", each.stack()) for each in workers if not each.released}

    def end(self, workers: Sequence[ThreadWorker]) -> None:
        """Wait until these threads have ended, a few seconds at most. Warns of those that go on."""
        stuck = self._end(workers)
        for worker in workers:
            worker.release()
        if stuck:
            names = ", ".join(f"worker {each.worker_id} ({each.place})" for each in stuck)
            warn_aside(
                f"{names} did not end within {_END_SECONDS:g} s, because a call of the dataset does not return. A "
                f"thread cannot be killed: it ends when the call does. It is here:\n{stuck[0].stack()}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _end(self, workers: Sequence[ThreadWorker]) -> list[ThreadWorker]:
        for worker in workers:
            worker.request_stop()
        deadline = monotonic() + _END_SECONDS
        return [worker for worker in workers if not worker.join(deadline)]

    def hang_up(self, workers: Sequence[ThreadWorker]) -> None:
        """Ask these threads to end, and wait for that."""
        self._end(workers)

    def close(self) -> None:
        """Drop the copy of the dataset."""
        self._pristine = None


def is_shared(dataset: Any, *, iterable: bool) -> bool:
    """Whether all worker threads may use this object."""
    own = is_async_dataset(dataset) or is_stateful(dataset) or isinstance(dataset, (MapDataPipe, MessagedDataset))
    return not (iterable or own)


def own_copy(dataset: Any) -> Any:
    """Return a copy for one worker.

    Raises:
        TypeError: it cannot be copied.
    """
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        # Not copied in part: threads that shared an open file would take samples from one another.
        raise TypeError(
            f"each worker thread needs a {type(dataset).__name__} of its own, because it has a position, a state "
            f"or an event loop, and it cannot be copied: {type(error).__name__}: {error}. Give its class a "
            "__deepcopy__, or use worker processes"
        ) from error
