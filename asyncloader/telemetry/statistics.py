"""Counts a loader's batches, samples, bytes and seconds.

Data path: beside the consumer. Always on; a few additions per batch.

Time is counted while an iterator is in use: from its start to its last batch or its end, without pauses between epochs.
Totals are updated by the consumer's thread alone, the times of a stage by the thread that runs the stage. Any thread
reads them, also while nothing is delivered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncloader.base.cpus import busy_seconds
from asyncloader.telemetry.counters import BLOCK_BYTES, KEYS, STAGES, Recorder, stage_times, total
from asyncloader.telemetry.figures import COUNTED, KEY_NAMES, TOTALS, LoaderFigures
from asyncloader.telemetry.slow_samples import SlowFigures, figures, joined

if TYPE_CHECKING:
    from asyncloader.telemetry.recording import Recording

_log = logging.getLogger("asyncloader")

_MOST_EARLIER = 16  # newest processes of a worker's number whose slowest samples are kept
_FIRST_S = 60.0  # of iterating: if more than half of it was waiting, the verdict is said unasked
_SLOW_S = 10.0  # until a first batch, from which on its parts are logged
_LOOK_S = 0.05  # between two looks at the CPU time
# Noted times of a stage that are worth a count. Behind a step of 10 ms it takes 0.1 ms for each stage, however few
# there are, as nothing of it is in the CPU's caches.
_WORTH_COUNTING = 256


class Statistics(LoaderFigures):
    """Counters of one loader over all of its iterators."""

    def __init__(self) -> None:
        for name in COUNTED:
            setattr(self, name, 0)
        self.epochs = 0  # iterators that began
        self.pickled = 0
        self.elapsed_s = 0.0
        self.main_cpu_s = 0.0  # CPU seconds of this process while an iterator was in use, the trainer's included
        self.busy_s = 0.0  # seconds that workers spent on tasks
        self.worker_s = 0.0  # seconds that workers existed while an iterator was in use
        self.ring_needed = 0  # ring_bytes with which the oversize batches would have fitted
        self.newest_skipped: list[Any] = []  # records of the newest iterator's bad samples
        self.silent: set[str] = set()  # stores that workers say do not answer
        self.look_closely_at = 0.0  # when to measure a batch without workers more closely; of all epochs
        self.waiting_since: float | None = None  # the consumer waits for a batch since then
        self.trace: Recording | None = None  # while the loader is traced
        self.recorder = Recorder()
        """Counts and times of the main process's work for this loader."""
        # Functions that note a time of each batch, see `Recorder.note`.
        self.note_sampler, self.note_transfer = self.recorder.note("sampler"), self.recorder.note("transfer")
        self.note_order = self.recorder.note("order")
        self._note_wait, self._note_consumer = self.recorder.note("wait"), self.recorder.note("consumer")
        self._workers: dict[int, _Worker] = {}
        self._nodes: dict[str, dict[str, float]] = {}  # totals of a service's nodes, by address
        # For both: replacements of workers are added by a thread of their own, while another thread reads.
        self._lock = threading.Lock()
        self.tell: Callable[[Statistics], object] | None = None  # says the verdict
        self.untold = True  # the first minute is not over; False from the beginning for a loader that is not the user's
        self._told_slow_start = False
        self._starting = False  # workers were started for the newest iterator, which has no batch yet
        self._before = _Totals({}, np.zeros(BLOCK_BYTES // 8))
        self._mark = self._look_at = self._cpu_mark = 0.0
        # When the first iterator began: the time, the CPU seconds of all programs, and those of this process.
        self._first_begun: tuple[float, float | None, float] = 0.0, None, 0.0

    # ---------------------------------------------------------------------------------------------- counting

    def add_worker(self, worker: int, recorder: Recorder, node: str = "") -> None:
        """Add the counts of a new process to those of the earlier processes with its number. Any thread.

        Args:
            worker: its number.
            recorder: its counts.
            node: the address where it is; empty: on this machine.
        """
        # In one step: a reader must count the earlier process's numbers once.
        with self._lock:
            known = self._workers.get(worker)
            earlier = np.zeros(BLOCK_BYTES // 8) if known is None else known.total()
            slow = [] if known is None else [*known.earlier_slow[-_MOST_EARLIER:], bytes(known.recorder.slow)]
            self._workers[worker] = _Worker(recorder, earlier, slow, node)
            if node:
                self._nodes.setdefault(node, {"batches": 0.0, "busy_s": 0.0, "bytes": 0.0})

    def set_trace(self, before: Recording | None, recording: Recording | None) -> bool:
        """Record from now on, or (None) no more, unless another thread has changed that since `trace` was `before`.
        Returns whether it had not. Any thread.
        """
        note = self.recorder.note("sampler")
        with self._lock:
            if self.trace is not before:
                return False
            self.recorder.sink = None if recording is None else recording.stage
            self.note_sampler = note if recording is None else partial(_note_twice, note, recording)
            self.trace = recording
            return True

    def finish_trace(self) -> None:
        """End the loader's trace, if it has one, and write its file. Blocks.

        Raises:
            OSError: it cannot be written.
        """
        if self.trace is not None:
            self.trace.finish(self)

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def begin(self) -> float:
        """Begin to measure an iterator. Returns the time, for `begins` and `first_batch`."""
        self.epochs += 1
        self._starting = False
        self._cpu_mark = process_time()
        self._mark = perf_counter()
        self._look_at = self._mark + _LOOK_S
        if self.epochs == 1:
            self._first_begun = self._mark, busy_seconds(), self._cpu_mark
        return self._mark

    def begins(self, begun: float) -> None:
        """The consumer waited for `iter()`, which started workers, since `begun`."""
        self.wait_s += perf_counter() - begun

    def workers_start(self) -> None:
        """Workers are started for the iterator that began last."""
        self._starting = True

    def first_batch(self, begun: float) -> None:
        """Record the time to an iterator's first batch; the newest iterator's value is kept."""
        self.time_to_first_batch_s = perf_counter() - begun
        if self._starting:
            self._starting = False
            self.startup_s += self.time_to_first_batch_s
            if self.time_to_first_batch_s > _SLOW_S and not self._told_slow_start:
                self._told_slow_start = True
                _log_parts(self.time_to_first_batch_s, self.blocks())

    def relay(self, level: int, text: str, store: str | None, *, silent: bool) -> None:
        """Log a worker's line. That a store is silent, or answers again, is logged once for all workers."""
        if store is not None:
            if silent == (store in self.silent):
                return
            (self.silent.add if silent else self.silent.discard)(store)
        _log.log(level, "%s", text)

    def batch(
        self, samples: int, nbytes: int, pickled: int, waited: float, busy: float, workers: int, batches: int = 1
    ) -> None:
        """Count a delivered batch.

        Args:
            samples: in the batch.
            nbytes: of its tensors.
            pickled: bytes that were unpickled for it.
            waited: seconds that the consumer spent in `next` or `anext`: waiting for workers, in the loader's own code,
                and in the sampler's.
            busy: seconds that a worker spent on it.
            workers: how many there are.
            batches: 0 for a task that raised, of which only the times count.
        """
        now = perf_counter()
        passed = now - self._mark
        self._mark = now
        self.batches += batches
        self.samples += samples
        self.bytes += nbytes
        self.pickled += pickled
        self.wait_s += waited
        self.elapsed_s += passed
        # Not for each batch, because `process_time` is a system call.
        if now >= self._look_at:
            self._look(now)
        self.busy_s += busy
        self.worker_s += passed * workers
        self._note_wait(waited)
        # Tasks that share an async iterator wait at the same time, so they may have waited longer than has passed.
        self._note_consumer(passed - waited if waited < passed else 0.0)

    def came_oneoff(self, nbytes: int, needed: int, ring_bytes: int | None) -> None:
        """Count a batch that came in memory of its own, if its worker's ring can never hold one of that size.

        Args:
            nbytes: of the batch.
            needed: size of a ring that could; 0: the worker's can.
            ring_bytes: the bound of the worker's ring; None: unbounded.
        """
        if not needed:
            return
        if not self.oversize_batches:
            _log.warning(
                "a batch of %s bytes does not fit into a ring of ring_bytes=%s and was given memory of its own, which "
                "is slower; Tuning(ring_bytes=%d) would hold such batches",
                *(f"{nbytes:,}", ring_bytes, needed),
            )
        self.oversize_batches += 1
        self.ring_needed = max(needed, self.ring_needed)

    def came_from_node(self, worker: int, nbytes: int, busy: float) -> None:
        """Count a batch that a service has made for this worker. Arguments as `batch`."""
        node = self._nodes[self._workers[worker].node]
        # Without the lock: only the loop's thread changes these numbers, and it adds no keys.
        node["batches"] += 1
        node["bytes"] += nbytes
        node["busy_s"] += busy

    def others_cpu(self) -> float:
        """CPUs that other programs used on average since the first iterator began; 0 where that is unknown."""
        began, busy_then, own_then = self._first_begun
        busy = busy_seconds()
        if busy is None or busy_then is None:
            return 0.0
        own = process_time() - own_then
        own += sum(total(block, "cpu_s") for worker, block in self.blocks().items() if worker >= 0)
        return max(0.0, busy - busy_then - own) / max(1e-9, perf_counter() - began)

    def _look(self, now: float) -> None:
        """Count this process's CPU time since the last look, or since `begin`, and the times that were noted, if they
        are many.
        """
        self._look_at = now + _LOOK_S
        used, self._cpu_mark = self._cpu_mark, process_time()
        self.main_cpu_s += self._cpu_mark - used
        self.recorder.count_noted(_WORTH_COUNTING)
        if self.untold and self.elapsed_s >= _FIRST_S:
            self.untold = False
            if self.tell is not None and self.wait_s > self.elapsed_s / 2:
                self.tell(self)

    # ----------------------------------------------------------------------------------------------- reading

    def blocks(self) -> dict[int, Sequence[float]]:
        """What each worker has counted, by its number; -1: the main process."""
        with self._lock:
            workers = {worker: each.total().tolist() for worker, each in sorted(self._workers.items())}
        return {-1: self._main_block().tolist(), **workers}

    def slow_samples(self) -> SlowFigures:
        """The counts of single samples, of all processes."""
        with self._lock:
            kept = [(*each.earlier_slow, each.recorder.slow) for each in self._workers.values()]
        return joined(map(figures, (self.recorder.slow, *chain(*kept))))

    def _main_block(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """A copy of the counts of this process for the loader."""
        self.recorder.count_noted()
        return np.array(self.recorder.block)

    def _totals(self, left_out: Mapping[str, float]) -> _Totals:
        block = self._main_block()
        with self._lock:
            for each in self._workers.values():
                block += each.total()
            nodes = {
                f"{_NODE}{address}/{name}": number
                for address, node in self._nodes.items()
                for name, number in node.items()
            }
        # `waiting_since` is read once, as the consumer's thread may set it to None, or to a moment after `now`.
        now, since = perf_counter(), self.waiting_since
        waiting = 0.0 if since is None else max(0.0, now - since)
        elapsed = 0.0 if since is None else max(0.0, now - self._mark)
        sums = {name: getattr(self, name) for name in (*TOTALS, "elapsed_s", "busy_s", "worker_s")}
        sums["wait_s"] += waiting
        sums["elapsed_s"] += elapsed
        return _Totals({**sums, **left_out, **nodes}, block)

    def snapshot(
        self, queue_depth: int, left_out: Mapping[str, float] | None = None, *, prefix: str = "", interval: bool = False
    ) -> dict[str, float]:
        """Return a new flat dictionary of floats; `figures.FIGURES` describes its keys.

        Args:
            queue_depth: batches that are ready now.
            left_out: numbers of samples that the ranks' shares dropped and repeated so far.
            prefix: of every key.
            interval: count from the last call with `interval`, not from the beginning.
        """
        totals = self._totals(left_out or {})
        if interval:
            before, self._before = self._before, totals
            totals = totals.since(before)
        sums, block = totals.sums, totals.block.tolist()
        elapsed = sums["elapsed_s"] or float("inf")
        known: dict[str, float] = {
            **{name: getattr(self, name) for name in COUNTED},
            **sums,
            "wait_frac": min(1.0, sums["wait_s"] / elapsed),
            "batches_per_sec": sums["batches"] / elapsed,
            "samples_per_sec": sums["samples"] / elapsed,
            "bytes_per_sec": sums["bytes"] / elapsed,
            "queue_depth": queue_depth,
            "worker_busy_frac": min(1.0, sums["busy_s"] / sums["worker_s"]) if sums["worker_s"] else 0.0,
        }
        values = {key: known[name] for key, name in KEY_NAMES.items() if name in known}
        # The block begins with these sums, in the order of `KEYS`.
        values |= zip((f"store/{key}" for key in KEYS), block, strict=False)
        for stage in STAGES:
            times = stage_times(block, stage)
            if times.number:
                values |= zip((f"stage/{stage}/{name}" for name in _STAGE_FIGURES), times, strict=True)
        values |= self._there()
        values |= {name: number for name, number in sums.items() if name.startswith(_NODE)}
        return {prefix + key: float(value) for key, value in values.items()}

    def _there(self) -> dict[str, float]:
        """How many workers are at each node, or were last."""
        with self._lock:
            found = [each.node for each in self._workers.values()]
            return {f"{_NODE}{address}/workers": found.count(address) for address in self._nodes}


def _note_twice(note: Callable[[float], object], recording: Recording, seconds: float) -> None:
    note(seconds)
    recording.stage("sampler", seconds)


def _log_parts(seconds: float, blocks: Mapping[int, Sequence[float]]) -> None:
    """Log the parts of the time to the first batch: a mean worker's, and the rest.

    Args:
        seconds: the whole time.
        blocks: each worker's counters, by its number; -1: the main process, which is left out.
    """
    of_workers = [block for worker, block in blocks.items() if worker >= 0]
    merged = [sum(each) for each in zip(*of_workers, strict=True)]
    parts = [
        times.total / max(1, times.number)
        for times in (stage_times(merged, stage) for stage in STAGES if stage.startswith(("start_", "first_")))
    ]
    # A service's workers run already: there the rest, the search for a node that answers, is nearly all.
    rest = max(0.0, seconds - sum(parts))
    _log.warning(
        "the first batch came after %.1f s: %.1f s to create a worker's process, %.1f s in imports, %.1f s for the "
        "dataset, %.1f s for its first samples, %.1f s for all else; diagnose() says whether each epoch pays that",
        *(seconds, *parts, rest),
    )


_NODE = "node/"
_STAGE_FIGURES = ("count", "sum_s", "p50_s", "p95_s", "p99_s")


class _Totals(NamedTuple):
    """All that only grows: sums by name, and the sum of all blocks."""

    sums: Mapping[str, float]
    block: np.ndarray[Any, np.dtype[np.float64]]

    def since(self, before: _Totals) -> _Totals:
        sums = {name: number - before.sums.get(name, 0.0) for name, number in self.sums.items()}
        return _Totals(sums, self.block - before.block)


class _Worker(NamedTuple):
    """The counts of a worker's process, and the sums of the processes before it."""

    recorder: Recorder
    earlier: np.ndarray[Any, np.dtype[np.float64]]
    earlier_slow: Sequence[bytes]
    node: str

    def total(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        total: np.ndarray[Any, np.dtype[np.float64]] = np.array(self.recorder.block)
        total += self.earlier
        return total
