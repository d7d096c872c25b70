"""Where a pool's workers come from: the interface between a pool and what makes, watches and ends workers.

Data path: pool -> [source] -> worker process, or a service's.

`WorkerHandle` is one worker as the pool sees it, `WorkerSource` makes and ends them. `LocalWorkers` makes processes of
this machine; a service's client makes connections to workers elsewhere. The pool, its rings, the code that reads the
answers and all above it are the same for both.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

from torch.utils.data import IterDataPipe, MapDataPipe

from asyncloader.errors import WorkerDied
from asyncloader.telemetry.counters import Recorder
from asyncloader.workers import shutdown
from asyncloader.workers.fetch.dataset_kinds import MessagedDataset, is_planned
from asyncloader.workers.fetch.dataset_marks import changed_since, marks
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.ipc.lifeline import Lifeline
from asyncloader.workers.ipc.ring_manager import RingManager
from asyncloader.workers.message_codec import MessageCodec
from asyncloader.workers.process import WorkerProcess, hang_up, look
from asyncloader.workers.setup_payload import Payload, dump, import_worker_code
from asyncloader.workers.stacks import Report

THREADS = "threads"
"""The loaders' `workers=` for threads of this process."""
_DESCRIPTORS = 8  # of this process, that one worker takes, by the start method that takes most, and with a new ring


class WorkerHandle(Protocol):
    """One worker."""

    ready: bool
    """It has reported that it runs; before that it runs no user code."""
    started: bool
    """The user's start-up code is over."""
    saved_rng_state: bytes | None
    """Set once it announced that it leaves because of its memory limit: its saved RNG state."""
    tasks: int
    """Number of tasks that it was sent."""
    answers: int
    """Number of these tasks that it has answered, with answers that could be read."""
    outstanding: int
    """Number of tasks that it has yet to answer: an epoch's end voids the others."""

    worker_id: int
    """0 to ``num_workers - 1``."""
    pid: int
    """Its process's id, on the machine where that is."""
    place: str
    """Its name in a report, as in "pid 17"."""
    node: str
    """The address of the service's node that runs it; empty: it runs on this machine."""
    channel: Any
    """A `Channel`, or an object with its methods."""
    codec: MessageCodec
    """How values come from it."""
    recorder: Recorder
    """Its counters."""
    kill_reason: str
    """Why the loader killed it; empty if it did not."""
    outside: bool
    """It was killed from outside; see `WorkerProcess.outside`. Known after `death`."""
    lost: bool
    """It may still run, and only the connection to it has ended. Known after `death`."""
    released: bool
    """Whether this side's descriptors are closed."""

    @property
    def process(self) -> Any:
        """The `multiprocessing.Process` of a local worker, which torch's loader shows in `_workers`."""
        ...

    def listen(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None], died: Callable[[], None]) -> None:
        """Have the loop call `readable` while frames can be received, and `died` once the worker has ended. In the
        loop's thread; also for what came before this call.
        """

    def unlisten(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `listen`, in the loop's thread. A no-op once the worker is released."""

    @property
    def alive(self) -> bool:
        """Whether it still runs. Does not wait."""
        ...

    @property
    def left(self) -> bool:
        """Whether it has certainly ended in order."""
        ...

    def dumps(self, value: Any, /) -> bytes:
        """Pack a value that is sent to it."""
        ...

    def death(self) -> WorkerDied:
        """Return the error of its end. Call when `death_fd` is readable."""
        ...

    def distrust(self, error: ValueError) -> bool:
        """Decide on a worker that has sent a frame which cannot be read.

        Returns whether it is ended for that, and its tasks go to another worker. False: it is a process of ours, and
        the error is the loader's own.
        """
        ...

    def kill(self) -> None:
        """End it at once."""

    def kill_for(self, reason: str) -> None:
        """End it at once; `reason` becomes part of its error."""

    def request_stop(self) -> None:
        """Ask it to end. Does not wait."""

    def release(self) -> None:
        """Close this side's descriptors; the worker has ended. Idempotent."""


class WorkerSource(Protocol):
    """Makes the workers of one pool, and ends them."""

    start_method: str
    """"fork" if workers must be made in the iterating thread."""

    ring_manager: type[RingManager]
    """Manages the memory of each of its workers' batches."""

    def make(self, workers: Iterable[int], setup: WorkerSetup) -> Generator[WorkerHandle]:
        """Make these workers, one at each step. Blocks; any thread. Close the generator in the end.

        Raises:
            Exception: a worker cannot be made.
        """
        ...

    def obstacle(self) -> str:
        """Why a replacement cannot be made, because it would differ from the other workers; empty if it can."""
        return ""

    async def look(self, workers: Sequence[Any], seconds: float) -> dict[int, Report]:
        """Report what these workers do: the stacks of their threads, or why these could not be had.

        Takes about `seconds` at most. The keys are the workers' numbers; workers that have ended are left out.
        """
        ...

    def end(self, workers: Sequence[Any]) -> None:
        """End all of these workers and wait until they have ended, a few seconds at most."""

    def hang_up(self, workers: Sequence[Any]) -> None:
        """End these workers and wait until they have ended; for finalizers. `end` follows."""

    def close(self) -> None:
        """Close the source's own descriptors. No worker is left."""


def shortage_of(error: BaseException, workers: int) -> OSError | None:
    """Return an error that says how many files these workers need, if the error is that no more may be opened."""
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return None
    import resource  # late: Windows has none

    return OSError(
        errno.EMFILE,
        f"{os.strerror(errno.EMFILE)}: this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}, and the "
        f"loader's {workers} workers take up to {_DESCRIPTORS} each, {_DESCRIPTORS * workers} together, besides the "
        "files of the program itself: raise the limit (ulimit -n, or resource.setrlimit), or give a smaller "
        "num_workers",
    )


class LocalWorkers(WorkerSource):
    """Worker processes of this machine.

    A replacement that is made later gets the set-up that the first workers were given, not the main process's objects
    as they are by then. A forked replacement cannot: `obstacle` says so if the objects have changed.

    Args:
        context: a multiprocessing context (or `torch.multiprocessing`).
        replaces: workers may be replaced, so their pickled set-up is kept.
        passes_environ: each worker gets the environment that this process has at that moment. The fork server has the
            environment of its own start, which the user expects only where the user chose the fork server.
    """

    ring_manager: type[RingManager] = RingManager

    def __init__(self, context: Any, *, replaces: bool = False, passes_environ: bool = False) -> None:
        self.start_method: str = context.get_start_method()
        self._context = context
        self._lifeline: Lifeline | None = None
        self._replaces = replaces
        self._passes_environ = passes_environ
        # Held for the payload's count of users: several threads may make replacements while another closes the source.
        self._lock = threading.Lock()
        self._payload: Payload | None = None
        self._dataset: Any = None
        self._marks: dict[str, Any] = {}
        self._users = 0  # threads that make processes from the payload
        self._closed = False

    def make(self, workers: Iterable[int], setup: WorkerSetup) -> Generator[WorkerHandle]:
        """Start these worker processes, one at each step. Blocks; with fork, call it in the iterating thread.

        Raises:
            Exception: the set-up cannot be pickled (spawn, forkserver); the cause names the part.
        """
        # One for all workers of the pool, replacements included.
        lifeline = self._lifeline = self._lifeline or Lifeline()
        forks = self.start_method == "fork"
        if forks:
            import_worker_code()
            self._note(setup.dataset)
        pidfd: int | None = None
        payload: Payload | None = None
        try:
            payload = None if forks else self._pickled(setup)
            if hasattr(os, "pidfd_open"):
                # Opened here and passed on: the parent of a fork server's child is the server. Each worker gets a
                # duplicate.
                pidfd = os.pidfd_open(os.getpid())
            for worker in workers:
                # One at each step: if a later start fails, the pool knows those that were made before, and ends them.
                yield WorkerProcess(self._context, worker, payload or setup, lifeline.fd, pidfd)
        finally:
            if pidfd is not None:
                os.close(pidfd)
            if payload is not None:
                self._let_go()

    def _note(self, dataset: Any) -> None:
        """Note, before the first fork, the dataset that all workers are to have."""
        # Noted once: replacements must have the dataset that the first workers had.
        if not self._replaces or self._dataset is not None:
            return
        # Datapipes are seeded, and datasets of ours plan, in the main process at each epoch; these changes do not
        # count, because the workers get the seeds and the plan.
        ours = isinstance(dataset, MessagedDataset) or is_planned(dataset)
        if not (isinstance(dataset, (IterDataPipe, MapDataPipe)) or ours):
            self._dataset, self._marks = dataset, marks(dataset)

    def obstacle(self) -> str:
        """Why a worker that is forked now would have another dataset than the other workers; empty if it would not."""
        changed = "" if self._dataset is None else changed_since(self._marks, self._dataset)
        return changed and (
            f"No new worker was forked, because {changed} has changed in the main process since the workers were "
            "started: it would be a fork of the main process, and have another dataset than the other workers. "
            "Leave the dataset as it is while workers use it, change it by set_epoch, or use "
            'multiprocessing_context="forkserver", which keeps what the workers were started with.'
        )

    def _pickled(self, setup: WorkerSetup) -> Payload:
        """Return the set-up of all workers, with the beginning that `setup` names. `_let_go` must follow."""
        with self._lock:
            if self._payload is None:
                # Once, also for replacements that are made at the same time.
                self._payload = dump(setup)
            self._users += 1
            return self._payload.beginning(setup, dict(os.environ) if self._passes_environ else None)

    def _let_go(self, *, closed: bool = False) -> None:
        with self._lock:
            self._users -= not closed
            self._closed = self._closed or closed
            # Closed with its last user: another thread may still make a process from it while the source is closed.
            if self._payload is not None and not self._users and (self._closed or not self._replaces):
                self._payload.close()
                self._payload = None

    async def look(self, workers: Sequence[WorkerProcess], seconds: float) -> dict[int, Report]:
        """Report what these workers do, by their numbers: the stacks of their threads. See `stacks.ask`."""
        # The others have no descriptors any more.
        there = [worker for worker in workers if not worker.released]
        return {worker.worker_id: report for worker, report in zip(there, await look(there, seconds), strict=True)}

    def end(self, workers: Sequence[WorkerProcess]) -> None:
        """End all of these workers within 8 seconds. See `shutdown.py`."""
        shutdown.run(list(workers))

    def hang_up(self, workers: Sequence[WorkerProcess]) -> None:
        """End these workers without a lock or another thread. See `process.hang_up`."""
        hang_up(workers, shutdown.BUDGET)

    def close(self) -> None:
        """Close the payload, once no thread makes a process from it, and the lifeline."""
        self._let_go(closed=True)
        if self._lifeline is not None:
            # This kills the workers that still run, so the pool has ended them before.
            self._lifeline.close()
