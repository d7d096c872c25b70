"""The worker pool: starts and stops a loader's worker processes, and connects them to an event loop.

Data path: scheduler -> [pool] -> worker -> ring -> [pool] -> reorder.

Starting and stopping are blocking calls that any thread may make, with or without an event loop. In between the pool is
*attached* to one running loop at a time and calls its `Listener` there for every answer and every death. With
persistent workers one pool serves several epochs.

When a worker has died, its id is vacant: the listener may have another process made for it (`make`, which blocks and
may run in any thread) and installed (`adopt`). `shutdown.py` decides how workers are ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.errors import LoaderClosed, WorkerDied
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.default_signals import each_deferred
from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup
from asyncloader.workers.inbox import Inbox, Listener
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.ring import install_fork_hook
from asyncloader.workers.ipc.ring_manager import KeptRings, RingOptions
from asyncloader.workers.shutdown import stop_at_exit
from asyncloader.workers.source import WorkerHandle, WorkerSource, shortage_of
from asyncloader.workers.stacks import Report
from asyncloader.workers.watchdog import TaskWatchdog

_DEATH_SECONDS = 2.0
"""Seconds that a killed worker may take to end. After that it counts as dead: it hangs in a system call."""
_LEAVE_SECONDS = 2.0
"""Seconds that a worker which leaves by itself may take to end; the user's threads may hold it up."""


class WorkerPool:
    """The running workers of one loader.

    Args:
        source: makes and ends the workers.
        setup: the set-up that all workers share; the pool begins with a worker for each of its `starts`.
        credits: outstanding tasks per worker, as long as batches are small.
        ring_bytes: upper bound on the size of each ring; None: no bound.
        concurrent: whether a worker has several samples in flight, by awaiting them or in threads.
        reorder_window: batches that may wait for an earlier batch, in addition to the credits.
        worker_timeout: seconds that a worker may spend on one task; None: no limit.
        least_credits: outstanding tasks per worker, however large batches are; default: `credits`.
        kept: cache that page-locked rings are taken from and returned to; None: every pool makes its own.
        statistics: get the workers' counters; None: the counters are not read.

    Raises:
        RingMemoryError: rings of this size can never fit.
        Exception: a worker cannot be made.
    """

    def __init__(
        self,
        source: WorkerSource,
        setup: WorkerSetup,
        credits: int,
        ring_bytes: int | None,
        *,
        concurrent: bool,
        reorder_window: int = 0,
        worker_timeout: float | None = None,
        least_credits: int | None = None,
        kept: KeptRings | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.start_method = source.start_method
        # Threads take samples in task order, and streams are read by one task after the other: there a slow task
        # delays the tasks behind it, which must not be blamed.
        self._all_at_once = concurrent and not setup.fetch_threads and not setup.iterable
        self.epoch = 0
        self._source = source
        self._worker_timeout = worker_timeout
        self._watchdog: TaskWatchdog | None = None
        self._failed = False
        self._hung_up = False
        self._unkillable: list[WorkerHandle] = []  # killed, but not ended yet
        self._spare: set[WorkerHandle] = set()  # made, but not adopted yet
        # For `_spare`, and for setting `_stopped`: replacements are made in other threads than the thread that stops.
        self._making = threading.Lock()
        self._vacant: set[int] = set()  # ids of workers that died and have no replacement yet
        self.processes: list[WorkerHandle] = []
        self._kept, self._statistics = kept, statistics
        if statistics is not None:
            statistics.workers_start()
        self._ring_options = ring_options = RingOptions(
            credits, ring_bytes, reorder_window, len(setup.starts), least_credits
        )
        inherited = None if kept is None else kept.take(ring_options)
        self.rings = inherited or [source.ring_manager(*ring_options) for _ in setup.starts]
        self._inboxes: list[Inbox] = []
        self._streams = bool(setup.starts[0].streams)  # whether each worker serves streams of the dataset
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_lock = threading.RLock()  # a signal handler may close the loader, too
        # A forked child has a copy of this object. Its methods must leave the workers alone, which are the parent's.
        self._owner = os.getpid()
        self._used = False
        self._stopped = False  # from here on `stop` has work to do
        install_fork_hook()
        # Before the first process exists: a program that exits during the start ends its workers, too.
        stop_at_exit(self)
        try:
            self.processes += self.make(range(len(setup.starts)), setup)
            self._inboxes += map(self._inbox, self.processes)
            # Last: until this line `stop` finds all processes here, wherever Ctrl-C strikes.
            self._spare.clear()
        except BaseException:
            self.stop()
            raise

    def make(self, workers: Iterable[int], setup: WorkerSetup) -> list[WorkerHandle]:
        """Start processes for these workers. Blocks; any thread. Pass each to `adopt` or `discard`.

        Raises:
            LoaderClosed: the pool was stopped while they were made.
            OSError: too few descriptors are left for them; the text has the limit and the need.
        """
        made: list[WorkerHandle] = []
        try:
            # Connections to workers elsewhere may take long, and are closed with their objects.
            each_deferred(self._source.make(workers, setup), partial(self._add, made), self.start_method != "service")
        except BaseException as error:
            with self._making:
                if not self._stopped:
                    # `discard` ends spare processes only, and Ctrl-C may have struck before the last process was added.
                    self._spare.update(made)
            for process in made:
                self.discard(process)
            if (shortage := shortage_of(error, len(setup.starts))) is not None:
                raise shortage from error
            raise
        return made

    def _add(self, made: list[WorkerHandle], process: WorkerHandle) -> None:
        made.append(process)
        if self._statistics is not None:
            self._statistics.add_worker(process.worker_id, process.recorder, process.node)
        # `stop` ends the processes that are in `_spare` when it gets the lock. A later one is ended by `make`.
        with self._making:
            self._spare.add(process)
            if self._stopped:
                raise LoaderClosed("the workers were stopped")

    def _inbox(self, process: WorkerHandle) -> Inbox:
        return Inbox(process, self.rings[process.worker_id], streams=self._streams)

    def discard(self, process: WorkerHandle) -> None:
        """End a process from `make` that will not be used. Blocks until it has ended, a few seconds at most."""
        with self._making:
            if process not in self._spare:
                return  # `stop` has taken it
            self._spare.discard(process)
        process.kill()
        self._source.end([process])

    def adopt(self, process: WorkerHandle) -> bool:
        """Replace the worker that died by a process from `make`. In the loop's thread, while attached.

        Returns False if it has been replaced already: `discard` this process then.
        """
        worker = process.worker_id
        # Two replacements may have been made for one death: Ctrl-C during a fork has the request repeated. The first
        # gets the id.
        if worker not in self._vacant:
            return False
        self._vacant.discard(worker)
        # `stop`, in another thread, ends the processes of both collections: it must find this one in one of them.
        with self._making:
            self._spare.discard(process)
            self.processes[worker] = process
        # A new inbox: the old one has the template and the records that the dead process sent last.
        self._inboxes[worker] = self._inbox(process)
        if self._loop is not None:
            self._listen_to(self._loop, process)
        return True

    def obstacle(self) -> str:
        """Why a dead worker cannot be replaced; empty if it can. See `WorkerSource.obstacle`."""
        return self._source.obstacle()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    @property
    def broken(self) -> bool:
        """Whether the pool cannot serve another epoch: a worker died, a stream broke, or this is a forked child."""
        if os.getpid() != self._owner:
            return True
        return self._failed or not all(p.alive for p in self.processes)

    async def look(self, processes: Sequence[WorkerHandle], seconds: float) -> dict[int, Report]:
        """Report what these workers' threads are doing, by worker number. See `WorkerSource.look`."""
        return await self._source.look(processes, seconds)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "attached" if self._loop else "idle"
        return f"<WorkerPool {len(self.processes)} workers, {self.start_method}, {state}>"

    # ------------------------------------------------------------------------------------------ in the loop

    def attach(self, loop: asyncio.AbstractEventLoop, listener: Listener, starts: Sequence[EpochStart]) -> int:
        """Begin an epoch: listen to the workers from now on, in this loop's thread. Returns the number of this epoch.

        From the second epoch on, each worker is sent a RESET: it drops its older tasks and begins as `starts` says. For
        the first epoch that is part of its set-up.
        """
        self._loop, self._listener = loop, listener
        if self._worker_timeout is not None:
            self._watchdog = TaskWatchdog(
                loop,
                self._worker_timeout,
                len(self.processes),
                concurrent=self._all_at_once,
                catch_up=lambda worker: self._on_readable(self.processes[worker]),
                on_timeout=self._on_timeout,
            )
        for process in self.processes:
            self._listen_to(loop, process)
        if self._used:
            # The number goes up before any task is sent: answers to the tasks of an epoch that was abandoned name an
            # older epoch, and are discarded.
            self.epoch += 1
            for process, start in zip(self.processes, starts, strict=True):
                # Frames of the epoch before may still come; only the STARTED frame of the new epoch sets it again.
                process.started = False
                self._send(process, wire.pack_reset(wire.RESET, self.epoch, process.dumps(tuple(start))))
        self._used = True
        return self.epoch

    def _listen_to(self, loop: asyncio.AbstractEventLoop, process: WorkerHandle) -> None:
        process.listen(loop, partial(self._on_readable, process), partial(self._on_death, process))
        if self._watchdog is not None:
            self._watchdog.starts(process.worker_id)
        if process.saved_rng_state is not None:  # it announced in the epoch before that it leaves
            loop.call_later(_LEAVE_SECONDS, self._on_exit_overdue, process)

    def detach(self) -> None:
        """Stop listening. In the loop's thread, or in any once the loop is closed. Idempotent."""
        loop, self._loop = self._loop, None
        self._listener = None
        watchdog, self._watchdog = self._watchdog, None
        # A forked child shares its parent's epoll instance and must not change its registrations.
        if loop is None or loop.is_closed() or os.getpid() != self._owner:
            return
        if watchdog is not None:
            watchdog.close()
        for process in self.processes:
            process.unlisten(loop)

    @property
    def reorder_window(self) -> int:
        """Batches that any worker may have ready ahead of an earlier batch, limited by the memory of its ring."""
        # A list, not a generator, which takes a call for each ring: the pipeline reads this with each task.
        return min([manager.reorder_window for manager in self.rings])

    @property
    def credits(self) -> int:
        """Tasks that any worker may have outstanding: those for which the memory of each ring suffices."""
        return min([manager.credits for manager in self.rings])

    def assign(self, worker: int, epoch: int, seq: int, index: Any) -> None:
        """Send a task, with a slot if any slot is free."""
        process, manager = self.processes[worker], self.rings[worker]
        # The worker reads its frames in order: a larger ring goes before the task that uses it.
        grown = manager.replacement()
        if grown is not None:
            assert grown.fd is not None
            # The frame carries a duplicate, also where it has to wait. So the descriptor may be closed below.
            self._send(process, wire.pack_ring(grown.number, grown.slots, grown.slot_bytes), [grown.fd])
            if self._kept is None:
                grown.close_fd()  # without a cache no other worker gets this ring
        number, slot = manager.assign(epoch, seq)
        process.tasks += 1
        process.outstanding = len(manager.tasks)
        if self._watchdog is not None:
            self._watchdog.assigned(worker, seq)
        sent = perf_counter()
        if self._statistics is not None and self._statistics.trace is not None:
            sent = -sent  # asks for the task's spans
        self._send(process, wire.pack_task(epoch, seq, slot, number, sent, process.dumps(index)))

    def send_assignment(self, worker: int, epoch: int, number: int, answer: Any) -> None:
        """Answer the worker's request for assignment `number`."""
        if self._watchdog is not None:
            self._watchdog.assignment_sent(worker)
        self._send(self.processes[worker], wire.pack_assignment(epoch, number, self.processes[worker].dumps(answer)))

    def _send(self, process: WorkerHandle, frame: bytes, fds: list[int] | None = None) -> None:
        try:
            if not process.channel.send(frame, fds or ()) and self._loop is not None:
                # The socket is full, because the worker is at a long task. The loop's thread must not wait for it.
                self._loop.add_writer(process.channel.fileno(), self._on_writable, process)
        except ConnectionError:
            pass  # it is dying; its pidfd reports the death, after which all of its tasks are assigned again

    def _on_writable(self, process: WorkerHandle) -> None:
        try:
            done = process.channel.flush()
        except ConnectionError:
            done = True
        if done and self._loop is not None:
            self._loop.remove_writer(process.channel.fileno())

    def _on_readable(self, process: WorkerHandle) -> None:
        inbox, channel = self._inboxes[process.worker_id], process.channel
        try:
            for kind, body in channel.receive():
                inbox.frame(kind, body, self.epoch, self._listener, self._watchdog)
                if kind == wire.LEAVING and self._loop is not None:
                    # Its tasks are assigned again when it has ended, and threads of the user's may keep it from ending.
                    self._loop.call_later(_LEAVE_SECONDS, self._on_exit_overdue, process)
        except Exception as error:  # the loop would only log it, and the consumer would wait forever
            # Another error, such as that of a descriptor that did not arrive, is no fault of the worker.
            if not isinstance(error, ValueError) or not process.distrust(error):
                self._fail(error)
        if channel.ended and self._loop is not None:
            # The end of the socket is no death: the worker may have closed its end, or a child of it may hold it open.
            # The pidfd reports deaths. A reader that stayed would be called for the end again and again.
            self._loop.remove_reader(channel.fileno())

    def _on_death(self, process: WorkerHandle) -> None:
        # Frames that it sent before it died are still in the socket.
        before = -1
        while not self._failed and not process.channel.ended and process.channel.received != before:
            # Not until the socket's end: a child of the worker may hold the other end open.
            before = process.channel.received
            self._on_readable(process)
        # The order matters: `death` reads the crash's stack, the loop watches descriptors, and `release` closes them.
        self._on_exited(process, process.death())
        process.release()

    def _on_timeout(self, worker: int, seconds: float) -> None:
        process, loop = self.processes[worker], self._loop
        # The kill is reported by the pidfd, like every death. A process that hangs in a system call ignores SIGKILL:
        # after a while it counts as dead, so that its tasks go to another worker.
        process.kill_for(
            f"The loader killed it: it was at one task for {seconds:.1f} seconds, and worker_timeout is "
            f"{self._worker_timeout:g}."
        )
        assert loop is not None  # there is a watchdog only while attached
        loop.call_later(_DEATH_SECONDS, self._on_unkillable, process)

    def _on_exit_overdue(self, process: WorkerHandle) -> None:
        """The worker announced that it leaves, but has not ended in time."""
        if not process.released:
            process.kill()

    def _on_unkillable(self, process: WorkerHandle) -> None:
        """SIGKILL has not ended the worker: it hangs in a system call, and none of its code runs any more."""
        # It has been replaced or given up since, has ended after all, or the epoch is over.
        if process not in self.processes or process.released or self._loop is None:
            return
        # `stop` still has to reap it, or to name it in a warning.
        self._unkillable.append(process)
        self._on_exited(process, WorkerDied(process.worker_id, process.pid, None, process.kill_reason))

    def _on_exited(self, process: WorkerHandle, death: WorkerDied) -> None:
        """Stop listening to a worker that has ended, void its tasks, and report the death."""
        worker = process.worker_id
        if self._loop is not None:
            process.unlisten(self._loop)
        # Before the listener is called, which has a replacement made: `adopt` takes a vacant id only, and a new ring.
        self.rings[worker].abandon()
        self._vacant.add(worker)
        if self._watchdog is not None:
            self._watchdog.forget(worker)
        if self._listener is not None and not self._hung_up:  # else it would have the worker replaced
            self._listener.on_death(
                worker,
                death,
                at_work=process.started,
                saved_rng_state=process.saved_rng_state,
                outside=process.outside,
                lost=process.lost,
            )

    def _fail(self, error: Exception) -> None:
        self._failed = True
        if self._listener is not None:
            self._listener.on_failure(error)

    # -------------------------------------------------------------------------------------------- stopping

    def request_stop(self) -> None:
        """Ask all workers to end, without waiting. `stop` must follow, in this thread or another."""
        if os.getpid() == self._owner:
            for process in self.processes:
                process.request_stop()

    def hang_up(self) -> None:
        """Make the workers end and wait for that, a few seconds at most. For finalizers, in any thread but the loop's:
        see `process.hang_up`. `stop` must be running in another thread, or follow.
        """
        if os.getpid() == self._owner:
            # Set first: a busy loop may see that the workers have ended before it gets to end the epoch.
            self._hung_up = True
            self._source.hang_up(self.processes)

    def stop_soon(self) -> None:
        """Run `stop` in a new thread, for callers that may not block. Idle workers end at once."""
        if not self._stopped and os.getpid() == self._owner:
            # First: the end of a worker that was asked to end is no death to report.
            self.detach()
            self.request_stop()
            try:
                # A daemon: at exit the hook waits for the workers, in `stop`, and not for this thread.
                threading.Thread(target=self.stop, name="asyncloader-stop", daemon=True).start()
            except RuntimeError:  # no thread can be started at exit
                self.stop()

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # `exiting` is a default argument because the module's names may be gone by then. At exit `stop_all_pools` ends
        # the workers. `_stopped` is missing if `__init__` raised early: then no process was made.
        if not exiting() and not getattr(self, "_stopped", True):
            self.stop_soon()

    def stop(self) -> None:
        """End all workers and wait for that, a few seconds at most. Blocks; any thread; idempotent.

        A no-op in a forked child.
        """
        if os.getpid() != self._owner:
            return
        # A second thread that calls this waits here until the workers have ended.
        with self._stop_lock:
            if self._stopped:
                return
            with self._making:
                self._stopped = True
                # In one step with the check in `make`: each process is either in this list, or is ended by `make`.
                # Each once: a process that SIGKILL has not ended is still among `processes` until it is replaced, and
                # one that Ctrl-C kept `__init__` from adopting is in both others.
                every = list(dict.fromkeys([*self.processes, *self._unkillable, *self._spare]))
                self._spare.clear()
            # While attached, the loop's thread may be handling an answer, and with it the rings, at this moment.
            at_rest = self._loop is None and not self._failed
            try:
                self.detach()
                self._source.end([process for process in every if not process.released])
            finally:
                # Only after the workers have ended: this closes the lifeline, which kills those that still run.
                self._source.close()
                if self._kept is not None and at_rest:
                    self._keep_rings(self._kept)
                for manager in self.rings:
                    # Does nothing to the rings that were kept: their managers handed them to successors.
                    manager.close()

    def _keep_rings(self, kept: KeptRings) -> None:
        # Not strict: start-up may have failed with fewer processes than rings.
        for process, manager in zip(self.processes, self.rings, strict=False):
            if not process.left:  # a child of a killed worker, or a pending write, may still change its ring
                manager.abandon()
        if self.processes:
            # There may be more workers than at the beginning, or fewer.
            options = self._ring_options._replace(workers=len(self.rings))
            kept.keep(options, [manager.successor() for manager in self.rings])
