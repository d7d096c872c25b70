"""The methods of DataLoader2 that show its run: counts, metrics, traces, a page, a progress bar, and words.

Data path: beside the user: graph_statistics -> [run_methods].
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from asyncloader.dataloader2.graph.utils import DataPipe, parts_of
from asyncloader.dataloader2.graph_statistics import GraphStatistics
from asyncloader.dataloader2.services.worker_streams import Interleaved, names_of
from asyncloader.errors import LoaderClosed
from asyncloader.telemetry.figures import STORE_FIGURES

if TYPE_CHECKING:
    from asyncloader.live.dashboard import Dashboard
    from asyncloader.loader_dashboard import LoaderDashboard
    from asyncloader.progress_bar import EpochProgress
    from asyncloader.telemetry.diagnosis import Diagnosis
    from asyncloader.telemetry.metrics import Metric
    from asyncloader.tracing.trace import Trace

__all__ = ["RunMethods"]

T_co = TypeVar("T_co", covariant=True)

_MEANINGLESS = {
    *(f"data/{name}" for name in ("prefetch_depth", "worker_retirements")),
    *(f"data/{name}" for name in ("skipped_samples", "refilled_samples")),
    *(f"device/{name}" for name in ("page_locked_bytes", "page_lock_s", "staged_batches")),
}
"""Figures of a `DataLoader` that a graph cannot have."""

_OF_WORKERS = {
    *(f"data/{name}" for name in ("bytes", "bytes_per_sec", "queue_depth", "startup_s", "worker_busy_frac")),
    *(f"data/{name}" for name in ("oversize_batches", "ring_copies", "worker_restarts")),
    *(f"store/{name}" for name in STORE_FIGURES),
}
"""Figures that only the workers of a graph count."""


class RunMethods(Generic[T_co]):
    """What a `DataLoader2` shows of its run, as a `DataLoader` does. A batch of these figures is an item of the graph,
    and a batch of a worker is all items that it had ready when it was asked.
    """

    reading_service: Any
    _adapted: bool
    _dashboard: LoaderDashboard
    _datapipe_before_reading_service_adapt: DataPipe | None
    _is_paused: bool
    _read_by: str
    _statistics: GraphStatistics
    _terminated: bool
    _interleaved: Sequence[Interleaved] = ()
    _parts: Sequence[str] = ()  # in words: which parts of the graph are where

    if TYPE_CHECKING:

        @property
        def _delivered(self) -> int | None: ...

        @property
        def _position(self) -> int | None: ...

    def stats(self, prefix: str = "", *, interval: bool = False) -> dict[str, float]:
        """Counts and times of all epochs so far, as `DataLoader.stats`. Any thread.

        ``data/batches`` and ``data/samples`` count items of the graph, ``data/bytes`` the bytes of tensors that workers
        sent. Times of stages in workers are those of their batches. Figures that a graph does not have, or without
        workers cannot have, are left out.

        Without workers, and where parts of the graph in this process follow them, the stages ``wait``, ``consumer`` and
        ``fetch`` are those of the items that were read since this method, `metrics`, `trace` or `dashboard` was called
        first: until then an item costs nothing but its time in ``data/wait_s``.

        Args:
            prefix: put before every key, as ``"train/"``.
            interval: count only from the last call with ``interval=True`` on.
        """
        self._statistics.ask()
        return {prefix + key: value for key, value in self._figures(interval=interval).items()}

    def _figures(self, *, interval: bool = False) -> dict[str, float]:
        """Those of `stats`, which a graph has."""
        ready = sum(each.ready for each in self._interleaved)
        found = self._statistics.snapshot(ready, interval=interval)
        left_out = _MEANINGLESS if self._interleaved else _MEANINGLESS | _OF_WORKERS
        return {key: value for key, value in found.items() if key not in left_out}

    def metrics(self) -> list[Metric]:
        """`stats()` with types, units, help and labels, for an exporter, as `DataLoader.metrics`."""
        from asyncloader.telemetry.metrics import metrics

        return metrics(self.stats(), self._statistics.blocks())

    def progress(self) -> EpochProgress[T_co]:
        """The items with a progress bar, by ``for`` or ``async for``, as `DataLoader.progress`. How many items
        there will be is not known.
        """
        from asyncloader.progress_bar import EpochProgress

        name = type(self).__name__
        return EpochProgress(
            self, self._statistics, lambda: self._position or 0, lambda: name, lambda: self._diagnosis, "item"
        )

    def trace(self, file: str | os.PathLike[str], *, last: float | None = None) -> Trace:
        """Record what each worker and this process does from now on, until the returned trace is closed, or `shutdown`;
        as `DataLoader.trace`. With workers, the consumer's batches are the workers'; without, the items of the graph.

        Args:
            file: ends with ``.json`` or ``.json.gz``.
            last: seconds that a file covers, for a trace that stays on. Default: all.

        Raises:
            OSError: the file cannot be written.
            RuntimeError, ValueError: the loader is being traced already; the file's name, or `last`.
        """
        from asyncloader.tracing.trace import Trace

        return Trace(self._statistics, file, type(self).__name__, last)

    def dashboard(self, port: int = 0) -> Dashboard:
        """Serve a page that shows the loader while it runs, as `DataLoader.dashboard`, until `shutdown`.

        Args:
            port: the page's; 0: any that is free.

        Raises:
            LoaderClosed: the loader was shut down, perhaps by an error of the graph.
            OSError: the port is in use, or the folder for the socket of `asyncloader top` cannot be used.
        """
        from asyncloader.dataloader2.graph_reading import read_graph

        opened = None
        if not self._terminated:
            self._statistics.ask()
            opened = self._dashboard.open(self, read_graph, self._statistics, port)
        if opened is None:
            raise LoaderClosed(f"{type(self).__name__} was shut down; make a new one to watch it")
        return opened

    def explain(self) -> str:
        """How the graph is read, and what bounds the run so far, in words."""
        since = self._statistics.waits_since()
        waiting = [] if since is None else [f"waiting: for an item, for {perf_counter() - since:.1f} s so far"]
        head = f"{type(self).__name__}: {self._reader}"
        return "\n".join([head, *self._parts, *waiting, self._diagnosis.text])

    def _repr_html_(self) -> str:
        from asyncloader.dataloader2.graph_reading import read_graph
        from asyncloader.explain import html_table

        cells = {"read by": self._reader}
        for part in self._parts:
            where, _, names = part.partition(": ")
            cells[where] = names
        cells["position"] = self._place
        return html_table(type(self).__name__, cells, read_graph(self) if self._statistics.epochs else None)

    @property
    def _reader(self) -> str:
        """The reading service in words."""
        if self._adapted:
            return self._read_by
        return "no reading service" if self.reading_service is None else type(self.reading_service).__name__

    @property
    def _place(self) -> str:
        """The position in words."""
        delivered = self._delivered
        if self._terminated:
            return "shut down"
        if delivered is None:
            return "between two epochs" if self._statistics.epochs else "not iterated yet"
        return f"{delivered} items of this epoch delivered{', paused' if self._is_paused else ''}"

    @property
    def _diagnosis(self) -> Diagnosis:
        """The verdict, without the advice: that names options of a `DataLoader`."""
        from asyncloader.telemetry.diagnosis import diagnose

        found = diagnose(self._statistics.run(forks=any(each.method == "fork" for each in self._interleaved)))
        return found._replace(text=_verdict(found), candidates=())

    def _watch(self, graph: DataPipe) -> None:
        """Count also what the graph's workers do. Once, before the first epoch."""
        # The parts are listed here, not when they are asked for: torch's walk through a graph sets hooks that all
        # threads share.
        here = parts_of(graph) or [graph]
        self._interleaved = [each for each in here if isinstance(each, Interleaved)]
        # The walk also goes through the parts that the workers get.
        theirs = {id(part) for each in self._interleaved for part in parts_of(each)}
        mine = names_of(each for each in here if id(each) not in theirs)
        self._parts = [f"in this process: {_listed(mine)}"]
        for each in self._interleaved:
            each.count_into(self._statistics, by_chunk=each is graph)
            self._parts = [f"in each worker, started by {each.method}: {_listed(each.parts)}", *self._parts]
            if each.dealt:
                self._parts = ["in a process that deals its items to the workers: all parts before those", *self._parts]
        if os.environ.get("ASYNCLOADER_TOP") == "1":
            watch = partial(_open_socket, weakref.ref(self))
            for each in self._interleaved:
                each.when_started = watch  # only then: they are forked before there is a thread for it
            if not self._interleaved:
                watch()


def _open_socket(known: weakref.ref[RunMethods[Any]]) -> None:
    """Have `asyncloader top` show the loader."""
    from asyncloader.dataloader2.graph_reading import read_graph

    loader = known()
    if loader is not None:
        loader._statistics.ask()
        loader._dashboard.watch(loader, read_graph, loader._statistics)


def _verdict(found: Diagnosis) -> str:
    if found.bound in ("unknown", "consumer"):
        return found.text
    evidence: Mapping[str, float] = found.evidence
    figures = ", ".join(f"{name} {number:.3g}" for name, number in evidence.items() if name != "wait_frac")
    return f"{found.text.partition('. ')[0]}. Bound by: {found.bound}" + (f" ({figures})." if figures else ".")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
