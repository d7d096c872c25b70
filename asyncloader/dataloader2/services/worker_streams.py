"""The workers' part of a graph: what each worker does with its copy, and how the copies' items become one stream again.

Data path: graph (a copy per worker) -> [worker_streams: thread, chunks] -> rings -> [items in turn] -> rest of graph.

A thread of the worker reads the graph ahead. What it has read when the worker is asked is sent in one chunk: so small
items do not cost a message each, and an item that is there never waits for another one. Each worker has a loader of its
own, so that what one of them sends is not held up by what another one has not, and waits for its turn there.
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
from asyncloader.dataloader2.graph._serialization import _pickled
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random._philox import PhiloxEngine
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services.dispatching_process import Dispatched, Dispatcher, EpochOrder
from asyncloader.dataloader2.services.interface import Change, InitFn, ResetFn
from asyncloader.dataloader2.utils.worker import WorkerInfo, reset_graph, worker_graph
from asyncloader.errors import StateError, TaskQuarantined, WorkerDied
from asyncloader.loader import DataLoader
from asyncloader.workers.error_pickle import caught


class Chunk(NamedTuple):
    """Some items of one worker, in their order.

    Attributes:
        items: none in the last chunk.
        last: whether the worker has no more in this epoch.
        failure: the error that ended its part of the epoch; None: it came to its end.
    """

    items: list[Any]
    last: bool = False
    failure: ExceptionWrapper | None = None


def next_order(before: EpochOrder | None, seed_generator: SeedGenerator, iter_reset_fn: Change | None) -> EpochOrder:
    """In the main process: what all processes are told when they begin the next epoch."""
    # They draw from copies of new streams: from copies of these they would draw the same in every epoch.
    seeds = PhiloxEngine(seed_generator.generate_shared_seed()), PhiloxEngine(seed_generator.generate_seed())
    return EpochOrder(1 if before is None else before.epoch + 1, SeedGenerator(_rngs=seeds), iter_reset_fn)


_THEIRS = ("_datapipe", "_init_fn", "_reset_fn", "order")
"""Attributes of a `Branch` with the user's functions in them."""


class Branch(IterableDataset[Chunk]):
    """The dataset of one worker: reads the graph, and gives chunks.

    Args:
        datapipe: the end of the graph's replicable part.
        worker: which worker this is.
        ahead: items that it reads ahead, and the most in a chunk.
        init_fn: see `MultiProcessingReadingService`.
        reset_fn: the same.
        dispatched: what reads from the dispatching process; None: there is none.

    Attributes:
        order: what the worker is told when it begins the next epoch.
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
        self._asyncloader_loss = (
            f"It was worker {worker.worker_id} of the graph. The new one reads its part again, with the epoch's seeds, "
            "and drops what had come before: if the items follow from the seeds, none is lost and none comes twice."
        )

    def __getstate__(self) -> dict[str, Any]:
        """For processes that are spawned: also with functions that only cloudpickle or dill can send."""
        return {**vars(self), **dict.fromkeys(_THEIRS), "pickled": _pickled([getattr(self, name) for name in _THEIRS])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, **dict(zip(_THEIRS, pickle.loads(state.pop("pickled")), strict=True)))

    def _asyncloader_epoch_message(self) -> bytes:
        return _pickled(tuple(self.order))

    def _asyncloader_begin_epoch(self, message: bytes) -> None:
        self.order = EpochOrder(*pickle.loads(message))

    def __iter__(self) -> Iterator[Chunk]:
        # As in torchdata: a part that would share itself out among torch's workers gives all its items here.
        torch_worker._worker_info = None
        return _Chunks(self)

    def begin(self) -> ReadAhead:
        """Begin the epoch, and read it in a thread."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.stop(None)  # it reads the same graph
        if self._initialized is None:
            self._initialized = worker_graph(self._datapipe, self.worker, self._init_fn, self._dispatched)
        if self._dispatched is not None:
            self._dispatched.epoch = self.order.epoch
        seeds = self.order.seed_generator.spawn(self.worker.worker_id)
        # Not kept: what the functions make of the graph is for this epoch, so that each epoch begins with the same.
        datapipe = reset_graph(
            self._initialized,
            self.worker,
            seeds,
            iter_reset_fn=self.order.iter_reset_fn,
            custom_reset_fn=self._reset_fn,
        )
        self._reading = ReadAhead(partial(_iterated, datapipe), self.ahead)
        return self._reading


def _iterated(datapipe: Any) -> Iterator[Any]:
    return iter(datapipe)


class _Chunks(Iterator[Chunk]):
    """The chunks of an epoch. Its state is the number of items in them: a replacement of the worker drops as many."""

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
                self._reading = self._begun()
            items = self._reading.take(self._branch.ahead)
        except StopIteration:
            self._over = True
            return Chunk([], last=True)
        except Exception:
            self._over = True
            return Chunk([], last=True, failure=caught(f"in worker process {self._branch.worker.worker_id}"))
        self._given += len(items)
        return Chunk(items)

    def _begun(self) -> ReadAhead:
        reading, dropped = self._branch.begin(), 0
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
"""How often each worker is replaced in an epoch, as by a loader with a seed."""

_RESUME = "Mend what ended it, and go on from where this loader was: DataLoader2.from_state(loader.state_dict(), ...)."


class Interleaved(IterDataPipe[Any]):
    """In the main process: the workers' items, one of each in turn; workers without more are passed over.

    It is not replicable.

    Args:
        branches: what the workers read.
        dispatcher: the process that deals to them; None: there is none.
        context: of `multiprocessing`.
    """

    def __init__(self, branches: list[Branch], dispatcher: Dispatcher | None, context: Any) -> None:
        self._restarts = 0 if dispatcher else _RESTARTS
        self._loaders: tuple[DataLoader[Any, Any], ...] = tuple(
            DataLoader(
                branch,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=1,
                prefetch_factor=2,
                persistent_workers=True,
                multiprocessing_context=context,
                generator=torch.Generator(),  # the global one is the user's
                max_worker_restarts=self._restarts,
            )
            for branch in branches
        )
        self._dispatcher = dispatcher
        self._beginning_or_ending = threading.Lock()

    def is_replicable(self) -> bool:
        """No: the main process has the workers."""
        return False

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: torch adds lines to the errors of one.
        return _StreamsInTurn(self)

    def begin(self) -> list[Iterator[Chunk]]:
        """Begin the epoch in all workers."""
        with self._beginning_or_ending:
            assert self._loaders, "the workers have ended"
            return [iter(loader) for loader in self._loaders]

    def died(self, worker: int, error: WorkerDied) -> WorkerDied:
        """The error with this worker's number, and what a user of a graph can do."""
        advice = error.advice
        if "max_worker_restarts" in advice:  # an option that a reading service does not have
            why = f"It had been replaced {self._restarts} times in this epoch."
            if not self._restarts:
                why = "It is not replaced, because what the dispatching process dealt to it is gone."
            advice = f"{why} {_RESUME}"
        return WorkerDied(worker, error.pid, error.exitcode, error.reason, advice, error.trace)

    def failed(self, failure: Any) -> None:
        """Raise the error that ended a worker's part of the epoch."""
        if self._dispatcher is not None and failure.exc_type is WorkerDied:
            raise self._dispatcher.died(_RESUME)
        failure.reraise()

    def shutdown(self) -> None:
        """End the workers, and wait for them. Idempotent."""
        with self._beginning_or_ending:
            loaders, self._loaders = self._loaders, ()
        ending = [threading.Thread(target=each.close, name="asyncloader-stop") for each in loaders[1:]]
        for thread in ending:
            thread.start()
        for each in loaders[:1]:
            each.close()
        for thread in ending:
            thread.join()


class _StreamsInTurn(Iterator[Any]):
    """The items of an epoch.

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
        """Whether the next item is here, and need not be waited for."""
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
            if worker in self._failures:
                self._source.failed(self._failures[worker])
        raise StopIteration

    def _take(self, worker: int) -> None:
        try:
            items, last, failure = next(self._chunks[worker])
            if last:
                for _ in self._chunks[worker]:  # to the end, at which the worker becomes free
                    raise AssertionError("a worker gave a chunk after its last one")
        except WorkerDied as error:
            raise self._source.died(worker, error) from None
        except TaskQuarantined as error:
            deaths = [(worker, pid, code) for _, pid, code in error.deaths]
            raise TaskQuarantined(None, deaths, error.stderr, error.advice) from None
        self._waiting[worker].extend(items)
        if last:
            self._living.discard(worker)
        if failure is not None:
            self._failures[worker] = failure


def _as_it_is(chunk: Any) -> Any:
    return chunk
