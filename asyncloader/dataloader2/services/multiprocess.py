"""Reads the replicable piece of a graph in worker processes, and the rest in the main process.

Data path: graph -> [multiprocess: cut] -> worker processes -> rings -> rest of the graph -> DataLoader2.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.multiprocessing as mp
from torch.utils.data.graph import traverse_dps

from asyncloader.dataloader2.graph.settings import set_graph_random_seed
from asyncloader.dataloader2.graph.utils import (
    DataPipe,
    _DummyIterDataPipe,
    end_of,
    find_lca_round_robin_sharding_dp,
    find_replicable_branches,
    parts_of_form,
    replace_dp,
)
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services.dispatching_process import Dispatcher, EpochOrder
from asyncloader.dataloader2.services.interface import PausableReadingService, reset_here, shutdown_parts
from asyncloader.dataloader2.services.worker_streams import Branch, Interleaved, next_order
from asyncloader.dataloader2.utils.worker import Change, InitFn, ResetFn, WorkerInfo, worker_graph


class MultiProcessingReadingService(PausableReadingService):
    """Reads the graph in worker processes; items cross through shared memory.

    Each worker has a copy of the graph's replicable piece, in which a `sharding_filter` keeps the worker's share. Parts
    that are not replicable, and those after them, stay in the main process. The parts up to a
    `sharding_round_robin_dispatch` run in one process of their own. Items come in turn, one of worker 0, one of worker
    1 and so on, in the order of the graph without workers. Workers live until `finalize`. A worker that dies is
    replaced, with a RuntimeWarning: the new worker reads its copy again with the epoch's seeds, and drops the items
    that had come. At a pause, workers go on until their buffers are full.

    Args:
        num_workers: default 0: the graph is read in this process, with a warning.
        multiprocessing_context: name of a start method; default None: torch's.
        worker_prefetch_cnt: items that each worker keeps ready; default 10; at least 1 is.
        main_prefetch_cnt: items that are kept ready in the main process, over all workers; default 10.
        worker_init_fn: changes each worker's copy of the graph, once; default None.
        worker_reset_fn: changes the copies at the beginning of each epoch; default None. The workers' generators of
            `random`, torch and numpy are seeded before.

    Raises:
        ValueError: `num_workers` is negative.
        AssertionError: at the first ``iter()``: the graph has no replicable branch, or more than one.
        WorkerDied: by ``next()``: a worker died that had been replaced three times in this epoch; or any worker of a
            graph with a dispatching process, which deals each item only once; or that process.
    """

    def __init__(
        self,
        num_workers: int = 0,
        multiprocessing_context: str | None = None,
        worker_prefetch_cnt: int = 10,
        main_prefetch_cnt: int = 10,
        worker_init_fn: InitFn | None = None,
        worker_reset_fn: ResetFn | None = None,
    ) -> None:
        if multiprocessing_context is not None and multiprocessing_context not in mp.get_all_start_methods():
            raise AssertionError(
                f"Please choose one available multiprocessing context from {mp.get_all_start_methods()}"
            )
        if not isinstance(num_workers, int):
            raise TypeError(
                f"num_workers should be a number of processes, but got {num_workers!r}: each reads a part of the graph "
                "that depends on their number, so it cannot be chosen while the graph is read"
            )
        if num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, not {num_workers}")
        self.num_workers = num_workers
        self.multiprocessing_context = multiprocessing_context
        self.worker_prefetch_cnt = worker_prefetch_cnt
        self.main_prefetch_cnt = main_prefetch_cnt
        self.worker_init_fn = worker_init_fn
        self.worker_reset_fn = worker_reset_fn
        self._branches: list[Branch] = []
        self._order: EpochOrder | None = None
        self._interleaved: Interleaved | None = None
        self._dispatcher: Dispatcher | None = None
        if not num_workers:
            warnings.warn("Please use `InProcessReadingService` for num_workers=0", stacklevel=2)

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Cut the graph, and start the dispatching process if it needs one. Workers start with the first item."""
        if self.num_workers:
            try:
                datapipe = self._cut(datapipe)
            except BaseException:
                if self._dispatcher is not None:
                    self._dispatcher.close()
                raise
        else:
            datapipe = worker_graph(datapipe, WorkerInfo(1, 0), self.worker_init_fn)
        self._set_end(datapipe)
        return datapipe

    def _cut(self, datapipe: DataPipe) -> DataPipe:
        graph = traverse_dps(datapipe)
        dispatching = find_lca_round_robin_sharding_dp(graph)
        dummy = _DummyIterDataPipe()
        if dispatching is not None:
            graph = replace_dp(graph, dispatching, dummy)
        branches = find_replicable_branches(graph)
        assert len(branches) == 1, "MultiProcessingReadingService only supports single replicable branch currently"
        context: Any = mp.get_context(self.multiprocessing_context)
        if dispatching is not None:
            self._dispatcher = Dispatcher(dispatching, self.num_workers, context)
        alone = branches[0] is end_of(graph)
        synced = bool(parts_of_form(end_of(graph), "fullsync"))
        # Without parts in the main process its share of ready items is kept by the workers, so no thread is needed.
        # With such parts a thread reads ahead, but not past a `fullsync`: all ranks must have read equally far there.
        ahead = self.main_prefetch_cnt if alone or synced else 0
        # A worker's loader has two chunks under way while its thread fills the next: so each is a third of the items.
        each = max(1, (self.worker_prefetch_cnt + -(-ahead // self.num_workers)) // 3)
        self._branches = [
            Branch(
                branches[0],
                WorkerInfo(self.num_workers, number),
                each,
                self.worker_init_fn,
                self.worker_reset_fn,
                None if self._dispatcher is None else self._dispatcher.dispatched[number],
            )
            for number in range(self.num_workers)
        ]
        self._interleaved = Interleaved(self._branches, self._dispatcher, context)
        end = end_of(replace_dp(graph, branches[0], self._interleaved))
        if self.main_prefetch_cnt > 0 and not ahead:
            end = end.prefetch(self.main_prefetch_cnt)
        return end

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None = None) -> Change | None:
        """Seed the main process's parts, and prepare the message by which each process begins the epoch."""
        assert self._end_datapipe is not None
        set_graph_random_seed(self._end_datapipe, seed_generator)
        if not self._branches:
            return reset_here(self._end_datapipe, self.worker_reset_fn, seed_generator, iter_reset_fn)
        self._order = next_order(self._order, seed_generator, iter_reset_fn)
        for branch in self._branches:
            branch.order = self._order
        if self._dispatcher is not None:
            # Before any worker begins the epoch and asks for an item of it.
            self._dispatcher.begin(self._order)
        return None

    def _read_by(self) -> str:
        return f"{type(self).__name__} with {self.num_workers} workers"

    def finalize(self) -> None:
        """End all processes and threads, and wait for them. A process that does not end in time is killed: the
        dispatching process after 20 seconds.
        """
        # The finalizers of the loader and of the service may call this at the same time, each in a thread. `pop` is
        # atomic, so only one of them gets the graph.
        end = vars(self).pop("_end_datapipe", None)
        if end is None:
            return
        dispatcher, self._dispatcher = self._dispatcher, None
        interleaved, self._interleaved = self._interleaved, None
        self._branches = []
        # In the direction of the items: dispatching process, workers, threads of the main process's parts. Each may be
        # waiting for an item of the process before it, and then can end only once that has ended.
        if dispatcher is not None:
            dispatcher.end_soon()
        try:
            if interleaved is not None:
                interleaved.shutdown()
            shutdown_parts(vars(self).pop("_with_threads", ()))
        finally:
            if dispatcher is not None:
                dispatcher.close()  # waits, which `end_soon` has not done


class PrototypeMultiProcessingReadingService(MultiProcessingReadingService):
    """The old name of `MultiProcessingReadingService`: warns, and makes that service."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Warn, and make a `MultiProcessingReadingService` with these arguments."""
        warnings.warn(
            "`PrototypeMultiProcessingReadingService` is deprecated and will be removed in TorchData 0.8. "
            "Please use `MultiProcessingReadingService`.",
            stacklevel=2,
        )
        return MultiProcessingReadingService(*args, **kwargs)
