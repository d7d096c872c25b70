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

from asyncloader.dataloader2.dispatching import Dispatched, EpochOrder
from asyncloader.dataloader2.graph._serialization import _pickled
from asyncloader.dataloader2.graph.settings import set_graph_random_seed
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random._philox import PhiloxEngine
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services import Change, InitFn, ResetFn
from asyncloader.dataloader2.utils.worker import WorkerInfo, seed_process, worker_graph
from asyncloader.errors import WorkerDied
from asyncloader.loader import DataLoader
from asyncloader.option_objects import Recovery

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
        self._begun: DataPipe | None = None
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
        found = get_worker_info()
        assert found is not None
        worker = WorkerInfo(self._workers, found.id)
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
            failure = ExceptionWrapper(where=f"in worker process {worker.worker_id}")
        yield Chunk(worker.worker_id, items, last=True, failure=failure)

    def _begin(self, worker: WorkerInfo) -> DataPipe:
        """The graph, ready for this epoch."""
        if self._begun is None:
            self._begun = self._initialized(worker)
        datapipe, order = self._begun, self._order
        for each in self._dispatched[worker.worker_id :][:1]:
            each.epoch = order.epoch
        if order.iter_reset_fn is not None:
            datapipe = order.iter_reset_fn(datapipe)
        seeds = order.seed_generator.spawn(worker.worker_id)
        seed_process(seeds)
        datapipe = set_graph_random_seed(datapipe, seeds)
        if self._reset_fn is not None:
            datapipe = self._reset_fn(datapipe, worker, seeds)
        self._begun = datapipe
        return datapipe

    def _initialized(self, worker: WorkerInfo) -> DataPipe:
        dispatched = self._dispatched[worker.worker_id] if self._dispatched else None
        return worker_graph(self._datapipe, worker, self._init_fn, dispatched)


_RESUME = "Mend what ended it, and go on from where this loader was: DataLoader2.from_state(loader.state_dict(), ...)."


class Interleaved(IterDataPipe[Any]):
    """In the main process: the workers' items, one of each in turn; workers without more are passed over.

    It is not replicable.

    Args:
        branch: what the workers read.
        restarts: how often each of them may be replaced in an epoch.
        options: further ones of the loader that has the workers.
    """

    def __init__(self, branch: Branch, restarts: int, **options: Any) -> None:
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
        return _InTurn(self._chunks(), self._workers)

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
    """

    def __init__(self, chunks: Iterator[Chunk], workers: int) -> None:
        self._chunks = chunks
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
                self._failures[worker].reraise()
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
