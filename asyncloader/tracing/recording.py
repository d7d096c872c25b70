"""Records the work of a loader's processes, in a bounded memory, while a trace is on.

Data path: pipeline, stages, consumer -> [recording] -> chrome -> file.

Every record is a tuple whose first item is a time, and is appended by one call that no lock guards: the loop's thread,
the consumer's and those of stages record at the same time. Spans of workers stay packed as they came; all else is left
to `dump`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from contextlib import suppress
from copy import copy
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncloader.tracing.chrome import (
    AssignedRecord,
    BatchRecord,
    EventRecord,
    MadeRecord,
    OrderedRecord,
    Record,
    Source,
    StageRecord,
    TraceEvents,
    trace_of,
)
from asyncloader.tracing.spans import with_seq
from asyncloader.tracing.trace_file import write

if TYPE_CHECKING:
    from asyncloader.errors import WorkerDied
    from asyncloader.telemetry.statistics import Statistics
    from asyncloader.workers.listener import Answer
    from asyncloader.workers.source import WorkerHandle

MOST_RECORDS = 250_000
"""Records that are kept: a batch has five, so the newest 50,000 batches."""
MOST_SPAN_BYTES = 32 << 20
"""Bytes of workers' spans that are kept: fewer batches, where each of them has hundreds of reads."""

_MOST_DUMPS = 10  # that are written by themselves


class _Leased(NamedTuple):
    """A slot that the consumer holds, with a weak reference to the memory that its batch views."""

    view: weakref.ref[Any]
    run: int
    seq: int
    worker: int
    slot: int


class Recording:
    """The records of one trace, and the methods that add them.

    Args:
        loader: the name of the loader's class.
        last: seconds that a file covers, up to when it is written; None: the whole trace.
        copies: of batches out of rings, before.
        file: where the trace is written; None: a page asks for it, and gets it.
    """

    def __init__(self, loader: str, last: float | None, copies: int, file: Path | None = None) -> None:
        self.file = file
        self.ended_at: float | None = None
        """When it ended; None: it goes on."""
        self._loader = loader
        self._last = last
        self._began, self._began_at = perf_counter(), time()
        # `made` keeps it to `MOST_RECORDS`, and counts what leaves it; without workers only the deque does.
        self._records: deque[Record] = deque(maxlen=MOST_RECORDS + MOST_RECORDS // 4)
        self._span_bytes = 0
        self._shortened = False
        self._append = self._records.append
        self._dumps = 0
        self._copies = copies
        self._leases: deque[_Leased] = deque()  # those whose end was not noticed yet, the oldest first
        self._owner = os.getpid()
        self._whole: Recording | None = None  # that of several loaders, which this one is a part of
        self._number, self._workers = 0, 1

    @property
    def owned(self) -> bool:
        """Whether the loader may end the trace: its process began it, and it is not the trace of several loaders."""
        return os.getpid() == self._owner and self._whole is None

    def of_worker(self, number: int, workers: int, copies: int) -> Recording:
        """Return a recording for the loader of one worker of several, whose records belong to this recording.

        Each such loader numbers its batches from 0, and calls its worker 0. Here batch B of worker W of N becomes batch
        B * N + W, which no other worker's has in this epoch.

        Args:
            number: the worker's.
            workers: how many there are.
            copies: of this loader's batches out of their rings, before.
        """
        made = copy(self)
        made._whole, made._number, made._workers, made._copies = self, number, workers, copies
        return made

    def _seq(self, seq: int) -> int:
        return seq * self._workers + self._number

    def _worker(self, worker: int) -> int:
        return worker if self._whole is None else self._number

    # ---------------------------------------------------------------------------- called while the loader runs

    def assigned(self, run: int, seq: int, worker: int, began: float) -> None:
        """Record that a task was given to a worker, from `began` until now. In the loop's thread."""
        self._append(AssignedRecord(began, perf_counter(), run, self._seq(seq), self._worker(worker)))

    def made(self, run: int, worker: int, process: WorkerHandle, answer: Answer) -> None:
        """Record that a worker's batch has arrived. In the loop's thread.

        Args:
            run: number of the iterator.
            worker: its number.
            process: it.
            answer: has the batch.
        """
        result, packed = answer.result, answer.spans
        seq, whole = self._seq(result.seq), self._whole or self
        if seq != result.seq:  # another than the worker was given
            packed = with_seq(packed, seq)
        batch = result.sent, result.busy, result.samples, result.nbytes
        spans = packed, result.epoch, len(answer.records)
        source = Source(self._worker(worker), process.place, process.node)
        self._append(MadeRecord(answer.arrived, run, seq, source, *batch, *spans))
        whole._span_bytes += len(answer.spans)
        while len(self._records) > MOST_RECORDS or (whole._span_bytes > MOST_SPAN_BYTES and self._records):
            oldest, whole._shortened = self._records.popleft(), True
            if isinstance(oldest, MadeRecord):
                whole._span_bytes -= len(oldest.spans)

    def ordered(self, run: int, seq: int) -> None:
        """Record that all earlier batches have come, so that this batch is passed on. In the loop's thread."""
        self._append(OrderedRecord(perf_counter(), run, self._seq(seq)))

    def delivered(
        self, run: int, seq: int, worker: int, begin: float, taken: float, ring: Any, slot: int, copies: int
    ) -> None:
        """Record that the consumer gets a batch now.

        Args:
            run: number of the iterator.
            seq: number of the batch in it.
            worker: its number; -1: there are no workers.
            begin: when the consumer asked for the batch.
            taken: when the batch was ready for it.
            ring: the batch's; None: it is in none.
            slot: in that.
            copies: of batches out of rings, so far.
        """
        now = perf_counter()
        seq, worker = self._seq(seq), self._worker(worker)
        held = -1 if ring is None else ring.leased
        copied, self._copies = copies > self._copies, copies
        self._note_lease_ends(now)
        if ring is not None and not copied and (batch := ring.view_of(slot)) is not None:
            self._leases.append(_Leased(batch, run, seq, worker, slot))
        self._append(BatchRecord(now, run, seq, worker, begin, taken, slot, held, copied))

    def _note_lease_ends(self, now: float) -> None:
        """Record the leases whose last view has died since this was called before. Any thread."""
        # Not when the view dies: that may be inside the garbage collector, where no Python code of ours should run.
        with suppress(IndexError):  # another thread, which has another iterator or writes a file, looks, too
            for _ in range(len(self._leases)):
                leased = self._leases.popleft()
                if leased.view() is None:
                    figures = {"iterator": leased.run, "batch": leased.seq, "slot": leased.slot}
                    self._append(EventRecord(now, "lease ended", leased.worker, figures))
                else:
                    self._leases.append(leased)

    def stage(self, name: str, seconds: float) -> None:
        """Record a span of the main process that ends now. Any thread."""
        self._append(StageRecord(perf_counter(), name, seconds))

    def event(self, name: str, worker: int | None = None, **figures: Any) -> None:
        """Record an event that happens now, at a worker or (None) in the main process. Any thread."""
        if "batch" in figures:
            figures["batch"] = self._seq(figures["batch"])
        self._append(EventRecord(perf_counter(), name, None if worker is None else self._worker(worker), figures))

    def died(self, worker: int, death: WorkerDied, *, left: bool, lost: bool) -> None:
        """Record that a worker has ended although it was not asked to."""
        name = "worker left" if left else "connection lost" if lost else "worker died"
        self.event(name, worker, pid=death.pid, exitcode=death.exitcode, reason=death.reason)

    def timed_out(self, report: str) -> str:
        """Record that the consumer gets a time-out. Returns a line about the file that was written; may be empty."""
        if self._whole is not None:
            return self._whole.timed_out(report)
        self.event("time-out", report=report)
        if self._last is None or self.file is None or self._dumps >= _MOST_DUMPS or not self.owned:
            return ""
        self._dumps += 1
        stem, dot, rest = self.file.name.partition(".")
        file = self.file.with_name(f"{stem}-{self._dumps}-timeout{dot}{rest}")
        try:
            self.dump(file)
        except OSError as error:  # of the disk: the run goes on, and its own error is to be raised
            return f"Its trace could not be written to {file}: {error}"
        return f"Its last {self._last:g} seconds are in {file}"

    # ------------------------------------------------------------------------------------------------ files

    def dump(self, file: Path) -> None:
        """Write the trace so far. Blocks.

        Raises:
            OSError: it cannot be written.
        """
        write(file, self.events(self._last))

    def events(self, last: float | None) -> TraceEvents:
        """Make the trace so far, or of its last seconds. Takes a while. Any thread."""
        now = self.ended_at or perf_counter()
        begin = self._began if last is None else max(self._began, now - last)
        self._note_lease_ends(now)
        # Other threads append to it, at which an iteration over the deque would raise; `copy` is atomic.
        records = self._records.copy()
        facts = {
            "loader": self._loader,
            "pid": self._owner,
            "began": self._began_at + begin - self._began,
            "seconds": now - begin,
            "complete": (len(records) != records.maxlen and not self._shortened) or records[0][0] <= begin,
        }
        return trace_of(records, begin, now, facts)

    def end(self) -> None:
        """Note that the loader records nothing more. Idempotent."""
        if self.ended_at is None:
            self.ended_at = perf_counter()

    def finish(self, statistics: Statistics) -> None:
        """End the recording if it is still that of these statistics, and write its file. Blocks.

        Raises:
            OSError: it cannot be written.
        """
        # Not in a forked child, which has a copy of all this: the file is its parent's. Nor if another thread has ended
        # it, or taken it over.
        if self.owned and statistics.set_trace(self, None):
            self.end()
            if self.file is not None:
                self.dump(self.file)
