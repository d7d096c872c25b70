"""Makes Chrome's trace events of the records of a trace. Pure.

Data path: recording -> [chrome] -> file.

A *track* is a process of the format: the loader's own process, and one for each worker. A track has *lanes*, the
format's threads: spans of a lane lie one after the other, or one within the other. Batches that are in work at the same
time, as those of coroutines, get lanes beside each other; a batch that finds no free lane among `MOST_LANES` is left
out, and counted.

Times are integers of nanoseconds from the trace's beginning, so that rounding cannot make spans overlap.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from asyncloader.telemetry.spans import TaskSpans, unpack

MOST_LANES = 64
"""Lanes of one kind in a track."""

# ---------------------------------------------------------------------------------------------- records
# The first field of each is a time.


class Source(NamedTuple):
    """Where a batch was made: the worker's number, and its process or thread in words."""

    worker: int
    place: str


class AssignedRecord(NamedTuple):
    """A task was given to a worker."""

    began: float
    ended: float
    run: int
    seq: int
    worker: int


class MadeRecord(NamedTuple):
    """A worker's batch has come."""

    arrived: float
    run: int
    seq: int
    source: Source
    sent: float
    busy: float
    samples: int
    nbytes: int
    spans: bytes
    epoch: int
    skipped: int


class OrderedRecord(NamedTuple):
    """All batches before a batch have come."""

    at: float
    run: int
    seq: int


class BatchRecord(NamedTuple):
    """The consumer has a batch."""

    ended: float
    run: int
    seq: int
    worker: int
    begin: float
    taken: float
    slot: int
    held: int
    copied: bool


class StageRecord(NamedTuple):
    """A span of the main process."""

    ended: float
    name: str
    seconds: float


class EventRecord(NamedTuple):
    """An event without duration."""

    at: float
    name: str
    worker: int | None
    figures: Mapping[str, Any]


Record: TypeAlias = AssignedRecord | MadeRecord | OrderedRecord | BatchRecord | StageRecord | EventRecord

# ------------------------------------------------------------------------------------------------ spans


class Span(NamedTuple):
    """A span, in nanoseconds from the beginning."""

    name: str
    begin: int
    end: int
    figures: Mapping[str, Any] = {}


class Unit(NamedTuple):
    """A span with the spans within it."""

    outer: Span
    inner: Sequence[Span]


def nested(outer: Span, spans: Iterable[Span]) -> list[Span]:
    """Return the spans cut to `outer`, and so that each lies within or beside the others. Longer ones come first."""
    found: list[Span] = []
    open_spans = [outer]
    for span in sorted(spans, key=lambda each: (each.begin, -each.end)):
        begin, end = max(span.begin, outer.begin), min(span.end, outer.end)
        if end <= begin:
            continue
        while begin >= open_spans[-1].end and len(open_spans) > 1:
            open_spans.pop()
        cut = span._replace(begin=begin, end=min(end, open_spans[-1].end))
        found.append(cut)
        open_spans.append(cut)
    return found


def lanes(units: Iterable[Unit]) -> tuple[list[tuple[int, Unit]], int]:
    """Give each unit the first lane that is free, in the order of their beginnings. Returns the units with their
    lanes, and the number of those that found none.
    """
    free: list[int] = []  # when each lane is
    placed: list[tuple[int, Unit]] = []
    left_out = 0
    for unit in sorted(units, key=lambda each: (each.outer.begin, -each.outer.end)):
        lane = next((lane for lane, end in enumerate(free) if end <= unit.outer.begin), len(free))
        if lane == MOST_LANES:
            left_out += 1
            continue
        free[lane : lane + 1] = [unit.outer.end]
        placed.append((lane, unit))
    return placed, left_out


# ------------------------------------------------------------------------------------------------ tracks

_Group: TypeAlias = tuple[int, str]  # of lanes: the first lane's number, and the name

_MAIN = 1  # the track of the loader's process
_CONSUMER, _LOOP, _READY = (100, "consumer"), (200, "main loop"), (300, "ready batches")
_DEVICE, _STAGES, _TASKS, _READS = (400, "device stage"), (500, "stages"), (600, "tasks"), (700, "reads")
_GROUP_OF = {"pin": _DEVICE, "h2d": _DEVICE, "read": _READS}
_NOT_DRAWN = frozenset(("queue", "decode", "start_process", "start_import", "start_dataset"))


class _Maker:
    def __init__(self, begin: float, end: float, facts: dict[str, Any]) -> None:
        self._begin, self._facts = begin, facts
        self._until = round((end - begin) * 1e9)
        self._units: dict[tuple[int, _Group], list[Unit]] = defaultdict(list)
        self._instants: list[tuple[int, int, str, Mapping[str, Any]]] = []  # time, track, name, figures
        self._tracks: dict[Source, int] = {}
        self._within = 0.0  # seconds of the main process's last collation, which the time of its fetch leaves out

    def _at(self, seconds: float) -> int:
        return min(self._until, max(0, round((seconds - self._begin) * 1e9)))

    def _span(self, name: str, begin: float, end: float, **figures: Any) -> Span:
        """The part of a span that lies in the trace's time; it may be empty."""
        return Span(name, self._at(begin), self._at(end), figures)

    def _add(self, track: int, group: _Group, outer: Span, *inner: Span) -> None:
        """Add a span, if it is not empty."""
        if outer.begin < outer.end:
            self._units[track, group].append(Unit(outer, nested(outer, inner)))

    def _instant(self, track: int, at: float, name: str, figures: Mapping[str, Any]) -> None:
        self._instants.append((self._at(at), track, name, figures))

    def _track(self, source: Source) -> int:
        return self._tracks.setdefault(source, _MAIN + 1 + len(self._tracks))

    def _track_of(self, worker: int | None) -> int:
        """The newest track of a worker."""
        if worker is None:
            return _MAIN
        found = [track for source, track in self._tracks.items() if source.worker == worker]
        return found[-1] if found else self._track(Source(worker, "not known"))

    # ---------------------------------------------------------------------------------------- collecting

    def collect(self, records: Sequence[Record]) -> None:
        """Sort the records by tracks."""
        made = [each for each in records if isinstance(each, MadeRecord)]
        spans = [unpack(each.spans, each.epoch, each.seq) for each in made]
        ordered = {(each.run, each.seq): each.at for each in records if isinstance(each, OrderedRecord)}
        taken = {(each.run, each.seq): each for each in records if isinstance(each, BatchRecord)}
        for each, of_task in zip(made, spans, strict=True):
            key = each.run, each.seq
            batch = taken.get(key)
            self._made(each, of_task)
            if batch is None or batch.worker == each.source.worker:  # else another worker's was delivered
                self._ready(each, ordered.get(key), batch)
        by_worker = {(each.run, each.seq, each.source.worker): each for each in made}
        for batch in taken.values():
            self._batch(batch, by_worker.get((batch.run, batch.seq, batch.worker)))
        self._steps(sorted(taken.values(), key=attrgetter("begin")))
        for record in records:
            if isinstance(record, AssignedRecord):
                figures = {"iterator": record.run, "batch": record.seq, "worker": record.worker}
                self._add(_MAIN, _LOOP, self._span(f"assign {record.seq}", record.began, record.ended, **figures))
            elif isinstance(record, StageRecord):
                self._stage(record)
            elif isinstance(record, EventRecord):
                self._instant(self._track_of(record.worker), record.at, record.name, record.figures)

    def _made(self, made: MadeRecord, spans: TaskSpans | None) -> None:
        track, name = self._track(made.source), f"batch {made.seq}"
        figures: dict[str, Any] = {"iterator": made.run, "batch": made.seq, "samples": made.samples}
        figures["bytes"] = made.nbytes
        if made.skipped:
            self._instant(track, made.arrived, "samples skipped", {"samples": made.skipped})
        if spans is None:
            # It was asked for before the trace began, or of a worker over a network: then all that is known is how long
            # its worker was busy, which of an asynchronous worker is CPU time.
            self._add(track, _TASKS, self._span(name, made.sent - made.busy, made.sent, **figures))
            return
        if spans.asked:
            figures["queue_ms"] = round(1e3 * max(0.0, spans.begin - spans.asked), 3)
        inner: list[Span] = []
        within = 0.0  # seconds of collation, which the time of the fetch leaves out
        for own, found in ((True, spans.own), (False, spans.loose)):
            for stage, end, seconds in found:
                length = seconds + within if own and stage in ("fetch", "first_read") else seconds
                if own and stage == "collate":
                    within = seconds
                elif own and stage == "decode":
                    figures["decode_ms"] = round(1e3 * seconds, 3)
                if stage == "retry":
                    self._instant(track, end, "retry", {"batch": made.seq} if own else {})
                elif stage not in _NOT_DRAWN:
                    span = self._span(stage, end - length, end)
                    # Reads are many at a time within a batch: they have lanes of their own.
                    if own and stage != "read":
                        inner.append(span)
                    else:
                        self._add(track, _READS, span)
        self._add(track, _TASKS, self._span(name, spans.begin, spans.end, **figures), *inner)

    def _ready(self, made: MadeRecord, ordered: float | None, batch: BatchRecord | None) -> None:
        """The time from a batch's arrival to its delivery, or to the end of the trace."""
        end = self._begin + self._until / 1e9 if batch is None else max(made.arrived, batch.taken)
        figures: dict[str, Any] = {"iterator": made.run, "batch": made.seq, "delivered": batch is not None}
        early = self._span("order", made.arrived, end if ordered is None else ordered)
        self._add(_MAIN, _READY, self._span(f"batch {made.seq} ready", made.arrived, end, **figures), early)

    def _batch(self, batch: BatchRecord, made: MadeRecord | None) -> None:
        figures: dict[str, Any] = {"iterator": batch.run, "batch": batch.seq}
        if batch.worker >= 0:
            figures["worker"] = batch.worker
        if made is not None:
            figures |= {"samples": made.samples, "bytes": made.nbytes}
        outer = self._span(f"batch {batch.seq}", batch.begin, batch.ended, **figures)
        wait, opened = self._span("wait", batch.begin, batch.taken), self._span("open", batch.taken, batch.ended)
        self._add(_MAIN, _CONSUMER, outer, wait, opened)
        if batch.copied:
            self._instant(_MAIN, batch.ended, "copied out of the ring", {"batch": batch.seq})
        elif batch.held >= 0:
            lease = {"batch": batch.seq, "worker": batch.worker, "slot": batch.slot, "held": batch.held}
            self._instant(_MAIN, batch.ended, "lease", lease)

    def _steps(self, batches: Iterable[BatchRecord]) -> None:
        """The consumer's own work between two batches."""
        before: BatchRecord | None = None
        for each in batches:
            if before is not None and before.run == each.run:
                self._add(_MAIN, _CONSUMER, self._span("step", before.ended, each.begin))
            before = each if before is None or each.ended >= before.ended else before

    def _stage(self, stage: StageRecord) -> None:
        """A span of the main process."""
        length = stage.seconds
        if stage.name == "collate":
            self._within = length
        elif stage.name in ("fetch", "first_read"):
            length, self._within = length + self._within, 0.0
        if stage.name == "retry":
            self._instant(_MAIN, stage.ended, "retry", {})
        elif stage.name not in _NOT_DRAWN:
            span = self._span(stage.name, stage.ended - length, stage.ended)
            self._add(_MAIN, _GROUP_OF.get(stage.name, _STAGES), span)

    # ------------------------------------------------------------------------------------------- writing

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace events."""
        left_out: Counter[str] = Counter()
        yield _metadata("process_name", _MAIN, 0, name=f"{self._facts['loader']} (pid {self._facts['pid']})")
        for source, track in self._tracks.items():
            yield _metadata("process_name", track, 0, name=f"worker {source.worker} ({source.place})")
            yield _metadata("process_sort_index", track, 0, sort_index=1 + source.worker)
        for (track, (first, name)), units in sorted(self._units.items()):
            placed, none_free = lanes(units)
            if none_free:
                left_out[name] += none_free
            for lane in sorted({lane for lane, _ in placed}):
                yield _metadata("thread_name", track, first + lane, name=f"{name} {lane + 1}" if lane else name)
                yield _metadata("thread_sort_index", track, first + lane, sort_index=first + lane)
            for lane, unit in placed:
                for span in (unit.outer, *unit.inner):
                    yield _complete(span, name.replace(" ", "_"), track, first + lane)
        for at, track, name, figures in sorted(self._instants, key=lambda each: each[0]):
            event = {"name": name, "cat": "event", "ph": "i", "s": "p", "ts": at / 1e3, "pid": track, "tid": 0}
            yield {**event, "args": dict(figures)} if figures else event
        self._facts["left_out"] = dict(left_out)


def _metadata(kind: str, track: int, lane: int, **figures: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": track, "tid": lane, "args": figures}


def _complete(span: Span, category: str, track: int, lane: int) -> dict[str, Any]:
    event = {"name": span.name, "cat": category, "ph": "X", "ts": span.begin / 1e3}
    event |= {"dur": (span.end - span.begin) / 1e3, "pid": track, "tid": lane}
    return {**event, "args": dict(span.figures)} if span.figures else event


def trace_of(records: Iterable[Record], begin: float, end: float, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make the trace events of the records.

    Args:
        records: in any order of time.
        begin: of the trace, by `perf_counter`. What ended before is left out.
        end: of it.
        facts: of the whole trace; gets `left_out` once all events were taken.
    """
    maker = _Maker(begin, end, facts)
    maker.collect([each for each in records if each[0] >= begin])
    return maker.events()
