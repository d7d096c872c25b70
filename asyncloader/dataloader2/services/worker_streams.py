"""Reads a copy of a graph's replicable piece in each worker, and merges the copies' items into one stream.

Data path: graph (a copy per worker) -> [worker_streams: thread, chunks] -> rings -> [items in turn] -> rest of graph.

A thread of the worker reads the graph ahead. When the worker is asked for a chunk, it sends the items that the thread
has read by then, at least one. So small items do not cost a message each, and an item that is ready never waits for the
next. Each worker has a loader of its own, in which its chunks wait for their turn: a slow worker delays no other.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data._utils import worker as torch_worker

from asyncloader.dataloader2.datapipes.read_ahead import ReadAhead
from asyncloader.dataloader2.graph._serialization import dumps
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random._philox import PhiloxEngine
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services.dispatching_process import Dispatched, Dispatcher, EpochOrder
from asyncloader.dataloader2.utils.worker import Change, InitFn, ResetFn, WorkerInfo, reset_graph, worker_graph
from asyncloader.delivery.opener import raise_worker_error
from asyncloader.errors import StateError, TaskQuarantined, WorkerDied
from asyncloader.loaders.loader import DataLoader
from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.dataset_kinds import MessagedDataset
from asyncloader.workers.fetch.error_pickle import caught


class Chunk(NamedTuple):
    """Some items of one worker, in their order.

    Attributes:
        items: empty in the last chunk.
        last: whether this is the worker's last chunk of the epoch.
        failure: the error that ended the worker's part of the epoch; None: no error.
    """

    items: list[Any]
    last: bool = False
    failure: ExceptionWrapper | None = None


def next_order(before: EpochOrder | None, seed_generator: SeedGenerator, iter_reset_fn: Change | None) -> EpochOrder:
    """In the main process: make the message by which all processes begin the next epoch."""
    # Not copies of the main process's own streams: the workers' draws do not advance those, so their copies would be
    # the same in every epoch.
    seeds = PhiloxEngine(seed_generator.generate_shared_seed()), PhiloxEngine(seed_generator.generate_seed())
    return EpochOrder(1 if before is None else before.epoch + 1, SeedGenerator(_rngs=seeds), iter_reset_fn)


_USERS = ("_datapipe", "_init_fn", "_reset_fn", "order")
"""Attributes of a `Branch` that may hold the user's functions."""


class Branch(IterableDataset[Chunk], MessagedDataset):
    """The dataset of one worker: reads the worker's copy of the graph, and gives chunks.

    Args:
        datapipe: the end of the graph's replicable piece.
        worker: the worker.
        ahead: items that are read ahead, and the most items in a chunk.
        init_fn: `worker_init_fn` of `MultiProcessingReadingService`.
        reset_fn: `worker_reset_fn` of it.
        dispatched: gives the dispatching process's items; None: the graph has no such process.

    Attributes:
        order: the message by which the worker begins the next epoch.
    """

    def __init__(
        self,
        datapipe: DataPipe,
        worker: WorkerInfo,
        ahead: int,
        init_fn: InitFn | None,
        reset_fn: ResetFn | None,
        dispatched: Dispatched | None,
    ) -> None:
        self._datapipe = datapipe
        self.worker = worker
        self.ahead = ahead
        self._init_fn = init_fn
        self._reset_fn = reset_fn
        self._dispatched = dispatched
        self._initialized: DataPipe | None = None
        self._reading: ReadAhead | None = None
        self.order = EpochOrder(0, SeedGenerator(0), None)
        self.loss = (
            f"It was worker {worker.worker_id} of the graph. The new one reads its part again, with the epoch's seeds, "
            "and drops what had come before: if the items follow from the seeds, none is lost and none comes twice."
        )

    def __getstate__(self) -> dict[str, Any]:
        """For spawned processes: pickle also functions that only cloudpickle or dill can send."""
        return {**vars(self), **dict.fromkeys(_USERS), "pickled": dumps([getattr(self, name) for name in _USERS])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, **dict(zip(_USERS, pickle.loads(state.pop("pickled")), strict=True)))

    def epoch_message(self) -> bytes:
        """Pack the epoch's order."""
        return dumps(tuple(self.order))

    def begin_epoch(self, message: bytes) -> None:
        """Unpack it."""
        self.order = EpochOrder(*pickle.loads(message))

    def __iter__(self) -> Iterator[Chunk]:
        # As in torchdata, whose workers are not torch's either: a part that shares its items among torch's workers
        # gives all of them here.
        torch_worker._worker_info = None
        return _Chunks(self)

    def begin(self) -> ReadAhead:
        """Begin the epoch, and read it in a thread."""
        reading, self._reading = self._reading, None
        if reading is not None:
            # However long that takes: the thread of an epoch that was left reads the same graph.
            reading.stop(None)
        if self._initialized is None:
            self._initialized = worker_graph(self._datapipe, self.worker, self._init_fn, self._dispatched)
        if self._dispatched is not None:
            self._dispatched.epoch = self.order.epoch
        seeds = self.order.seed_generator.spawn(self.worker.worker_id)
        # Not kept in `_initialized`: the functions' changes are for this epoch, and each epoch begins with the same
        # graph.
        datapipe = reset_graph(
            self._initialized,
            self.worker,
            seeds,
            iter_reset_fn=self.order.iter_reset_fn,
            custom_reset_fn=self._reset_fn,
        )
        self._reading = ReadAhead(partial(iter, datapipe), self.ahead)
        return self._reading


class _Chunks(Iterator[Chunk]):
    """The chunks of an epoch. Its state is the number of items given: a replacement of the worker drops that number."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._reading: ReadAhead | None = None
        self._given = 0
        self._over = False

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "over": self._over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given, self._over = state["given"], state["over"]

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        try:
            if self._reading is None:
                self._reading = self._begin()
            items = self._reading.take(self._branch.ahead)
        except StopIteration:
            self._over = True
            return Chunk([], last=True)
        except Exception:
            self._over = True
            return Chunk([], last=True, failure=caught(f"in worker process {self._branch.worker.worker_id}"))
        # The state with this number travels with the chunk. So a replacement drops exactly the items that have arrived.
        self._given += len(items)
        return Chunk(items)

    def _begin(self) -> ReadAhead:
        """Begin to read, and in a replacement drop the items that the worker before has given."""
        try:
            reading, dropped = self._branch.begin(), 0
        except StopIteration as stop:  # of the user's functions: it is not the end of the items
            raise not_the_end(stop, "`worker_init_fn` or `worker_reset_fn`") from stop
        while dropped < self._given:
            try:
                dropped += len(reading.take(self._given - dropped))
            except StopIteration:
                raise StateError(
                    f"the graph ended after {dropped} items for the replacement of a worker that had given "
                    f"{self._given}: its items do not follow from its seeds"
                ) from None
        return reading


_RESTARTS = 3
"""Times that a worker is replaced in an epoch: the default of a loader with a seed."""

_RESUME = "Mend what ended it, and go on from where this loader was: DataLoader2.from_state(loader.state_dict(), ...)."


class Interleaved(IterDataPipe[Any]):
    """In the main process: gives the workers' items, one of each worker in turn, until no worker has more.

    It is not replicable.

    Args:
        branches: the dataset of each worker.
        dispatcher: the dispatching process; None: the graph has no such process.
        context: of `multiprocessing`.
    """

    def __init__(self, branches: list[Branch], dispatcher: Dispatcher | None, context: Any) -> None:
        # Items that the dispatching process has dealt to a dead worker are lost, so no replacement could give them.
        self._restarts = 0 if dispatcher else _RESTARTS
        self._loaders: tuple[DataLoader[Any, Any], ...] = tuple(
            DataLoader(
                branch,
                batch_size=None,
                collate_fn=_pass_through,
                num_workers=1,
                prefetch_factor=2,
                persistent_workers=True,
                multiprocessing_context=context,
                generator=torch.Generator(),  # the global one is the user's
                max_worker_restarts=self._restarts,
            )
            for branch in branches
        )
        for loader in self._loaders:  # which the user does not see: they have no verdict to act on, and no view
            loader._asyncloader_state.statistics.untold = False
            loader._asyncloader_state.watched = False
        self._dispatcher = dispatcher
        self._beginning_or_ending = threading.Lock()

    def is_replicable(self) -> bool:
        """Return False: the main process has the workers."""
        return False

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: torch adds lines to an error that a generator raises.
        return _StreamsInTurn(self)

    def begin(self) -> list[Iterator[Chunk]]:
        """Begin the epoch in all workers."""
        # `shutdown` may run in another thread, for a finalizer. It waits until all workers are started, or is first,
        # and then none is.
        with self._beginning_or_ending:
            assert self._loaders, "the workers have ended"
            return [iter(loader) for loader in self._loaders]

    def explain_death(self, worker: int, error: WorkerDied) -> WorkerDied:
        """Make the error with this worker's number, and with advice for the user of a graph."""
        advice = error.advice
        # Each loader has one worker, which it calls worker 0, and advises an option that a reading service lacks.
        if "max_worker_restarts" in advice:
            why = f"It had been replaced {self._restarts} times in this epoch."
            if not self._restarts:
                why = "It is not replaced, because what the dispatching process dealt to it is gone."
            advice = f"{why} {_RESUME}"
        return WorkerDied(worker, error.pid, error.exitcode, error.reason, advice, error.trace)

    def raise_failure(self, failure: Any) -> None:
        """Raise the error that ended a worker's part of the epoch."""
        # A worker knows only that its pipe closed. The main process has the dispatching process's exit code.
        if self._dispatcher is not None and failure.exc_type is WorkerDied:
            raise self._dispatcher.explain_death(_RESUME)
        raise_worker_error(failure)

    def shutdown(self) -> None:
        """End the workers, and wait for them. Idempotent."""
        with self._beginning_or_ending:
            loaders, self._loaders = self._loaders, ()
        # At the same time: each worker may take some seconds to end.
        ending = [threading.Thread(target=each.close, name="asyncloader-stop") for each in loaders[1:]]
        for thread in ending:
            thread.start()
        for each in loaders[:1]:
            each.close()
        for thread in ending:
            thread.join()


class _StreamsInTurn(Iterator[Any]):
    """The items of an epoch, one of each worker in turn.

    Args:
        source: has the workers.
    """

    def __init__(self, source: Interleaved) -> None:
        self._source = source
        self._chunks: list[Iterator[Chunk]] = []
        self._waiting: list[deque[Any]] = []
        self._failures: dict[int, ExceptionWrapper] = {}
        self._living: set[int] = set()
        self._worker = 0  # whose turn it is

    @property
    def _asyncloader_ready(self) -> bool:
        """Whether the next item has arrived, so that `next` does not wait."""
        return bool(self._waiting and self._waiting[self._worker])

    def __next__(self) -> Any:
        if not self._chunks:
            self._chunks = self._source.begin()
            self._waiting = [deque() for _ in self._chunks]
            self._living = set(range(len(self._chunks)))
        while self._living or any(self._waiting):
            worker = self._worker
            if not self._waiting[worker] and worker in self._living:
                self._take(worker)
            self._worker = (worker + 1) % len(self._waiting)
            if self._waiting[worker]:
                return self._waiting[worker].popleft()
            # Only after the items before it, at the worker's turn, so that the error comes at the same place each time.
            if worker in self._failures:
                self._source.raise_failure(self._failures[worker])
        raise StopIteration

    def _take(self, worker: int) -> None:
        try:
            items, last, failure = next(self._chunks[worker])
            if last:
                # Read to the end: only there does the loader know that its worker is free for the next epoch.
                for _ in self._chunks[worker]:
                    raise AssertionError("a worker gave a chunk after its last one")
        except WorkerDied as error:
            raise self._source.explain_death(worker, error) from None
        except TaskQuarantined as error:
            deaths = [(worker, pid, code) for _, pid, code in error.deaths]
            raise TaskQuarantined(None, deaths, error.stderr, error.advice) from None
        self._waiting[worker].extend(items)
        if last:
            self._living.discard(worker)
        if failure is not None:
            self._failures[worker] = failure


def _pass_through(chunk: Any) -> Any:
    return chunk


def has_next(items: Any) -> bool:
    """Whether an iterator of a graph is that of `Interleaved`, and its next item has arrived."""
    # By an attribute: torch wraps the iterators of datapipes in an object that passes reads of attributes on.
    return bool(getattr(items, "_asyncloader_ready", False))
