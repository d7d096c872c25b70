"""The pool: all workers of a loader, their rings, and the event loop that listens to them.

Data path: scheduler -> [pool] -> worker -> ring -> [pool] -> reorder.

A pool outlives an epoch when workers are persistent. It is started and stopped by plain blocking calls, so that any
thread may do so, with or without a loop; in between it is *attached* to one running loop at a time, which then calls
back for every answer and every death.

Stopping is one ladder with one deadline for all workers: ask, wait, SIGTERM, wait, SIGKILL, reap, close.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncloader.errors import WorkerDied
from asyncloader.workers import wire
from asyncloader.workers.codec import Template
from asyncloader.workers.info import EpochStart, WorkerSetup
from asyncloader.workers.payload import Payload, explain_unpicklable
from asyncloader.workers.process import WorkerProcess, wait_for_deaths
from asyncloader.workers.ring import Ring, install_fork_hook
from asyncloader.workers.rings import RingKeeper

__all__ = ["Answer", "Listener", "WorkerPool"]

_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)

_ASK_SECONDS = 2.0  # for a worker to finish what it is at
_TERMINATE_SECONDS = 2.0  # for one that SIGTERM reaches


class Answer(NamedTuple):
    """A worker's batch, not decoded yet: in a slot of `ring`, in the one-off segment `fd`, or nowhere (no bytes).

    Whoever gets it must open it (`delivery.py`) or discard it.
    """

    result: wire.Result
    template: Template
    ring: Ring | None
    fd: int | None
    cursor: bytes = b""

    def discard(self) -> None:
        """Nobody wants the batch: its memory comes back."""
        if self.ring is not None:
            self.ring.give_back(self.result.slot)
        if self.fd is not None:
            os.close(self.fd)


class Listener:
    """What the pool tells its epoch. Called in the loop's thread, never concurrently."""

    def on_answer(self, worker: int, answer: Answer) -> None:
        """A batch."""
        raise NotImplementedError

    def on_error(self, worker: int, seq: int, busy: float, error: Any) -> None:
        """A task raised; `error` is an exception, or torch's wrapper of one."""
        raise NotImplementedError

    def on_exhausted(self, worker: int, seq: int, cursor: bytes) -> None:
        """The worker's copy of an iterable dataset ended, where the cursor says."""
        raise NotImplementedError

    def on_death(self, worker: int, error: WorkerDied) -> None:
        """The worker ended unasked; everything that it had sent was reported before."""
        raise NotImplementedError

    def on_failure(self, error: Exception) -> None:
        """The pool itself cannot go on (no descriptors left, a broken stream)."""
        raise NotImplementedError


class WorkerPool:
    """Started workers.

    Args:
        context: a multiprocessing context (or `torch.multiprocessing`).
        setup: what the workers have in common.
        credits: tasks outstanding a worker.
        ring_bytes: bound on each ring, None for none.
        run_ahead: batches that may wait for an earlier one, beside the credits.

    Raises:
        RingMemoryError: the rings asked for can never fit.
        Exception: the set-up cannot be pickled (spawn, forkserver), with a note that names the part.
    """

    def __init__(
        self, context: Any, setup: WorkerSetup, credits: int, ring_bytes: int | None, run_ahead: int = 0
    ) -> None:
        self.start_method: str = context.get_start_method()
        self.epoch = 0
        self.processes: list[WorkerProcess] = []
        self.rings = [RingKeeper(credits, ring_bytes, run_ahead) for _ in range(setup.num_workers)]
        self._templates: list[Template | None] = [None] * setup.num_workers
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._owner = os.getpid()
        self._used = False
        install_fork_hook()
        _install_exit_hook()
        _pools.add(self)
        self._start(context, setup)

    def _start(self, context: Any, setup: WorkerSetup) -> None:
        shared = setup if self.start_method == "fork" else _dump(setup)
        if self.start_method == "forkserver":
            _preload_in_fork_server(context)
        pidfd = os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else None
        try:
            for worker_id in range(setup.num_workers):
                self.processes.append(WorkerProcess(context, worker_id, shared, pidfd))
        except BaseException:
            self.stop()
            raise
        finally:
            if pidfd is not None:
                os.close(pidfd)
            if isinstance(shared, Payload):
                shared.close()

    @property
    def stopped(self) -> bool:
        """`stop` was called."""
        return self._stopped

    @property
    def broken(self) -> bool:
        """A worker is gone: the pool cannot serve another epoch."""
        return not all(p.alive for p in self.processes)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "attached" if self._loop else "idle"
        return f"<WorkerPool {len(self.processes)} workers, {self.start_method}, {state}>"

    # ------------------------------------------------------------------------------------------ in the loop

    def attach(self, loop: asyncio.AbstractEventLoop, listener: Listener, starts: Sequence[EpochStart]) -> int:
        """Begin an epoch: listen to the workers from now on, in this loop's thread. Returns this attachment's number.

        From the second one on the workers are told to drop what they were asked for before, and how to begin (in the
        first they know that from their set-up).
        """
        self._loop, self._listener = loop, listener
        for process in self.processes:
            loop.add_reader(process.channel.fileno(), self._on_readable, process)
            loop.add_reader(process.death_fd, self._on_death, process)
        if self._used:
            self.epoch += 1
            for process, start in zip(self.processes, starts, strict=True):
                self._send(process, wire.pack_reset(wire.RESET, self.epoch, pickle.dumps(tuple(start), 5)))
        self._used = True
        return self.epoch

    def detach(self) -> None:
        """Stop listening. In the loop's thread, or in any once the loop is closed. Idempotent."""
        loop, self._loop = self._loop, None
        self._listener = None
        # A forked child shares its parent's epoll instance: it must not touch what is registered there.
        if loop is None or loop.is_closed() or os.getpid() != self._owner:
            return
        for process in self.processes:
            self._unwatch(loop, process)

    def _unwatch(self, loop: asyncio.AbstractEventLoop, process: WorkerProcess) -> None:
        if process.channel.fileno() >= 0:
            loop.remove_reader(process.channel.fileno())
            loop.remove_writer(process.channel.fileno())
        loop.remove_reader(process.death_fd)

    @property
    def run_ahead(self) -> int:
        """Batches that any worker may have ready before an earlier one, by the memory that its ring has for them."""
        return min(keeper.run_ahead for keeper in self.rings)

    def assign(self, worker: int, epoch: int, seq: int, index: Any) -> None:
        """Send a task, with a slot if one is free."""
        process, keeper = self.processes[worker], self.rings[worker]
        grown = keeper.replacement()
        if grown is not None:
            assert grown.fd is not None
            self._send(process, wire.pack_ring(grown.number, grown.slots, grown.slot_bytes), [grown.fd])
            grown.close_fd()
        number, slot = keeper.assign(epoch, seq)
        self._send(process, wire.pack_task(epoch, seq, slot, number, pickle.dumps(index, 5)))

    def _send(self, process: WorkerProcess, frame: bytes, fds: list[int] | None = None) -> None:
        try:
            if not process.channel.send(frame, fds or ()) and self._loop is not None:
                self._loop.add_writer(process.channel.fileno(), self._on_writable, process)
        except ConnectionError:
            pass  # it is dying; its pidfd will say so

    def _on_writable(self, process: WorkerProcess) -> None:
        try:
            done = process.channel.flush()
        except ConnectionError:
            done = True
        if done and self._loop is not None:
            self._loop.remove_writer(process.channel.fileno())

    def _on_readable(self, process: WorkerProcess) -> None:
        try:
            self._drain(process)
        except Exception as error:  # an exception here would only be logged by the loop, and the consumer wait for ever
            self._fail(error)
        if process.channel.ended and self._loop is not None:
            self._loop.remove_reader(process.channel.fileno())  # the pidfd tells whether, and how, it died

    def _drain(self, process: WorkerProcess) -> None:
        for kind, body in process.channel.receive():
            self._on_frame(process, kind, body)

    def _on_death(self, process: WorkerProcess) -> None:
        # What it sent before it died is still in the socket.
        try:
            before = -1
            while not process.channel.ended and process.channel.received != before:
                before = process.channel.received  # nothing new: its own child holds the other end open
                self._drain(process)
        except Exception as error:
            self._fail(error)
        loop, listener = self._loop, self._listener
        if loop is not None:
            self._unwatch(loop, process)
        if listener is not None:
            listener.on_death(process.worker_id, process.death())

    def _fail(self, error: Exception) -> None:
        if self._listener is not None:
            self._listener.on_failure(error)

    def _on_frame(self, process: WorkerProcess, kind: int, body: bytes) -> None:
        worker = process.worker_id
        if kind == wire.RESULT:
            result, data, cursor = wire.unpack_result(body)
            fd = process.channel.take_fd() if result.slot == wire.ONEOFF else None
            if not result.same:
                self._templates[worker] = Template(data)
            ring = self.rings[worker].answered(result.epoch, result.seq, result.slot, result.nbytes)
            template = self._templates[worker]
            assert template is not None  # a worker's first result is never "same"
            answer = Answer(result, template, ring, fd, cursor)
            if result.epoch == self.epoch and self._listener is not None:
                self._listener.on_answer(worker, answer)
            else:
                answer.discard()
        elif kind == wire.READY:
            process.ready = True
        elif kind == wire.RESET_DONE:
            self.rings[worker].reset_done(wire.unpack_reset(body)[0])
        else:
            epoch, seq, busy, payload = wire.unpack_answer(body)
            self.rings[worker].answered(epoch, seq, wire.NO_SLOT, 0)
            if epoch != self.epoch or self._listener is None:
                return
            if kind == wire.EXHAUSTED:
                self.rings[worker].void()
                self._listener.on_exhausted(worker, seq, payload)
            else:
                self._listener.on_error(worker, seq, busy, pickle.loads(payload))

    # -------------------------------------------------------------------------------------------- stopping

    def request_stop(self) -> None:
        """Ask all workers to leave, without waiting; `stop` must follow, perhaps in another thread."""
        if os.getpid() == self._owner:
            for process in self.processes:
                process.request_stop()

    def stop_soon(self) -> None:
        """`stop` in a thread of its own, for callers that may not block: idle workers leave at once all the same."""
        if not self._stopped and os.getpid() == self._owner:
            self.detach()
            self.request_stop()
            threading.Thread(target=self.stop, name="asyncloader-stop", daemon=True).start()

    def __del__(self) -> None:
        if not getattr(self, "_stopped", True):
            self.stop_soon()

    def stop(self) -> None:
        """End all workers and wait until they are gone. Blocks; any thread; idempotent. A no-op in a forked child."""
        if os.getpid() != self._owner:
            return
        with self._stop_lock:
            if self._stopped:
                return
            self._stopped = True
            self.detach()
            self.request_stop()
            for process in self.processes:
                # One that still boots (spawn: a second or more) cannot hear us, and has nothing to lose.
                if not process.ready and wire.READY not in [kind for kind, _ in process.channel.receive()]:
                    process.terminate()
            alive = wait_for_deaths(self.processes, _ASK_SECONDS)
            for process in alive:
                process.terminate()
            alive = wait_for_deaths(alive, _TERMINATE_SECONDS)
            for process in alive:
                process.kill()
            for process in self.processes:
                process.release()
            for keeper in self.rings:
                keeper.close()


def _dump(setup: WorkerSetup) -> Payload:
    try:
        return Payload.dump(setup)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        warnings.warn(_PICKLE_WARNING, stacklevel=2)
        what = explain_unpicklable(setup)
        if what is not None:
            error.add_note(what)
        raise


def _preload_in_fork_server(context: Any) -> None:
    """Let a fork server that is not running yet import torch, so that its children have it from the start."""
    from multiprocessing import forkserver

    server = forkserver._forkserver
    # There is no public way to ask; where the attributes are missing, children just start more slowly.
    if getattr(server, "_forkserver_pid", 0) is None and getattr(server, "_preload_modules", None) == ["__main__"]:
        context = context if hasattr(context, "set_forkserver_preload") else multiprocessing
        context.set_forkserver_preload(["__main__", "torch", "asyncloader.workers.worker"])


# Pools that may still have workers. At exit they are stopped before multiprocessing ends its daemonic children itself.
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@functools.cache
def _install_exit_hook() -> None:
    atexit.register(_stop_all)


def _stop_all() -> None:
    pools = list(_pools)
    for pool in pools:
        with contextlib.suppress(Exception):
            pool.detach()
            pool.request_stop()
    for pool in pools:
        pool.stop()  # waits for one in progress, too
