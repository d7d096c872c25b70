"""Records the work of a loader's processes, in a bounded memory, while a trace is on.

Data path: pipeline, stages, consumer -> [recording] -> chrome -> file.

Every record is a tuple whose first item is a time, and is appended by one call that no lock guards: the loop's thread,
the consumer's and those of stages record at the same time. Spans of workers stay packed as they came; all else is left
to `dump`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from asyncloader.telemetry.chrome import (
    AssignedRecord,
    BatchRecord,
    EventRecord,
    MadeRecord,
    OrderedRecord,
    Record,
    Source,
    StageRecord,
    trace_of,
)

if TYPE_CHECKING:
    from asyncloader.errors import WorkerDied
    from asyncloader.telemetry.statistics import Statistics

MOST_RECORDS = 250_000
"""Records that are kept: a batch has five, so the newest 50,000 batches."""
MOST_SPAN_BYTES = 32 << 20
"""Bytes of workers' spans that are kept: fewer batches, where each of them has hundreds of reads."""

_MOST_DUMPS = 10  # that are written by themselves


class Recording:
    """The records of one trace, and the methods that add them.

    Args:
        loader: the name of the loader's class.
        last: seconds that a file covers, up to when it is written; None: the whole trace.
        copies: of batches out of rings, before.
        file: where the trace is written.
    """

    def __init__(self, loader: str, last: float | None, copies: int, file: Path) -> None:
        self.file = file
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
        self._owner = os.getpid()

    @property
    def owned(self) -> bool:
        """Whether this process began the trace: a forked child has a copy of it."""
        return os.getpid() == self._owner

    # ---------------------------------------------------------------------------- called while the loader runs

    def assigned(self, run: int, seq: int, worker: int, began: float) -> None:
        """Record that a task was given to a worker, from `began` until now. In the loop's thread."""
        self._append(AssignedRecord(began, perf_counter(), run, seq, worker))

    def made(self, run: int, worker: int, place: str, answer: Any) -> None:
        """Record that a worker's batch has arrived. In the loop's thread.

        Args:
            run: number of the iterator.
            worker: its number.
            place: its name in a report.
            answer: has the batch: an `Answer` of the workers.
        """
        result = answer.result
        batch = result.sent, result.busy, result.samples, result.nbytes
        spans = answer.spans, result.epoch, len(answer.records)
        source = Source(worker, place)
        self._append(MadeRecord(answer.arrived, run, result.seq, source, *batch, *spans))
        self._span_bytes += len(answer.spans)
        while len(self._records) > MOST_RECORDS or (self._span_bytes > MOST_SPAN_BYTES and self._records):
            oldest, self._shortened = self._records.popleft(), True
            if isinstance(oldest, MadeRecord):
                self._span_bytes -= len(oldest.spans)

    def ordered(self, run: int, seq: int) -> None:
        """Record that all earlier batches have come, so that this batch is passed on. In the loop's thread."""
        self._append(OrderedRecord(perf_counter(), run, seq))

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
        held = -1 if ring is None else ring.leased
        copied, self._copies = copies > self._copies, copies
        self._append(BatchRecord(perf_counter(), run, seq, worker, begin, taken, slot, held, copied))

    def stage(self, name: str, seconds: float) -> None:
        """Record a span of the main process that ends now. Any thread."""
        self._append(StageRecord(perf_counter(), name, seconds))

    def event(self, name: str, worker: int | None = None, **figures: Any) -> None:
        """Record an event that happens now, at a worker or (None) in the main process. Any thread."""
        self._append(EventRecord(perf_counter(), name, worker, figures))

    def died(self, worker: int, death: WorkerDied, *, left: bool, lost: bool) -> None:
        """Record that a worker has ended although it was not asked to."""
        name = "worker left" if left else "connection lost" if lost else "worker died"
        self.event(name, worker, pid=death.pid, exitcode=death.exitcode, reason=death.reason)

    def timed_out(self, report: str) -> str:
        """Record that the consumer gets a time-out. Returns a line about the file that was written; may be empty."""
        self.event("time-out", report=report)
        if self._last is None or self._dumps >= _MOST_DUMPS or not self.owned:
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
        """Write the trace so far, or its last seconds. Blocks, for a while. Any thread.

        Raises:
            OSError: it cannot be written.
        """
        now = perf_counter()
        begin = self._began if self._last is None else max(self._began, now - self._last)
        # Other threads append to it, at which an iteration over the deque would raise; `copy` is atomic.
        records = self._records.copy()
        facts = {
            "loader": self._loader,
            "pid": self._owner,
            "began": self._began_at + begin - self._began,
            "seconds": now - begin,
            "complete": (len(records) != records.maxlen and not self._shortened) or records[0][0] <= begin,
        }
        _write(file, facts, trace_of(records, begin, now, facts))

    def finish(self, statistics: Statistics) -> None:
        """End the recording if it is still that of these statistics, and write its file. Blocks.

        Raises:
            OSError: it cannot be written.
        """
        # Not in a forked child, which has a copy of all this: the file is its parent's. Nor if another thread has ended
        # it.
        if self.owned and statistics.set_trace(self, None):
            self.dump(self.file)


def check_writable(file: Path) -> None:
    """Check that a file can be written, without changing it.

    Raises:
        OSError: it cannot.
        ValueError: its name is not that of a trace.
    """
    if not file.name.endswith((".json", ".json.gz")):
        raise ValueError(f"a trace is a file that ends with .json or .json.gz, not {str(file)!r}")
    if file.is_dir():
        raise IsADirectoryError(f"{str(file)!r} is a directory: a trace is a file")
    partial = _partial(file)
    partial.open("wb").close()
    partial.unlink()


def _partial(file: Path) -> Path:
    """The name under which this thread writes a file."""
    return file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.partial")


def _write(file: Path, facts: dict[str, Any], events: Iterable[dict[str, Any]]) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    partial = _partial(file)
    try:
        with partial.open("wb") as raw:
            packed = gzip.GzipFile(file.name, "wb", 6, raw) if file.name.endswith(".gz") else raw
            text = io.TextIOWrapper(packed, encoding="utf-8")
            _write_events(text, facts, events)
            text.detach()  # flushes it, and leaves the file open
            if packed is not raw:
                packed.close()
        partial.replace(file)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _write_events(text: io.TextIOWrapper, facts: dict[str, Any], events: Iterable[dict[str, Any]]) -> None:
    # Event by event: one string of all would take as much memory as the file.
    text.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    encode = json.JSONEncoder(default=repr, separators=(",", ":")).encode
    comma = ""
    for event in events:
        text.write(comma + encode(event))
        comma = ",\n"
    text.write(f'\n], "otherData": {json.dumps(facts)}}}\n')
