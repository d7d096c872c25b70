"""The dispatching process: runs a part of the graph that cannot be split, and deals its items to the workers in turn.

Data path: graph (dispatching process) -> [dispatching_process: one pipe per worker] -> graph (workers).

A worker asks for one item at a time, and says for which epoch. The process reads on until it has one for that worker;
what it read for the others waits for them, however much that is: a worker that needs many items for one of its own must
not wait for the others. What ends an epoch, or fails it, is told to a worker in the place of its item.

The main process sends what begins an epoch before it lets the workers begin it, so that is there to be read before any
question for that epoch, and is looked for first. The process ends when it is told so, and is killed when the main
process dies.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe

from asyncloader.dataloader2.error import worker_died
from asyncloader.dataloader2.graph._serialization import _pickled
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services.interface import Change
from asyncloader.dataloader2.utils.worker import WorkerInfo, reset_graph
from asyncloader.errors import WorkerDied, ending
from asyncloader.workers.default_signals import set_worker_signals
from asyncloader.workers.error_pickle import caught
from asyncloader.workers.ipc.lifeline import Lifeline, hold
from asyncloader.workers.main_guard import found_in_main
from asyncloader.workers.setup_payload import InheritedFd
from asyncloader.workers.starting import start

JOIN_S = 20.0
"""How long a process gets to end before it is killed."""


class EpochOrder(NamedTuple):
    """What a process is told when it begins an epoch.

    Attributes:
        epoch: its number, from 1.
        seed_generator: the main process's, to be spawned from.
        iter_reset_fn: changes the graph; None: it stays as it is.
    """

    epoch: int
    seed_generator: SeedGenerator
    iter_reset_fn: Change | None


class Dispatched(IterDataPipe[Any]):
    """In a worker: the items that the dispatching process deals to it.

    Args:
        connection: this worker's end of its pipe.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
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
                value.reraise()
            yield value

    def close(self) -> None:
        """Close this process's end."""
        self.connection.close()


class Dispatcher:
    """In the main process: starts the dispatching process, and ends it.

    Args:
        datapipe: the part of the graph that it runs.
        workers: how many workers it deals to.
        context: of `multiprocessing`; says how it is started.
    """

    def __init__(self, datapipe: DataPipe, workers: int, context: Any) -> None:
        _install_fork_hook()
        self._owner = os.getpid()
        self._control, control = context.Pipe()
        pairs = [context.Pipe() for _ in range(workers)]
        self._lifeline = Lifeline()
        self.dispatched = [Dispatched(ours) for ours, _ in pairs]
        """For each worker, what it reads. The workers' processes get copies."""
        theirs = [each for _, each in pairs]
        links = (InheritedFd(self._lifeline.fd), control, theirs)
        others = [self._control, *(ours for ours, _ in pairs)] if context.get_start_method() == "fork" else []
        self._process = context.Process(
            target=_dispatch, args=(links, others, _pickled(datapipe)), name="asyncloader-dispatch", daemon=True
        )
        try:
            start(self._process, context, 0)
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            for each in (control, *theirs):
                each.close()
        _dispatchers.add(self)

    def died(self, advice: str) -> WorkerDied:
        """The error for a worker's having found that the process is gone."""
        self._process.join(1)
        how = ending(self._process.exitcode)
        return worker_died(f"the dispatching process (pid {self.pid}) ended unexpectedly, {how}. {advice}")

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self._process.pid or 0)

    def begin(self, order: EpochOrder) -> None:
        """Tell it what begins an epoch. Before any worker begins it."""
        with contextlib.suppress(OSError):  # it has died: the workers will say so
            self._control.send_bytes(_pickled(tuple(order)))

    def end_soon(self) -> None:
        """Tell it to end; the workers hear of that. Idempotent."""
        if self._control.closed:
            return
        with contextlib.suppress(OSError):
            self._control.send_bytes(_OVER)  # closing would not do: forked workers have copies of this end
        self._control.close()
        for each in self.dispatched:
            each.close()

    def forget_in_child(self) -> None:
        """In a forked child: end nothing there. A forked worker still needs `dispatched`."""
        self._control.close()
        # After a plain `os.fork`, multiprocessing's exit hook in the child would end the parent's process.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End it, and wait for it; kill it after 20 seconds. Idempotent."""
        if os.getpid() != self._owner:
            return
        self.end_soon()
        self._process.join(JOIN_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._lifeline.close()
        _dispatchers.discard(self)


_dispatchers: set[Dispatcher] = set()


@functools.cache
def _install_fork_hook() -> None:
    os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for each in _dispatchers:
        each.forget_in_child()
    _dispatchers.clear()


class _Dealing:
    """The dispatching process's state.

    Args:
        graph: what it runs, pickled.
        workers: how many it deals to.
    """

    def __init__(self, graph: bytes, workers: int) -> None:
        self._graph = graph
        self._datapipe: Any = None
        self._workers = workers
        self.epoch = 0
        self._source: Iterator[Any] | None = None
        self._dealt = 0
        self._waiting: list[deque[bytes]] = []

    def begin(self, order: EpochOrder) -> None:
        """Begin an epoch; an error of that is dealt as the first item's."""
        self.epoch, self._dealt, self._source = order.epoch, 0, None
        self._waiting = [deque() for _ in range(self._workers)]
        try:
            if self._datapipe is None:
                with found_in_main():
                    self._datapipe = pickle.loads(self._graph)
            # Shared seeds: the ranks' processes deal the same items, of which a filter may follow that shares them out.
            info, seeds = WorkerInfo(self._workers, 0), order.seed_generator
            datapipe: Any = reset_graph(self._datapipe, info, seeds, True, order.iter_reset_fn)
            self._source = iter(datapipe)
        except Exception:
            self._deal(_failure())

    def answer(self, worker: int, epoch: int) -> bytes:
        """The next item for a worker, pickled."""
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
    """The process's main function."""
    for each in others:  # of the main process; held here too they would never be seen to close
        each.close()
    lifeline, control, pipes = links
    set_worker_signals()
    hold(lifeline.fd)
    torch.set_num_threads(1)
    dealing = _Dealing(graph, len(pipes))
    workers = {pipe: number for number, pipe in enumerate(pipes)}
    while True:
        ready = wait([control, *workers])
        if control in ready:
            try:
                order = control.recv_bytes()
            except EOFError:
                return
            if order == _OVER:
                return
            dealing.begin(EpochOrder(*pickle.loads(order)))
            continue  # before any question: those of the new epoch may be among them
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                epoch = int.from_bytes(pipe.recv_bytes(), "little")
                pipe.send_bytes(dealing.answer(workers[pipe], epoch))
            except (EOFError, OSError):
                del workers[pipe]
