"""The dispatching process: runs a part of the graph that cannot be split, and deals its items to the workers in turn.

Data path: graph (dispatching process) -> [dispatching_process: one pipe per worker] -> graph (workers).

A worker asks for one item at a time, and names the epoch. The process reads on until it has an item for that worker.
The items that it reads for other workers wait for them. The end of an epoch and an error are answers in place of items.
The process ends on a message of the main process, and is killed when the main process dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe

from asyncloader.base.process_hooks import in_forked_child
from asyncloader.dataloader2.error import worker_died
from asyncloader.dataloader2.graph._serialization import dumps
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.utils.worker import Change, WorkerInfo, reset_graph
from asyncloader.delivery.opener import raise_worker_error
from asyncloader.errors import WorkerDied, ending
from asyncloader.workers.default_signals import handlers_deferred, set_worker_signals
from asyncloader.workers.fetch.error_pickle import caught
from asyncloader.workers.ipc.lifeline import Lifeline, hold
from asyncloader.workers.notebook_pickling import found_in_main
from asyncloader.workers.process import start
from asyncloader.workers.setup_payload import InheritedFd

JOIN_S = 20.0
"""Seconds that the process gets to end before it is killed."""


class EpochOrder(NamedTuple):
    """The message by which a process begins an epoch.

    Attributes:
        epoch: the epoch's number, from 1.
        seed_generator: each process spawns its own generator from this.
        iter_reset_fn: changes the graph; None: the graph stays as it is.
    """

    epoch: int
    seed_generator: SeedGenerator
    iter_reset_fn: Change | None


class Dispatched(IterDataPipe[Any]):
    """In a worker: gives the items that the dispatching process deals to it.

    Args:
        connection: this worker's end of its pipe.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        # Read once: an iterator of an epoch that was left goes on asking for that epoch, and is answered by its end.
        epoch = self.epoch
        while True:
            try:
                self.connection.send_bytes(epoch.to_bytes(8, "little"))
                answer = self.connection.recv_bytes()
            except (EOFError, OSError):
                raise worker_died("the dispatching process ended unexpectedly") from None
            kind, value = pickle.loads(answer)
            if kind == "end":
                return
            if kind == "error":
                raise_worker_error(value)
            yield value

    def close(self) -> None:
        """Close this process's end."""
        self.connection.close()


class Dispatcher:
    """In the main process: starts the dispatching process, and ends it.

    Args:
        datapipe: the end of the graph's piece that the process runs.
        workers: number of workers that it deals to.
        context: of `multiprocessing`; starts the process.
    """

    def __init__(self, datapipe: DataPipe, workers: int, context: Any) -> None:
        in_forked_child(_forget_all)
        self._owner = os.getpid()
        try:
            # Ctrl-C comes when the process and all pipes are known here, and can be ended.
            with handlers_deferred():
                self._start(datapipe, workers, context)
        except BaseException:
            if self in _dispatchers:
                self.close()
            raise

    def _start(self, datapipe: DataPipe, workers: int, context: Any) -> None:
        self._control, control = context.Pipe()
        pairs = [context.Pipe() for _ in range(workers)]
        self._lifeline = Lifeline()
        self.dispatched = [Dispatched(ours) for ours, _ in pairs]
        """The datapipe of each worker. The workers' processes get copies."""
        theirs = [each for _, each in pairs]
        links = (InheritedFd(self._lifeline.fd), control, theirs)
        # A forked process inherits also the other ends, and closes them; a spawned process gets its own ends alone.
        others = [self._control, *(ours for ours, _ in pairs)] if context.get_start_method() == "fork" else []
        self._process = context.Process(
            target=_dispatch, args=(links, others, dumps(datapipe)), name="asyncloader-dispatch", daemon=True
        )
        try:
            start(self._process, context, 0)
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            # The process has these ends alone, so that its death closes the pipes, and the workers notice it.
            for each in (control, *theirs):
                each.close()
        _dispatchers.add(self)

    def explain_death(self, advice: str) -> WorkerDied:
        """Make the error for a worker that found its pipe closed."""
        self._process.join(1)  # its pipes close before its exit code can be read
        how = ending(self._process.exitcode)
        return worker_died(f"the dispatching process (pid {self.pid}) ended unexpectedly, {how}. {advice}")

    @property
    def pid(self) -> int:
        """The process's identifier."""
        return int(self._process.pid or 0)

    def begin(self, order: EpochOrder) -> None:
        """Begin an epoch in the process. Call this before any worker begins it."""
        with contextlib.suppress(OSError):  # the process has died: the workers will report it
            self._control.send_bytes(dumps(tuple(order)))

    def end_soon(self) -> None:
        """Ask the process to end, and do not wait. The workers' pipes close with it. Idempotent."""
        if self._control.closed:
            return
        with contextlib.suppress(OSError):
            # A message, because closing this end is not enough where another process has a copy of it, such as a child
            # that another thread forked while the pipes were made: the process would not see it close.
            self._control.send_bytes(_OVER)
        self._control.close()
        for each in self.dispatched:
            each.close()

    def forget_in_child(self) -> None:
        """In a forked child: keep it from ending the parent's process. A forked worker still needs `dispatched`."""
        self._control.close()
        # After a plain `os.fork`, multiprocessing's exit hook in the child would end the parent's process.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the process, and wait for it; kill it after 20 seconds. Idempotent."""
        if os.getpid() != self._owner:  # a forked child's copy of the loader: the process is its parent's
            return
        self.end_soon()
        self._process.join(JOIN_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._lifeline.close()  # last: it kills a process that still runs
        _dispatchers.discard(self)


_dispatchers: set[Dispatcher] = set()


def _forget_all() -> None:
    for each in _dispatchers:
        each.forget_in_child()
    _dispatchers.clear()


class _Dealing:
    """In the dispatching process: reads the graph, and deals its items.

    Args:
        graph: the graph, pickled.
        workers: number of workers.
    """

    def __init__(self, graph: bytes, workers: int) -> None:
        self._graph = graph
        self._datapipe: Any = None
        self._workers = workers
        self.epoch = 0
        self._source: Iterator[Any] | None = None
        self._dealt = 0
        # There is no limit to these: a worker that needs many items for one of its own must not wait for other workers,
        # which may be waiting to be read after it.
        self._waiting: list[deque[bytes]] = []

    def begin(self, order: EpochOrder) -> None:
        """Begin an epoch. If that fails, the error is dealt in place of the first item."""
        self.epoch, self._dealt, self._source = order.epoch, 0, None
        self._waiting = [deque() for _ in range(self._workers)]
        try:
            if self._datapipe is None:
                with found_in_main():
                    self._datapipe = pickle.loads(self._graph)
            # Shared seeds: the ranks' processes deal the same items, which a `sharding_filter` after them may share
            # out.
            info, seeds = WorkerInfo(self._workers, 0), order.seed_generator
            datapipe: Any = reset_graph(self._datapipe, info, seeds, True, order.iter_reset_fn)
            self._source = iter(datapipe)
        except Exception:
            self._deal(_failure())

    def answer(self, worker: int, epoch: int) -> bytes:
        """Return the next item for a worker, or the end or an error of the epoch, pickled."""
        # Only a question for an epoch that was left can come late: a new epoch begins here before it does in a worker.
        if epoch != self.epoch:
            return _END
        mine = self._waiting[worker]
        while not mine and self._source is not None:
            try:
                self._deal(pickle.dumps(("item", next(self._source)), 5))
            except StopIteration:
                self._source = None
            except Exception:
                self._source = None
                self._deal(_failure())
        return mine.popleft() if mine else _END

    def _deal(self, answer: bytes) -> None:
        self._waiting[self._dealt % self._workers].append(answer)
        self._dealt += 1


_END = pickle.dumps(("end", None), 5)
_OVER = b"over"


def _failure() -> bytes:
    return pickle.dumps(("error", caught("in dispatching process 0")), 5)


def _dispatch(links: tuple[InheritedFd, Connection, list[Connection]], others: list[Connection], graph: bytes) -> None:
    """Run the dispatching process."""
    for each in others:  # the other ends of its own pipes: while it held them it would not see the pipes close
        each.close()
    lifeline, control, pipes = links
    set_worker_signals()
    hold(lifeline.fd)
    torch.set_num_threads(1)  # the workers need the other CPUs
    _serve(_Dealing(graph, len(pipes)), control, pipes)


def _serve(dealing: _Dealing, control: Connection, pipes: list[Connection]) -> None:
    """Obey the main process and answer the workers, until the main process ends this."""
    workers = {pipe: number for number, pipe in enumerate(pipes)}
    while True:
        ready = wait([control, *workers])
        if control in ready:
            if not _obey(control, dealing):
                return
            continue
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                epoch = int.from_bytes(pipe.recv_bytes(), "little")
                # The order of an epoch is sent before any question for it. But `wait` looks at one pipe after the
                # other: it can miss an order and then see the question.
                while epoch > dealing.epoch:
                    if not _obey(control, dealing):
                        return
                pipe.send_bytes(dealing.answer(workers[pipe], epoch))
            except (EOFError, OSError):
                # The worker has died, and the items dealt to it are lost: why a graph with this process replaces none.
                del workers[pipe]


def _obey(control: Connection, dealing: _Dealing) -> bool:
    """Begin the next epoch. Returns False when the main process has ended, or ends this process."""
    try:
        order = control.recv_bytes()
    except EOFError:
        return False
    if order == _OVER:
        return False
    dealing.begin(EpochOrder(*pickle.loads(order)))
    return True
