"""Reads the replicable part of a graph in worker processes, and the rest in the main process.

Data path: graph -> [multiprocess: cut] -> worker processes -> rings -> rest of the graph -> DataLoader2.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.multiprocessing as mp
from torch.utils.data.graph import traverse_dps

from asyncloader.dataloader2.graph.cut import _DummyIterDataPipe, find_lca_round_robin_sharding_dp
from asyncloader.dataloader2.graph.settings import set_graph_random_seed
from asyncloader.dataloader2.graph.utils import DataPipe, end_of, find_replicable_branches, replace_dp
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services.dispatching_process import Dispatcher, EpochOrder
from asyncloader.dataloader2.services.interface import (
    Change,
    InitFn,
    PausableReadingService,
    ResetFn,
    each_of_form,
    reset_here,
    shutdown_parts,
)
from asyncloader.dataloader2.services.worker_streams import Branch, Interleaved, next_order
from asyncloader.dataloader2.utils.worker import WorkerInfo, worker_graph


class MultiProcessingReadingService(PausableReadingService):
    """Reads the graph in worker processes; items cross through shared memory.

    Each worker has a copy of the replicable part of the graph, in which a `sharding_filter` keeps its share. Parts that
    are not replicable, and those after them, stay in the main process. What comes up to a
    `sharding_round_robin_dispatch` runs in one process of its own. Items come in turn: one of worker 0, one of worker 1
    and so on, so that the order is that of the graph without workers. Workers live until `finalize`. One that dies is
    replaced, with a RuntimeWarning: the new one reads its part again with the epoch's seeds, and drops what had come.
    At a pause they go on until what they keep ready is full.

    Args:
        num_workers: default 0: the graph is read in this process, with a warning.
        multiprocessing_context: name of a start method; default None: torch's.
        worker_prefetch_cnt: items that each worker keeps ready; default 10; at least 1 is.
        main_prefetch_cnt: items that are kept ready in the main process, over all workers; default 10.
        worker_init_fn: changes each worker's copy of the graph, once; default None.
        worker_reset_fn: the same at the beginning of each epoch; default None. The workers' generators of `random`,
            torch and numpy are seeded before.

    Raises:
        AssertionError: at the first ``iter()``: no replicable part, or more than one.
        WorkerDied: by ``next()``: a worker died that had been replaced three times in this epoch, or one of a graph
            with a dispatching process, whose items are dealt only once; or that process died.
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
        """See the interface. Starts the dispatching process, if there is one; the workers start with the first item."""
        if self.num_workers:
            try:
                datapipe = self._cut(datapipe)
            except BaseException:
                if self._dispatcher is not None:
                    self._dispatcher.close()
                raise
        else:
            datapipe = worker_graph(datapipe, WorkerInfo(1, 0), self.worker_init_fn)
        self._reads(datapipe)
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
        synced = bool(each_of_form(end_of(graph), "fullsync"))
        # What the main process keeps ready comes from the workers. Only what it does itself to the items is read ahead
        # by a thread, and not past a `fullsync`: how far that is read must be the same in all ranks.
        ahead = self.main_prefetch_cnt if alone or synced else 0
        # A third lies in the worker's thread, and two are under way or in the main process.
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
        """See the interface."""
        assert self._end_datapipe is not None
        set_graph_random_seed(self._end_datapipe, seed_generator)
        if not self._branches:
            return reset_here(self._end_datapipe, self.worker_reset_fn, seed_generator, iter_reset_fn)
        self._order = next_order(self._order, seed_generator, iter_reset_fn)
        for branch in self._branches:
            branch.order = self._order
        if self._dispatcher is not None:
            self._dispatcher.begin(self._order)
        return None

    def _read_by(self) -> str:
        return f"{type(self).__name__} with {self.num_workers} workers"

    def finalize(self) -> None:
        """See the interface. Waits until all processes are gone; one that does not end within 20 seconds is killed."""
        end = vars(self).pop("_end_datapipe", None)  # once, whichever finalizers' threads come here
        if end is None:
            return
        dispatcher, self._dispatcher = self._dispatcher, None
        interleaved, self._interleaved = self._interleaved, None
        self._branches = []
        if dispatcher is not None:
            dispatcher.end_soon()  # first: a worker may wait for an item of it
        try:
            if interleaved is not None:
                interleaved.shutdown()  # then: a thread of the graph may wait for an item of theirs
            shutdown_parts(vars(self).pop("_with_threads", ()))
        finally:
            if dispatcher is not None:
                dispatcher.close()


class PrototypeMultiProcessingReadingService(MultiProcessingReadingService):
    """The old name of `MultiProcessingReadingService`: warns, and makes one of those."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        warnings.warn(
            "`PrototypeMultiProcessingReadingService` is deprecated and will be removed in TorchData 0.8. "
            "Please use `MultiProcessingReadingService`.",
            stacklevel=2,
        )
        return MultiProcessingReadingService(*args, **kwargs)
