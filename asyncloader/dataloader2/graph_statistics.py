"""Counts the items of a DataLoader2, and joins the counts and traces of the loaders that its workers have.

Data path: beside the user: worker_streams, dataloader2 -> [graph_statistics].

Each worker of a graph has a loader of its own (`Interleaved`), with counters of its own, which its engine updates as in
any loader. They are added up when they are read. So an item costs no more here than a batch does there.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncloader.cpus import cpu_limit, usable_cpus
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.run_figures import Run
from asyncloader.telemetry.statistics import Statistics

if TYPE_CHECKING:
    from asyncloader.tracing.recording import Recording

_SUMMED = ("bytes", "oversize_batches", "ring_copies", "worker_restarts", "busy_s", "worker_s")
"""Figures that only the workers' loaders count."""

_LOOK_S = 0.05  # between two items whose CPU time is measured


class GraphStatistics(Statistics):
    """The counters of one DataLoader2 over all of its epochs. A batch is an item of the graph."""

    __slots__ = ("_before_epoch", "_begun", "_fresh", "_measure_at", "_note_fetch", "_of_workers")

    def __init__(self) -> None:
        super().__init__()
        self._of_workers: list[WorkerStatistics] = []
        self._begun = self._measure_at = 0.0
        self._fresh = True
        self._before_epoch = 0  # items
        self._note_fetch = self.recorder.note("fetch")
        self._told_slow_start = True  # the workers' loaders say so

    def of_worker(self, number: int, workers: int) -> WorkerStatistics:
        """Return the counters for the loader of a worker.

        Args:
            number: the worker's.
            workers: how many the graph has.
        """
        self._measure_at = float("inf")
        made = WorkerStatistics(self, number, workers)
        self._of_workers.append(made)
        made.follow(self.trace)
        self.num_workers = workers
        return made

    # ---------------------------------------------------------------------------------------------- counting

    def begin_epoch(self) -> None:
        """Begin to measure an epoch."""
        self._begun = self.begin()
        self._fresh, self._before_epoch = True, self.batches

    def begin_item(self) -> tuple[float, float | None]:
        """Return when the wait for an item begins, and, of some items, the thread's CPU time. The caller resets
        `waiting_since`.
        """
        self.waiting_since = began = perf_counter()
        # Without workers: how much of the time of an item is computing.
        return began, thread_time() if began >= self._measure_at else None

    def end_item(self, began: float, computed: float | None) -> None:
        """Count an item. Takes the values of `begin_item`."""
        now = perf_counter()
        # As `batch`, with what an item has, and in less time: an item may be a single number.
        waited, passed = now - began, now - self._mark
        self._mark = now
        self.batches += 1
        self.wait_s += waited
        self.elapsed_s += passed
        self._note_wait(waited)
        self._note_consumer(passed - waited)
        if now >= self._look_at:
            self._look(now)
        if self._fresh:
            self._fresh = False
            self.first_batch(self._begun)
        if not self._of_workers:  # which count and trace what they do
            self._made_here(waited, passed, now, computed)

    def _made_here(self, waited: float, passed: float, now: float, computed: float | None) -> None:
        """Count and trace an item that this process has made."""
        if computed is not None:
            self._measure_at = now + _LOOK_S
            self.recorder.add("sampled_s", waited)
            self.recorder.add("sampled_cpu_s", thread_time() - computed)
        self.busy_s += waited
        self.worker_s += passed
        self._note_fetch(waited)
        if (trace := self.trace) is not None:
            trace.stage("fetch", waited)
            trace.delivered(self.epochs, self.batches - self._before_epoch - 1, -1, now - waited, now, None, -1, 0)

    def set_trace(self, before: Recording | None, recording: Recording | None) -> bool:
        """Record from now on also what the workers' loaders do. As `Statistics.set_trace`."""
        changed = super().set_trace(before, recording)
        if changed:
            for each in list(self._of_workers):
                each.follow(self.trace)
        return changed

    # ----------------------------------------------------------------------------------------------- reading

    def _sums(self) -> dict[str, float]:
        """The sums of the workers' loaders, if there are workers; an item counts as one sample."""
        loaders, found = list(self._of_workers), {"samples": float(self.batches)}
        if loaders:
            found |= {name: float(sum(getattr(each, name) for each in loaders)) for name in _SUMMED}
        return found

    def _totals(self, left_out: Mapping[str, float]) -> Any:
        totals = super()._totals(left_out)
        return totals._replace(sums={**totals.sums, **self._sums()})

    def _main_block(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        block = super()._main_block()
        for each in list(self._of_workers):
            block += each._main_block()
        return block

    def run(self, *, forks: bool) -> Run:
        """Return the figures of the run so far, for a diagnosis: that of the workers' batches, where there are workers.

        Args:
            forks: whether workers are forked.
        """
        sums = self._sums()
        return Run(
            batches=sum(each.batches for each in self._of_workers) or self.batches,
            epochs=self.epochs,
            elapsed_s=self.elapsed_s,
            wait_s=self.wait_s,
            startup_s=self.startup_s,
            main_cpu_s=self.main_cpu_s,
            ring_copies=int(sums.get("ring_copies", 0)),
            oversize=int(sums.get("oversize_batches", 0)),
            blocks=self.blocks(),
            cpus=usable_cpus(),
            cpu_limit=cpu_limit(),
            others_cpu=self.others_cpu(),
            workers=self.num_workers,
            persistent=True,
            forks=forks,
            iterable=True,
            keeps_states=True,
            busy_s={"busy_s": self.busy_s, **sums}["busy_s"],
        )


class WorkerStatistics(Statistics):
    """The counters of the loader of one worker of a graph.

    Args:
        graph: the graph's; held weakly, as it holds these.
        number: the worker's number in the graph; in its own loader it is worker 0.
        workers: of the graph.
    """

    __slots__ = ("_graph", "_number", "_workers_of_graph")

    def __init__(self, graph: GraphStatistics, number: int, workers: int) -> None:
        super().__init__()
        self._graph = weakref.ref(graph)
        self._number, self._workers_of_graph = number, workers
        # The graph's counters have these two stages of the user's own thread, by item.
        self._note_wait = self._note_consumer = _leave_out

    def add_worker(self, worker: int, recorder: Recorder, node: str = "") -> None:
        """Add the counts of a new process. Any thread."""
        super().add_worker(worker, recorder, node)
        if (graph := self._graph()) is not None:
            graph.add_worker(self._number, recorder, node)

    def workers_start(self) -> None:
        """Workers are started for the epoch that began last."""
        super().workers_start()
        if (graph := self._graph()) is not None:
            graph.workers_start()

    def follow(self, recording: Recording | None) -> None:
        """Record for the trace of the graph, or (None) no more. Any thread."""
        mine: Recording | None = None
        if recording is not None:
            from asyncloader.tracing.worker_recording import WorkerRecording  # late: few graphs are traced

            mine = WorkerRecording(recording, self._number, self._workers_of_graph, self.ring_copies)
        while not self.set_trace(self.trace, mine):
            pass  # another thread has changed it between the two looks at it


def _leave_out(_: float) -> None:
    """Count no time."""
