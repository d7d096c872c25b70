"""The methods of DataLoader2 that show its run: counts, metrics, traces, and words.

Data path: beside the user: graph_statistics -> [run_methods].
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from asyncloader.dataloader2.graph.utils import DataPipe, parts_of
from asyncloader.dataloader2.graph_statistics import GraphStatistics
from asyncloader.dataloader2.services.interface import describe_reader
from asyncloader.dataloader2.services.worker_streams import Interleaved, names_of

if TYPE_CHECKING:
    from asyncloader.telemetry.diagnosis import Diagnosis
    from asyncloader.telemetry.metrics import Metric
    from asyncloader.tracing.trace import Trace

__all__ = ["RunMethods"]

_NONE_LEFT_OUT = {"dropped_samples": 0.0, "repeated_samples": 0.0}  # a graph shares its items among ranks by itself


class RunMethods:
    """What a `DataLoader2` shows of its run, as a `DataLoader` does. A batch of these figures is an item of the graph,
    and a batch of a worker is all items that it had ready when it was asked.
    """

    reading_service: Any
    _statistics: GraphStatistics
    _interleaved: Sequence[Interleaved] = ()
    _parts: Sequence[str] = ()  # in words: which parts of the graph are where

    def stats(self, prefix: str = "", *, interval: bool = False) -> dict[str, float]:
        """Counts and times of all epochs so far, as `DataLoader.stats`. Any thread.

        ``data/batches`` and ``data/samples`` count items of the graph, ``data/bytes`` the bytes of tensors that workers
        sent. Times of stages in workers are those of their batches.

        Args:
            prefix: put before every key, as ``"train/"``.
            interval: count only from the last call with ``interval=True`` on.
        """
        ready = sum(each.ready for each in self._interleaved)
        return self._statistics.snapshot(ready, _NONE_LEFT_OUT, prefix=prefix, interval=interval)

    def metrics(self) -> list[Metric]:
        """`stats()` with types, units, help and labels, for an exporter, as `DataLoader.metrics`."""
        from asyncloader.telemetry.metrics import metrics

        return metrics(self.stats(), self._statistics.blocks())

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

        known = weakref.ref(self)  # the loader's statistics refer to the trace, which must not keep the loader

        def verdict() -> str | None:
            loader = known()
            return None if loader is None else loader._diagnosis.bound

        return Trace(self._statistics, file, type(self).__name__, last, verdict)

    def explain(self) -> str:
        """How the graph is read, and what bounds the run so far, in words."""
        since = self._statistics.waiting_since
        waiting = [] if since is None else [f"waiting: for an item, for {perf_counter() - since:.1f} s so far"]
        head = f"{type(self).__name__}: {describe_reader(self.reading_service)}"
        return "\n".join([head, *self._parts, *waiting, _verdict(self._diagnosis)])

    @property
    def _diagnosis(self) -> Diagnosis:
        from asyncloader.telemetry.diagnosis import diagnose

        return diagnose(self._statistics.run(forks=any(each.method == "fork" for each in self._interleaved)))

    def _watch(self, graph: DataPipe) -> None:
        """Count also what the graph's workers do. Once, before the first epoch."""
        # The parts are listed here, not when they are asked for: torch's walk through a graph sets hooks that all
        # threads share.
        here = parts_of(graph)
        self._interleaved = [each for each in here if isinstance(each, Interleaved)]
        # The walk also goes through the parts that the workers get.
        theirs = {id(part) for each in self._interleaved for part in parts_of(each)}
        mine = names_of(each for each in here if id(each) not in theirs)
        self._parts = [f"in this process: {_listed(mine)}"]
        for each in self._interleaved:
            each.count_into(self._statistics)
            self._parts = [f"in each worker, started by {each.method}: {_listed(each.parts)}", *self._parts]
            if each.dealt:
                self._parts = ["in a process that deals its items to the workers: all parts before those", *self._parts]


def _verdict(found: Diagnosis) -> str:
    """What bounds a run, without the advice: that names options of a `DataLoader`."""
    if found.bound in ("unknown", "consumer"):
        return found.text
    figures = ", ".join(f"{name} {number:.3g}" for name, number in found.evidence.items() if name != "wait_frac")
    return f"{found.text.partition('. ')[0]}. Bound by: {found.bound}" + (f" ({figures})." if figures else ".")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
