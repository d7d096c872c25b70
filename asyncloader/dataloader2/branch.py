"""The workers' part of a graph: what each worker does with its copy, and how the copies' items become one stream again.

Data path: graph (a copy per worker) -> [branch: chunks] -> rings -> [branch: items in turn] -> rest of the graph.

Items travel in chunks, so that small ones do not cost a message each. The sizes of the chunks grow in the same way in
all workers (1, 1, 2, 2, 4, ... up to a limit), so that whoever takes one item of each worker in turn never has more
than one chunk of each at hand.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from asyncloader.dataloader2.dispatching import Dispatched, Dispatcher, EpochOrder
from asyncloader.dataloader2.graph._serialization import _pickled
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random._philox import PhiloxEngine
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services import Change, InitFn, ResetFn
from asyncloader.dataloader2.utils.worker import WorkerInfo, process_reset_fn, worker_graph
from asyncloader.errors import WorkerDied
from asyncloader.loader import DataLoader
from asyncloader.option_objects import Recovery
from asyncloader.workers.error_pickle import pickled_wrapper

__all__ = ["Branch", "Chunk", "Interleaved"]


class Chunk(NamedTuple):
    """Some items of one worker, in their order.

    Attributes:
        worker: its number.
        items: may be empty in the last chunk.
        last: whether the worker has no more in this epoch.
        failure: the error that ended its part of the epoch; None: it came to its end.
    """

    worker: int
    items: list[Any]
    last: bool
    failure: ExceptionWrapper | None = None


class Branch(IterableDataset[Chunk]):
    """The dataset that each worker has a copy of: reads the graph, and gives chunks.

    Args:
        datapipe: the end of the graph's replicable part.
        workers: their number.
        most: items in a chunk.
        init_fn: see `MultiProcessingReadingService`.
        reset_fn: the same.
        dispatched: for each worker, what reads from the dispatching process; empty without one.
    """

    _asyncloader_loss = (
        "It reads its part of the graph again, with the epoch's seeds, and drops what had come before: if the items "
        "follow from the seeds, none is lost and none comes twice."
    )

    def __init__(
        self,
        datapipe: DataPipe,
        workers: int,
        most: int,
        init_fn: InitFn | None,
        reset_fn: ResetFn | None,
        dispatched: list[Dispatched],
    ) -> None:
        self._datapipe = datapipe
        self._workers = workers
        self._most = most
        self._init_fn = init_fn
        self._reset_fn = reset_fn
        self._dispatched = dispatched
        self._worker: WorkerInfo | None = None
        self._initialized: DataPipe | None = None
        self._order = EpochOrder(0, SeedGenerator(0), None)

    def next_epoch(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None) -> EpochOrder:
        """In the main process: what the workers are told when they begin the next epoch."""
        # The workers draw from copies of new streams: from copies of these they would draw the same in every epoch.
        seeds = PhiloxEngine(seed_generator.generate_shared_seed()), PhiloxEngine(seed_generator.generate_seed())
        self._order = EpochOrder(self._order.epoch + 1, SeedGenerator(_rngs=seeds), iter_reset_fn)
        return self._order

    def _asyncloader_epoch_message(self) -> bytes:
        return _pickled(tuple(self._order))

    def _asyncloader_begin_epoch(self, message: bytes) -> None:
        self._order = EpochOrder(*pickle.loads(message))

    def __iter__(self) -> Iterator[Chunk]:
        worker = self._worker_info()
        items: list[Any] = []
        failure: ExceptionWrapper | None = None
        size, even = 1, False
        try:
            for item in self._begin(worker):  # type: ignore[union-attr]
                items.append(item)
                if len(items) == size:
                    yield Chunk(worker.worker_id, items, last=False)
                    items = []
                    size, even = min(size * 2 if even else size, self._most), not even
        except Exception:
            failure = pickle.loads(pickled_wrapper(ExceptionWrapper(where=f"in worker process {worker.worker_id}")))
        yield Chunk(worker.worker_id, items, last=True, failure=failure)

    def _worker_info(self) -> WorkerInfo:
        if self._worker is None:
            found = get_worker_info()
            assert found is not None
            self._worker = WorkerInfo(self._workers, found.id)
            # As in torchdata: a part that would share itself out among torch's workers gives all its items here.
            torch_worker._worker_info = None
        return self._worker

    def _begin(self, worker: WorkerInfo) -> DataPipe:
        """The graph, ready for this epoch."""
        if self._initialized is None:
            dispatched = self._dispatched[worker.worker_id] if self._dispatched else None
            self._initialized = worker_graph(self._datapipe, worker, self._init_fn, dispatched)
        for each in self._dispatched[worker.worker_id :][:1]:
            each.epoch = self._order.epoch
        seeds = self._order.seed_generator.spawn(worker.worker_id)
        # Not kept: what the functions make of the graph is for this epoch, so that each epoch begins with the same.
        return process_reset_fn(
            self._initialized, worker, seeds, iter_reset_fn=self._order.iter_reset_fn, custom_reset_fn=self._reset_fn
        )

    def __getstate__(self) -> dict[str, Any]:
        """For processes that are spawned: also with functions that only cloudpickle or dill can send."""
        return {**vars(self), **dict.fromkeys(_THEIRS), "pickled": _pickled([getattr(self, name) for name in _THEIRS])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, **dict(zip(_THEIRS, pickle.loads(state.pop("pickled")), strict=True)))


_RESTARTS = 3
"""How often each worker is replaced in an epoch, as by a loader with a seed."""

_THEIRS = ("_datapipe", "_init_fn", "_reset_fn", "_order")
"""Attributes of a `Branch` with the user's functions in them."""

_RESUME = "Mend what ended it, and go on from where this loader was: DataLoader2.from_state(loader.state_dict(), ...)."


class Interleaved(IterDataPipe[Any]):
    """In the main process: the workers' items, one of each in turn; workers without more are passed over.

    It is not replicable.

    Args:
        branch: what the workers read.
        dispatcher: the process that deals to them; None: there is none.
        options: further ones of the loader that has the workers.
    """

    def __init__(self, branch: Branch, dispatcher: Dispatcher | None, **options: Any) -> None:
        restarts = 0 if dispatcher else _RESTARTS
        self._loader: DataLoader[Any, Any] | None = DataLoader(
            branch,
            batch_size=None,
            collate_fn=_as_it_is,
            persistent_workers=True,
            generator=torch.Generator(),  # the global one is the user's
            max_worker_restarts=restarts,
            recovery=Recovery(allow_replay=True),
            **options,
        )
        self._beginning_or_ending = threading.Lock()
        self._dispatcher = dispatcher
        self._workers = self._loader.num_workers
        self._no_more = (
            f"It had been replaced {restarts} times in this epoch."
            if restarts
            else "It is not replaced, because what the dispatching process dealt to it is gone."
        )

    def is_replicable(self) -> bool:
        """No: the main process has the workers."""
        return False

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: torch adds lines to the errors of one.
        return _InTurn(self._chunks(), self._workers, self._dispatcher)

    def _chunks(self) -> Iterator[Chunk]:
        with self._beginning_or_ending:
            assert self._loader is not None, "the workers have ended"
            chunks = iter(self._loader)
        try:
            yield from chunks
        except WorkerDied as error:
            if "max_worker_restarts" not in error.advice:  # an option that a reading service does not have
                raise
            raise error.with_advice(f"{self._no_more} {_RESUME}") from None

    def shutdown(self) -> None:
        """End the workers, and wait for them. Idempotent."""
        with self._beginning_or_ending:
            loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()


class _InTurn(Iterator[Any]):
    """The items of an epoch.

    Args:
        chunks: of all workers.
        workers: their number.
        dispatcher: the process that deals to them; None: there is none.
    """

    def __init__(self, chunks: Iterator[Chunk], workers: int, dispatcher: Dispatcher | None) -> None:
        self._chunks = chunks
        self._dispatcher = dispatcher
        self._waiting: list[deque[Any]] = [deque() for _ in range(workers)]
        self._failures: dict[int, ExceptionWrapper] = {}
        self._living = set(range(workers))
        self._worker = 0  # whose turn it is

    @property
    def _asyncloader_ready(self) -> bool:
        """Whether the next item is here, and need not be waited for."""
        return bool(self._waiting[self._worker])

    def __next__(self) -> Any:
        while self._living or any(self._waiting):
            worker = self._worker
            while not self._waiting[worker] and worker in self._living:
                self._take(next(self._chunks))
            self._worker = (worker + 1) % len(self._waiting)
            if self._waiting[worker]:
                return self._waiting[worker].popleft()
            if worker in self._failures:
                failure: Any = self._failures[worker]
                if self._dispatcher is not None and failure.exc_type is WorkerDied:
                    raise self._dispatcher.died(_RESUME)
                failure.reraise()
        for _ in self._chunks:  # to the end, at which the workers become free
            raise AssertionError("a worker gave a chunk after its last one")
        raise StopIteration

    def _take(self, chunk: Chunk) -> None:
        self._waiting[chunk.worker].extend(chunk.items)
        if chunk.last:
            self._living.discard(chunk.worker)
        if chunk.failure is not None:
            self._failures[chunk.worker] = chunk.failure


def _as_it_is(chunk: Any) -> Any:
    return chunk
