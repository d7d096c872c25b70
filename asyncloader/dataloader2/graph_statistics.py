"""Counts the items of a DataLoader2, and joins the counts and traces of the loaders that its workers have.

Data path: beside the user: iterator, worker_streams -> [graph_statistics].

Each worker of a graph has a loader of its own (`Interleaved`), with counters of its own, which its engine updates as in
any loader. They are added up when they are read. What an item costs depends on where the user gets it from:

* The graph ends with the workers' items. Then `next` waits only for a worker's batch of items, and that loader times
  it. An item costs nothing but its number, which is the loader's position, too.
* The last parts of the graph, or all, run in this process. Then `next` is timed, and the time is added to a sum. More
  is recorded of the first item, and of one item every 50 ms; of every item from the first call of `ask` on.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from time import perf_counter, process_time, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncloader.cpus import cpu_limit, usable_cpus
from asyncloader.telemetry.counters import Recorder, total
from asyncloader.telemetry.run_figures import Run
from asyncloader.telemetry.statistics import Statistics

if TYPE_CHECKING:
    from asyncloader.tracing.recording import Recording

_SUMMED = ("bytes", "oversize_batches", "ring_copies", "worker_restarts", "busy_s", "worker_s")
"""Figures that only the workers' loaders count."""

_LOOK_S = 0.05  # between two items that are looked at closely


class GraphStatistics(Statistics):
    """The counters of one DataLoader2 over all of its epochs. A batch is an item of the graph.

    The iterator increments `batches` itself: it is the position in the epoch, too, so an item is counted once.
    """

    __slots__ = (
        "_asked",
        "_before_epoch",
        "_begun",
        "_fresh",
        "_measure_at",
        "_note_fetch",
        "_of_workers",
        "_running",
        "by_chunk",
        "look_at",
    )

    def __init__(self) -> None:
        super().__init__()
        self._of_workers: list[WorkerStatistics] = []
        self.by_chunk = False
        """Whether `next` waits for workers alone, whose loaders time that; else the caller of `next` does."""
        self.look_at = 0.0
        """When an item is to be passed to `begin_look` and `end_look`."""
        self._asked = False  # whether each item is
        self._begun = self._measure_at = 0.0
        self._fresh = True
        self._before_epoch = 0  # items
        # Seconds of use before, and since when an iterator is in use. One tuple, so that a reader in another thread
        # never counts a time twice, or not at all.
        self._running: tuple[float, float | None] = 0.0, None
        self._note_fetch = self.recorder.note("fetch")
        self._told_slow_start = True  # the workers' loaders say so

    def of_worker(self, number: int, workers: int, *, by_chunk: bool) -> WorkerStatistics:
        """Return the counters for the loader of a worker.

        Args:
            number: the worker's.
            workers: how many the graph has.
            by_chunk: whether `next` waits for workers alone.
        """
        self.by_chunk, self._measure_at = by_chunk, float("inf")
        made = WorkerStatistics(self, number, workers)
        self._of_workers.append(made)
        made.follow(self.trace)
        self.num_workers = workers
        return made

    def ask(self) -> None:
        """From now on, look at each item closely. Any thread."""
        if not self._asked:
            self._mark = 0.0  # it is not known when the last item was delivered
            self._asked, self.look_at = True, 0.0

    # ---------------------------------------------------------------------------------------------- counting

    def begin_epoch(self) -> None:
        """Begin to measure an epoch."""
        self.leave()
        self._begun = self.begin()
        self._fresh, self._before_epoch, self.look_at = True, self.batches, 0.0
        self._running = self._running[0], self._begun

    def time_items(self) -> None:
        """From now on `next` is timed, because parts in this process follow the workers' items. Idempotent."""
        if self.by_chunk:
            # In this order: the sum must not become less.
            self.wait_s += sum(each.wait_s for each in self._of_workers)
            self.by_chunk = False
            for worker in self._of_workers:
                worker.leave_waits_out()

    def use(self) -> None:
        """An iterator is in use, perhaps again."""
        before, since = self._running
        if since is None:
            self._cpu_mark = process_time()
            self._running = before, perf_counter()

    def leave(self) -> None:
        """The iterator is not in use any more. Idempotent. Finalizers call this, in any thread."""
        before, since = self._running
        if since is not None:
            self._running = before + perf_counter() - since, None
            self.main_cpu_s += process_time() - self._cpu_mark

    def begin_look(self, began: float) -> float:
        """Begin to look at an item. Returns the thread's CPU time; -1: it is not to be measured."""
        # Without workers: how much of the time of an item is computing.
        return thread_time() if began >= self._measure_at else -1.0

    def end_look(self, began: float, now: float, computed: float) -> None:
        """Record more of an item than its time. Before it is counted in `batches`.

        Args:
            began: when `next` was called.
            now: when it returned.
            computed: from `begin_look`.
        """
        waited = now - began
        if self._fresh:
            self._fresh = False
            self.first_batch(self._begun)
        if now >= self._look_at:
            self._look(now)
        if computed >= 0:
            self._measure_at = now + _LOOK_S
            self.recorder.add("sampled_s", waited)
            self.recorder.add("sampled_cpu_s", thread_time() - computed)
        if not self._asked:
            self.look_at = now + _LOOK_S
            return
        self.look_at = 0.0  # again: this thread may have set it while another thread called `ask`
        self._note_wait(waited)
        if self._mark:
            self._note_consumer(began - self._mark)
        self._mark = now
        if not self._of_workers:  # which count and trace what they do
            self._note_fetch(waited)
            if (trace := self.trace) is not None:
                trace.stage("fetch", waited)
                trace.delivered(self.epochs, self.batches - self._before_epoch, -1, began, now, None, -1, 0)

    def begins_with(self) -> None:
        """A worker's first items of the epoch have come."""
        if self.by_chunk and self._fresh:
            self._fresh = False
            self.first_batch(self._begun)

    def set_trace(self, before: Recording | None, recording: Recording | None) -> bool:
        """Record from now on also what the workers' loaders do. As `Statistics.set_trace`."""
        if recording is not None:
            self.ask()
        changed = super().set_trace(before, recording)
        if changed:
            for each in list(self._of_workers):
                each.follow(self.trace)
        return changed

    # ----------------------------------------------------------------------------------------------- reading

    def times(self) -> tuple[float, float]:
        """Seconds in which an iterator was in use, from its epoch's beginning to its end or until it was dropped; and
        of these, seconds in `next`.
        """
        now = perf_counter()
        before, since = self._running
        waited, waits = self.wait_s, self.waiting_since
        if self.by_chunk:
            # Not `waiting_since`: while workers start, their loaders count that one after the other.
            waited, waits = waited + sum(each.wait_s for each in self._of_workers), self._worker_waits_since()
        elapsed = before if since is None else before + max(0.0, now - since)
        return elapsed, waited if waits is None else waited + max(0.0, now - waits)

    def waits_since(self) -> float | None:
        """When the user's thread began to wait for the next item; None: it does not wait."""
        since = self.waiting_since
        return self._worker_waits_since() if since is None and self.by_chunk else since

    def _worker_waits_since(self) -> float | None:
        # One at most: the user's thread waits for one worker at a time.
        return next((since for each in self._of_workers if (since := each.waiting_since) is not None), None)

    def _sums(self) -> dict[str, float]:
        """Sums that are not attributes of this object; those of the workers' loaders, if there are workers."""
        elapsed, waited = self.times()
        loaders, found = (
            list(self._of_workers),
            {"samples": float(self.batches), "elapsed_s": elapsed, "wait_s": waited},
        )
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
        sums, blocks = self._sums(), self.blocks()
        in_use = self._running[1] is not None
        if not self._of_workers and self.batches:
            # Only their means matter, which are known of all items, and not only of those that were looked at.
            means = Recorder()
            means.time("fetch", sums["wait_s"] / self.batches)
            means.time("consumer", max(0.0, sums["elapsed_s"] - sums["wait_s"]) / self.batches)
            for key in ("sampled_s", "sampled_cpu_s"):
                means.put(key, total(blocks[-1], key))
            blocks = {-1: means.block.tolist()}
        return Run(
            batches=sum(each.batches for each in self._of_workers) or self.batches,
            epochs=self.epochs,
            elapsed_s=sums["elapsed_s"],
            wait_s=sums["wait_s"],
            startup_s=self.startup_s,
            main_cpu_s=self.main_cpu_s + (process_time() - self._cpu_mark if in_use else 0.0),
            ring_copies=int(sums.get("ring_copies", 0)),
            oversize=int(sums.get("oversize_batches", 0)),
            blocks=blocks,
            cpus=usable_cpus(),
            cpu_limit=cpu_limit(),
            others_cpu=self.others_cpu(),
            workers=self.num_workers,
            persistent=True,
            forks=forks,
            iterable=True,
            keeps_states=True,
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
        self.untold = False  # its verdict would name options of a loader that the user does not see
        self._graph = weakref.ref(graph)
        self._number, self._workers_of_graph = number, workers
        # Between two batches of one worker the user's thread also waits for others.
        self._note_consumer = _leave_out
        if not graph.by_chunk:
            self.leave_waits_out()

    def leave_waits_out(self) -> None:
        """From now on, do not time the waits for each batch: the graph's counters have those of the user's thread."""
        self._note_wait = _leave_out

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

    def first_batch(self, begun: float) -> None:
        """Record the time to an epoch's first batch, also for the graph."""
        super().first_batch(begun)
        if (graph := self._graph()) is not None:
            graph.begins_with()

    def follow(self, recording: Recording | None) -> None:
        """Record for the trace of the graph, or (None) no more. Any thread."""
        mine: Recording | None = None
        if recording is not None:
            mine = recording.of_worker(self._number, self._workers_of_graph, self.ring_copies)
        while not self.set_trace(self.trace, mine):
            pass  # another thread has changed it between the two looks at it


def _leave_out(_: float) -> None:
    """Count no time."""
