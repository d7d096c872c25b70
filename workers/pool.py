"""The pool: all workers of a loader, their rings, and the event loop that listens to them.

Data path: scheduler -> [pool] -> worker -> ring -> [pool] -> reorder.

A pool outlives an epoch when workers are persistent. It is started and stopped by plain blocking calls, so that any
thread may do so, with or without a loop; in between it is *attached* to one running loop at a time, which then calls
back for every answer and every death.

A worker that died leaves its place empty: whoever listens may have another process made for it (`make`, which blocks
and may be called in any thread) and put there (`adopt`). How workers are ended is `shutdown.py`'s.

At exit, pools that still have workers are stopped, before multiprocessing ends its daemonic children itself.

Data path: none.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from asyncloader.errors import LoaderClosed, WorkerDied
from asyncloader.workers import shutdown
from asyncloader.workers.fetch.factory import is_concurrent
from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup
from asyncloader.workers.inbox import Inbox
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.lifeline import Lifeline
from asyncloader.workers.listener import Listener
from asyncloader.workers.memory.kept_rings import KeptRings, RingTerms
from asyncloader.workers.memory.ring import install_fork_hook
from asyncloader.workers.memory.ring_manager import RingKeeper
from asyncloader.workers.process import WorkerProcess, hang_up
from asyncloader.workers.setup_payload import Payload, dump, import_worker_code, preload_in_fork_server
from asyncloader.workers.watchdog import Watch

__all__ = [
    "WorkerPool",
    "install_exit_hook",
    "stop_at_exit",
]

_DEATH_SECONDS = 2.0
"""How long a worker that we killed may take to end. After that it is taken for dead: it hangs in the system."""
_LEAVE_SECONDS = 2.0
"""How long one that leaves by itself may take to end: what threads of the user's do is not waited for longer."""


class WorkerPool:
    """Started workers.

    Args:
        context: a multiprocessing context (or `torch.multiprocessing`).
        setup: what the workers have in common.
        credits: tasks outstanding a worker, as long as batches are small.
        ring_bytes: bound on each ring, None for none.
        run_ahead: batches that may wait for an earlier one, beside the credits.
        worker_timeout: seconds that a worker may take over one task; None: as long as it likes.
        least_credits: tasks outstanding a worker, however large batches are; default: `credits`.
        kept: where page-locked rings come from and go to; default None: each pool has its own.

    Raises:
        RingMemoryError: the rings asked for can never fit.
        Exception: the set-up cannot be pickled (spawn, forkserver); its cause names the part.
    """

    def __init__(
        self,
        context: Any,
        setup: WorkerSetup,
        credits: int,
        ring_bytes: int | None,
        run_ahead: int = 0,
        worker_timeout: float | None = None,
        least_credits: int | None = None,
        kept: KeptRings | None = None,
    ) -> None:
        self.start_method: str = context.get_start_method()
        self.concurrent = is_concurrent(setup.dataset, setup.fetch_threads)
        """Whether a worker has several tasks in hand at a time."""
        # Threads take samples in the order of the tasks, and streams are read by one task after the other: one that is
        # late waits for those before it.
        self._all_at_once = self.concurrent and not setup.fetch_threads and not setup.iterable
        self.epoch = 0
        self._context = context
        self._worker_timeout = worker_timeout
        self._watch: Watch | None = None
        self._failed = False
        self._lingering: list[WorkerProcess] = []  # killed, and not gone yet
        self._spare: set[WorkerProcess] = set()  # made, and in no place
        self._making = threading.Lock()
        self._vacant: set[int] = set()  # places of workers that died
        self.processes: list[WorkerProcess] = []
        self._kept = kept
        self._terms = terms = RingTerms(credits, ring_bytes, run_ahead, setup.num_workers, least_credits)
        inherited = None if kept is None else kept.take(terms)
        self.rings = inherited or [RingKeeper(*terms) for _ in range(setup.num_workers)]
        self._inboxes: list[Inbox] = []
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_lock = threading.RLock()  # a signal handler may close the loader, too
        self._owner = os.getpid()
        self._used = False
        self._lifeline = Lifeline()
        self._stopped = False  # from here on there is something to be stopped
        install_fork_hook()
        stop_at_exit(self)
        try:
            self.processes += self.make(range(setup.num_workers), setup)
            self._inboxes += map(Inbox, self.processes, self.rings)
            self._spare.clear()
        except BaseException:
            self.stop()
            raise

    def make(self, workers: Iterable[int], setup: WorkerSetup) -> list[WorkerProcess]:
        """Start processes for these workers. Blocks; any thread. Give each to `adopt` or `discard`.

        Raises:
            LoaderClosed: the pool was stopped meanwhile.
        """
        shared: WorkerSetup | Payload = setup
        if self.start_method == "fork":
            import_worker_code()
        else:
            shared = dump(setup)
        if self.start_method == "forkserver":
            preload_in_fork_server(self._context)
        pidfd: int | None = None
        made: list[WorkerProcess] = []
        try:
            if hasattr(os, "pidfd_open"):
                pidfd = os.pidfd_open(os.getpid())
            for worker in workers:
                process = WorkerProcess(self._context, worker, shared, self._lifeline.fd, pidfd)
                made.append(process)
                with self._making:  # `stop` ends what is here by then; what comes later ends itself
                    self._spare.add(process)
                    if self._stopped:
                        raise LoaderClosed("the workers were stopped")
        except BaseException:
            with self._making:
                if not self._stopped:
                    self._spare.update(made)  # Ctrl-C may have come before the last was noted
            for process in made:
                self.discard(process)
            raise
        finally:
            if pidfd is not None:
                os.close(pidfd)
            if isinstance(shared, Payload):
                shared.close()
        return made

    def discard(self, process: WorkerProcess) -> None:
        """Nobody wants a process that `make` gave. Blocks until it has ended, some seconds at most."""
        with self._making:
            if process not in self._spare:
                return  # `stop` was faster
            self._spare.discard(process)
        process.kill()
        shutdown.run([process])

    def adopt(self, process: WorkerProcess) -> bool:
        """Put a process that `make` gave in the place of the one that died. In the loop's thread, while attached.

        False if another is there: `discard` this one.
        """
        worker = process.worker_id
        if worker not in self._vacant:
            return False
        self._vacant.discard(worker)
        self._spare.discard(process)
        self.processes[worker] = process
        self._inboxes[worker] = Inbox(process, self.rings[worker])
        if self._loop is not None:
            self._listen_to(self._loop, process)
        return True

    @property
    def stopped(self) -> bool:
        """`stop` was called."""
        return self._stopped

    @property
    def broken(self) -> bool:
        """A worker is gone, or talks nonsense: the pool cannot serve another epoch. Nor can it in a forked child."""
        if os.getpid() != self._owner:
            return True
        return self._failed or not all(p.alive for p in self.processes)

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
        if self._worker_timeout is not None:
            self._watch = Watch(
                loop,
                self._worker_timeout,
                len(self.processes),
                concurrent=self._all_at_once,
                catch_up=lambda worker: self._on_readable(self.processes[worker]),
                late=self._on_late,
            )
        for process in self.processes:
            self._listen_to(loop, process)
        if self._used:
            self.epoch += 1
            for process, start in zip(self.processes, starts, strict=True):
                process.started = False
                self._send(process, wire.pack_reset(wire.RESET, self.epoch, pickle.dumps(tuple(start), 5)))
        self._used = True
        return self.epoch

    def _listen_to(self, loop: asyncio.AbstractEventLoop, process: WorkerProcess) -> None:
        loop.add_reader(process.channel.fileno(), self._on_readable, process)
        loop.add_reader(process.death_fd, self._on_death, process)
        if self._watch is not None:
            (self._watch.started if process.started and not self._used else self._watch.starts)(process.worker_id)
        if process.retired is not None:  # in the epoch before
            loop.call_later(_LEAVE_SECONDS, self._on_staying, process)

    def detach(self) -> None:
        """Stop listening. In the loop's thread, or in any once the loop is closed. Idempotent."""
        loop, self._loop = self._loop, None
        self._listener = None
        watch, self._watch = self._watch, None
        # A forked child shares its parent's epoll instance: it must not touch what is registered there.
        if loop is None or loop.is_closed() or os.getpid() != self._owner:
            return
        if watch is not None:
            watch.close()
        for process in self.processes:
            self._unlisten(loop, process)

    def _unlisten(self, loop: asyncio.AbstractEventLoop, process: WorkerProcess) -> None:
        if process.channel.fileno() >= 0:  # else it was released
            loop.remove_reader(process.channel.fileno())
            loop.remove_writer(process.channel.fileno())
            loop.remove_reader(process.death_fd)

    @property
    def run_ahead(self) -> int:
        """Batches that any worker may have ready before an earlier one, by the memory that its ring has for them."""
        return min(keeper.run_ahead for keeper in self.rings)

    @property
    def credits(self) -> int:
        """Tasks that any worker may have outstanding, by the memory that its ring has for them."""
        return min(keeper.credits for keeper in self.rings)

    def assign(self, worker: int, epoch: int, seq: int, index: Any, *, suspect: bool = False) -> None:
        """Send a task, with a slot if one is free. `suspect`: what it writes to standard error is kept."""
        process, keeper = self.processes[worker], self.rings[worker]
        if suspect:
            self._send(process, wire.pack(wire.SUSPECT), [process.suspected()])
        grown = keeper.replacement()
        if grown is not None:
            assert grown.fd is not None
            self._send(process, wire.pack_ring(grown.number, grown.slots, grown.slot_bytes), [grown.fd])
            if self._kept is None:
                grown.close_fd()  # no other worker will get it
        number, slot = keeper.assign(epoch, seq)
        if self._watch is not None:
            self._watch.assigned(worker, seq)
        self._send(process, wire.pack_task(epoch, seq, slot, number, pickle.dumps(index, 5)))

    def send_assignment(self, worker: int, epoch: int, number: int, answer: Any) -> None:
        """Answer the worker's request for assignment `number`."""
        if self._watch is not None:
            self._watch.assignment_sent(worker)
        self._send(self.processes[worker], wire.pack_assignment(epoch, number, pickle.dumps(answer, 5)))

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
        inbox = self._inboxes[process.worker_id]
        for kind, body in process.channel.receive():
            inbox.frame(kind, body, self.epoch, self._listener, self._watch)
            if kind == wire.RETIRING and self._loop is not None:
                self._loop.call_later(_LEAVE_SECONDS, self._on_staying, process)

    def _on_death(self, process: WorkerProcess) -> None:
        # What it sent before it died is still in the socket.
        try:
            before = -1
            while not process.channel.ended and process.channel.received != before:
                before = process.channel.received  # nothing new: its own child holds the other end open
                self._drain(process)
        except Exception as error:
            self._fail(error)
        self._buried(process, process.death())
        process.release()

    def _on_late(self, worker: int, seconds: float) -> None:
        process, loop = self.processes[worker], self._loop
        process.condemn(
            f"The loader killed it: it was at one task for {seconds:.1f} seconds, and worker_timeout is "
            f"{self._worker_timeout:g}."
        )
        assert loop is not None  # a watch is there only while attached
        loop.call_later(_DEATH_SECONDS, self._on_lingering, process)

    def _on_staying(self, process: WorkerProcess) -> None:
        """It has said that it leaves, and has nothing more to say."""
        if not process.released:
            process.kill()

    def _on_lingering(self, process: WorkerProcess) -> None:
        """SIGKILL has not ended it, which only the system itself can hold back: nothing of it runs any more."""
        if self.processes[process.worker_id] is not process or process.channel.fileno() < 0 or self._loop is None:
            return
        self._lingering.append(process)
        self._buried(process, WorkerDied(process.worker_id, process.pid, None, process.condemned))

    def _buried(self, process: WorkerProcess, death: WorkerDied) -> None:
        """Its place is empty now."""
        worker = process.worker_id
        if self._loop is not None:
            self._unlisten(self._loop, process)
        self.rings[worker].abandon()
        self._vacant.add(worker)
        if self._watch is not None:
            self._watch.forget(worker)
        if self._listener is not None:
            self._listener.on_death(
                worker, death, at_work=process.started, retired=process.retired, outside=process.outside
            )

    def _fail(self, error: Exception) -> None:
        self._failed = True
        if self._listener is not None:
            self._listener.on_failure(error)

    # -------------------------------------------------------------------------------------------- stopping

    def request_stop(self) -> None:
        """Ask all workers to leave, without waiting; `stop` must follow, perhaps in another thread."""
        if os.getpid() == self._owner:
            for process in self.processes:
                process.request_stop()

    def hang_up(self) -> None:
        """Have the workers leave, and wait until they have, some seconds at most. For finalizers, in any thread but
        the loop's: see `process.hang_up`. `stop` must be under way in another thread, or follow.
        """
        if os.getpid() == self._owner:
            hang_up(self.processes, shutdown.BUDGET)

    def stop_soon(self) -> None:
        """`stop` in a thread of its own, for callers that may not block: idle workers leave at once all the same."""
        if not self._stopped and os.getpid() == self._owner:
            self.detach()
            self.request_stop()
            try:
                threading.Thread(target=self.stop, name="asyncloader-stop", daemon=True).start()
            except RuntimeError:  # at exit there are no more threads
                self.stop()

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting() and not getattr(self, "_stopped", True):
            self.stop_soon()

    def stop(self) -> None:
        """End all workers and wait until they are gone, some seconds at most. Blocks; any thread; idempotent.

        A no-op in a forked child.
        """
        if os.getpid() != self._owner:
            return
        with self._stop_lock:
            if self._stopped:
                return
            with self._making:
                self._stopped = True
                every = [*self.processes, *self._lingering, *self._spare]
                self._spare.clear()
            # Else the loop's thread may be at an answer this moment, and with it at the rings.
            at_rest = self._loop is None and not self._failed
            try:
                self.detach()
                shutdown.run([process for process in every if not process.released])
            finally:
                self._lifeline.close()
                if self._kept is not None and at_rest:
                    self._hand_on_rings(self._kept)
                for keeper in self.rings:
                    keeper.close()

    def _hand_on_rings(self, kept: KeptRings) -> None:
        for process, keeper in zip(self.processes, self.rings, strict=False):  # no process, if they were not all made
            if not process.left:
                keeper.abandon()
        if self.processes:
            kept.leave(self._terms, [keeper.hand_on() for keeper in self.rings])


class Stoppable(Protocol):
    """A pool of workers."""

    def detach(self) -> None:
        """Stop listening."""
        ...

    def request_stop(self) -> None:
        """Ask all workers to leave, without waiting."""
        ...

    def stop(self) -> None:
        """Wait until they have."""
        ...


_pools: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def stop_at_exit(pool: Stoppable) -> None:
    """Have this pool stopped, if it is still there."""
    install_exit_hook()
    _pools.add(pool)


@functools.cache
def install_exit_hook() -> None:
    """Register the hook, once: what is registered later is called before it."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    pools = list(_pools)
    for pool in pools:
        with contextlib.suppress(Exception):
            pool.detach()
            pool.request_stop()
    for pool in pools:
        pool.stop()  # waits for one in progress, too
