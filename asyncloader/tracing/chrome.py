"""Makes Chrome's trace events of the records of a trace. Pure.

Data path: recording -> [chrome] -> trace_file.

A *track* is a process of the format: the loader's own process, and one for each worker. A track has *lanes*, the
format's threads: spans of a lane lie one after the other, or one within the other. Batches that are in work at the same
time, as those of coroutines, get lanes beside each other; a batch that finds no free lane among `MOST_LANES` is left
out, and counted.

Times are integers of nanoseconds from the trace's beginning, so that rounding cannot make spans overlap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from asyncloader.tracing.clocks import ClockOffset
from asyncloader.tracing.spans import TaskSpans, unpack


class TraceEvents(NamedTuple):
    """The content of a file.

    Attributes:
        facts: of the whole trace.
        events: the trace events, as dictionaries.
    """

    facts: dict[str, Any]
    events: Iterator[dict[str, Any]]


MOST_LANES = 64
"""Lanes of one kind in a track."""

# ---------------------------------------------------------------------------------------------- records


class Source(NamedTuple):
    """Where a batch was made: the worker's number, its process or thread in words, and its node, if any."""

    worker: int
    place: str
    node: str


class AssignedRecord(NamedTuple):
    """A task was given to a worker."""

    kind: str
    began: float
    ended: float
    run: int
    seq: int
    worker: int


class MadeRecord(NamedTuple):
    """A worker's batch has come."""

    kind: str
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

    kind: str
    at: float
    run: int
    seq: int


class BatchRecord(NamedTuple):
    """The consumer has a batch."""

    kind: str
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

    kind: str
    ended: float
    name: str
    seconds: float


class EventRecord(NamedTuple):
    """An event without duration."""

    kind: str
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
    """A span with the spans within it; and its batch, if it is part of the way of one."""

    outer: Span
    inner: Sequence[Span]
    batch: tuple[int, int] | None
    point: int | None = None
    """Where the arrow of its batch is bound; None: at its beginning."""


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

_MAIN = 1  # the track of the loader's process
# Its groups of lanes, and those of a worker: the name, and the first lane's number.
_CONSUMER, _LOOP, _READY = ("consumer", 100), ("main loop", 200), ("ready batches", 300)
_DEVICE, _AHEAD = ("device stage", 400), ("samples ahead", 500)
_TASKS, _READS = ("tasks", 100), ("reads", 200)
_Group: TypeAlias = tuple[str, int]

_ON_DEVICE = frozenset(("pin", "h2d"))
_NOT_DRAWN = frozenset(("queue", "decode", "start_process", "start_import", "start_dataset"))


class _Scale(NamedTuple):
    begin: float

    def ns(self, seconds: float) -> int:
        return round((seconds - self.begin) * 1e9)


class _Maker:
    def __init__(self, records: Iterable[Record], begin: float, end: float, facts: dict[str, Any]) -> None:
        self._scale = _Scale(begin)
        self._until = self._scale.ns(end)
        self._facts = facts
        self._units: dict[tuple[int, _Group], list[Unit]] = defaultdict(list)
        self._instants: list[tuple[int, int, str, Mapping[str, Any]]] = []  # track, time, name, figures
        self._held: list[tuple[int, int, int]] = []  # time, worker, slots
        self._tracks: dict[Source, int] = {}
        self.records = [each for each in records if each[1] >= begin]

    def span(self, name: str, begin: float, end: float, **figures: Any) -> Span | None:
        """The part of a span that lies in the trace's time; None: none of it does."""
        first, last = max(0, self._scale.ns(begin)), min(self._until, self._scale.ns(end))
        return Span(name, first, last, figures) if first < last else None

    # ---------------------------------------------------------------------------------------- collecting

    def collect(self) -> None:
        """Sort the records by tracks."""
        made = [each for each in self.records if isinstance(each, MadeRecord)]
        spans = {index: unpack(each.spans, each.epoch, each.seq) for index, each in enumerate(made)}
        clocks = _join_clocks(made, spans)
        ordered = {(each.run, each.seq): each.at for each in self.records if isinstance(each, OrderedRecord)}
        batches = [each for each in self.records if isinstance(each, BatchRecord)]
        by_worker = {(each.run, each.seq, each.source.worker): each for each in made}
        taken = {(each.run, each.seq): each for each in batches}
        for index, each in enumerate(made):
            batch = taken.get((each.run, each.seq))
            other = batch is not None and batch.worker != each.source.worker  # whose batch was delivered
            self._made(each, spans[index], clocks, None if other else (each.run, each.seq))
            if not other:
                self._ready(each, ordered.get((each.run, each.seq)), batch)
        stages = self._stages()
        for each_batch in batches:
            self._batch(each_batch, by_worker.get((each_batch.run, each_batch.seq, each_batch.worker)), stages)
        self._left_stages(stages)
        self._steps(batches)
        # A task whose worker died may go to the worker that has taken its number.
        last = {(each.run, each.seq, each.worker): each for each in self.records if isinstance(each, AssignedRecord)}
        for record in self.records:
            if isinstance(record, AssignedRecord):
                again = last[record.run, record.seq, record.worker] is not record
                self._assigned(record, {} if again else by_worker, taken)
            elif isinstance(record, EventRecord):
                track = self._track_of(record.worker)
                self._instants.append((track, self._at(record.at), record.name, record.figures))

    def _at(self, seconds: float) -> int:
        return min(self._until, max(0, self._scale.ns(seconds)))

    def _track(self, source: Source) -> int:
        return self._tracks.setdefault(source, _MAIN + 1 + len(self._tracks))

    def _track_of(self, worker: int | None) -> int:
        """The newest track of a worker."""
        found = [track for source, track in self._tracks.items() if source.worker == worker]
        if found or worker is None:
            return found[-1] if found else _MAIN
        return self._track(Source(worker, "not known", ""))

    def _made(
        self,
        made: MadeRecord,
        spans: TaskSpans | None,
        clocks: Mapping[Source, ClockOffset],
        key: tuple[int, int] | None,
    ) -> None:
        track = self._track(made.source)
        name = f"batch {made.seq}"
        figures: dict[str, Any] = {"iterator": made.run, "batch": made.seq, "samples": made.samples}
        figures["bytes"] = made.nbytes
        if made.skipped:
            self._instants.append((track, self._at(made.arrived), "samples skipped", {"samples": made.skipped}))
        if spans is None:
            # It was asked for before the trace began, or its node knows no traces: then all that is known is how long
            # its worker was busy, which of an asynchronous worker is CPU time.
            outer = self.span(name, made.sent - made.busy, made.sent, **figures)
            if outer is not None:
                self._units[track, _TASKS].append(Unit(outer, [], key))
            return
        offset = clocks[made.source].seconds
        begin = spans.begin - offset
        if spans.asked:
            figures["queue_ms"] = round(1e3 * max(0.0, begin - spans.asked), 3)
        own: list[Span] = []
        within = 0.0  # seconds of collation, which the time of the fetch leaves out
        for noted, end, seconds in spans.own:
            if noted == "collate":
                within = seconds
            elif noted == "decode":
                figures["decode_ms"] = round(1e3 * seconds, 3)
            if noted == "retry":
                self._instants.append((track, self._at(end - offset), "retry", {"batch": made.seq}))
                continue
            length = seconds + within if noted in ("fetch", "first_read") else seconds
            inner = None if noted in _NOT_DRAWN else self.span(noted, end - offset - length, end - offset)
            # Reads are many at a time within a batch: they have lanes of their own.
            if inner is not None and noted == "read":
                self._units[track, _READS].append(Unit(inner, [], None))
            elif inner is not None:
                own.append(inner)
        for noted, end, seconds in spans.loose:
            inner = None if noted in _NOT_DRAWN else self.span(noted, end - offset - seconds, end - offset)
            if noted == "retry":
                self._instants.append((track, self._at(end - offset), "retry", {}))
            elif inner is not None:
                self._units[track, _READS].append(Unit(inner, [], None))
        outer = self.span(name, begin, spans.end - offset, **figures)
        if outer is not None:
            self._units[track, _TASKS].append(Unit(outer, nested(outer, own), key))

    def _ready(self, made: MadeRecord, ordered: float | None, batch: BatchRecord | None) -> None:
        """The time from a batch's arrival to its delivery, or to the end of the trace."""
        end = self._scale.begin + self._until / 1e9 if batch is None else max(made.arrived, batch.taken)
        figures = {} if batch is not None else {"delivered": False}
        outer = self.span(f"batch {made.seq} ready", made.arrived, end, **figures)
        if outer is None:
            return
        early = self.span("order", made.arrived, end if ordered is None else ordered)
        key = None if batch is None else (made.run, made.seq)
        self._units[_MAIN, _READY].append(Unit(outer, nested(outer, [early] if early else []), key))

    def _stages(self) -> list[Span]:
        """The spans of the main process, by their ends, in ascending order."""
        found: list[Span] = []
        within = 0.0
        for each in self.records:
            if not isinstance(each, StageRecord) or each.name in _NOT_DRAWN:
                continue
            if each.name == "retry":
                self._instants.append((_MAIN, self._at(each.ended), "retry", {}))
                continue
            length = each.seconds
            if each.name == "collate":
                within = length
            elif each.name in ("fetch", "first_read"):
                length, within = length + within, 0.0
            span = self.span(each.name, each.ended - length, each.ended)
            if span is None:
                continue
            if span.name in _ON_DEVICE:
                self._units[_MAIN, _DEVICE].append(Unit(span, [], None))
            elif span.name == "read":
                self._units[_MAIN, _AHEAD].append(Unit(span, [], None))
            else:
                found.append(span)
        return sorted(found, key=attrgetter("end"))

    def _batch(self, batch: BatchRecord, made: MadeRecord | None, stages: list[Span]) -> None:
        figures: dict[str, Any] = {"iterator": batch.run, "batch": batch.seq}
        if batch.worker >= 0:
            figures["worker"] = batch.worker
        if made is not None:
            figures |= {"samples": made.samples, "bytes": made.nbytes}
        outer = self.span(f"batch {batch.seq}", batch.begin, batch.ended, **figures)
        if outer is None:
            return
        wait = self.span("wait", batch.begin, batch.taken)
        opened = self.span("open", batch.taken, batch.ended)
        first, last = (
            bisect_left(stages, outer.begin, key=attrgetter("end")),
            bisect_right(stages, outer.end, key=attrgetter("end")),
        )
        # Taken out: several consumers may wait at the same time, and a span is one consumer's.
        mine = [each for each in stages[first:last] if each.begin >= outer.begin]
        if mine:
            stages[first:last] = [each for each in stages[first:last] if each.begin < outer.begin]
        inner = nested(outer, [each for each in (wait, opened) if each is not None] + mine)
        point = self._at(batch.taken)
        self._units[_MAIN, _CONSUMER].append(
            Unit(outer, inner, (batch.run, batch.seq), max(outer.begin, min(point, outer.end)))
        )
        if batch.copied:
            self._instants.append((_MAIN, self._at(batch.ended), "copied out of the ring", {"batch": batch.seq}))
        elif batch.held >= 0:
            lease = {"batch": batch.seq, "worker": batch.worker, "slot": batch.slot}
            self._instants.append((_MAIN, self._at(batch.ended), "lease", lease))
        if batch.held >= 0:
            self._held.append((self._at(batch.ended), batch.worker, batch.held))

    def _left_stages(self, stages: Iterable[Span]) -> None:
        """Spans of the main process within no batch's: samples that are fetched ahead, indices that `iter` takes."""
        for span in stages:
            group = _CONSUMER if span.name in ("sampler", "snapshot") else _AHEAD
            self._units[_MAIN, group].append(Unit(span, [], None))

    def _steps(self, batches: Sequence[BatchRecord]) -> None:
        """The consumer's own work between two batches."""
        before: BatchRecord | None = None
        for each in sorted(batches, key=attrgetter("begin")):
            if before is not None and before.run == each.run:
                step = self.span("step", before.ended, each.begin)
                if step is not None:
                    self._units[_MAIN, _CONSUMER].append(Unit(step, [], None))
            before = each if before is None or each.ended >= before.ended else before

    def _assigned(
        self,
        each: AssignedRecord,
        made: Mapping[tuple[int, int, int], MadeRecord],
        taken: Mapping[tuple[int, int], BatchRecord],
    ) -> None:
        figures = {"iterator": each.run, "batch": each.seq, "worker": each.worker}
        span = self.span(f"assign {each.seq}", each.began, each.ended, **figures)
        if span is None:
            return
        batch = taken.get((each.run, each.seq))
        # Of a task that several workers had, the arrow begins where the batch that was delivered does.
        mine = batch is not None and batch.worker == each.worker and (each.run, each.seq, each.worker) in made
        self._units[_MAIN, _LOOP].append(Unit(span, [], (each.run, each.seq) if mine else None))

    # ------------------------------------------------------------------------------------------- writing

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace events."""
        points: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        left_out: Counter[str] = Counter()
        yield _metadata("process_name", _MAIN, 0, name=f"{self._facts['loader']} (pid {self._facts['pid']})")
        yield _metadata("process_sort_index", _MAIN, 0, sort_index=0)
        for source, track in self._tracks.items():
            name = f"worker {source.worker} ({source.place})"
            yield _metadata("process_name", track, 0, name=name)
            yield _metadata("process_sort_index", track, 0, sort_index=1 + source.worker)
        for group in (_CONSUMER, _LOOP):  # also where nothing happened there
            yield _metadata("thread_name", _MAIN, group[1], name=group[0])
        for (track, (name, first)), units in sorted(self._units.items()):
            placed, none_free = lanes(units)
            if none_free:
                left_out[name] += none_free
            for lane in sorted({lane for lane, _ in placed}):
                if lane or (track, name) not in ((_MAIN, _CONSUMER[0]), (_MAIN, _LOOP[0])):
                    yield _metadata("thread_name", track, first + lane, name=f"{name} {lane + 1}" if lane else name)
                yield _metadata("thread_sort_index", track, first + lane, sort_index=first + lane)
            category = name.replace(" ", "_")
            for lane, unit in placed:
                for span in (unit.outer, *unit.inner):
                    yield _complete(span, category, track, first + lane)
                if unit.batch is not None:
                    point = unit.outer.begin if unit.point is None else unit.point
                    points[unit.batch].append((point, track, first + lane))
        yield from _arrows(points)
        for track, at, name, figures in sorted(self._instants, key=lambda each: each[1]):
            event = {"name": name, "cat": "event", "ph": "i", "s": "p", "ts": at / 1e3, "pid": track, "tid": 0}
            yield {**event, "args": dict(figures)} if figures else event
        for at, worker, held in sorted(self._held):
            name = f"slots held of worker {worker}"
            yield {"name": name, "ph": "C", "ts": at / 1e3, "pid": _MAIN, "tid": 0, "args": {"slots": held}}
        self._facts["left_out"] = dict(left_out)


def _arrows(points: Mapping[tuple[int, int], list[tuple[int, int, int]]]) -> Iterator[dict[str, Any]]:
    """The arrows of each batch that was delivered, through the spans of its way in the order of time."""
    for number, (key, found) in enumerate(points.items(), 1):
        found.sort()
        delivered = any(track == _MAIN and _CONSUMER[1] <= lane < _LOOP[1] for _, track, lane in found)
        if len(found) < 2 or not delivered:
            continue
        for index, (at, track, lane) in enumerate(found):
            phase = "s" if not index else "f" if index == len(found) - 1 else "t"
            event = {"name": "batch", "cat": "way", "ph": phase, "id": number, "ts": at / 1e3, "pid": track}
            event |= {"tid": lane, "args": {"iterator": key[0], "batch": key[1]}}
            yield event if phase != "f" else {**event, "bp": "e"}


def _metadata(kind: str, track: int, lane: int, **figures: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": track, "tid": lane, "args": figures}


def _complete(span: Span, category: str, track: int, lane: int) -> dict[str, Any]:
    event = {"name": span.name, "cat": category, "ph": "X", "ts": span.begin / 1e3}
    event |= {"dur": (span.end - span.begin) / 1e3, "pid": track, "tid": lane}
    return {**event, "args": dict(span.figures)} if span.figures else event


def _join_clocks(made: Sequence[MadeRecord], spans: Mapping[int, TaskSpans | None]) -> dict[Source, ClockOffset]:
    """The clock of each worker. Those of a node's workers are one clock."""
    of_node: dict[str, ClockOffset] = defaultdict(ClockOffset)
    found: dict[Source, ClockOffset] = {}
    here = ClockOffset()  # without any bound it is 0
    for index, each in enumerate(made):
        known = spans[index]
        if known is None:
            continue
        if not each.source.node:
            found[each.source] = here
            continue
        clock = found[each.source] = of_node[each.source.node]
        if known.asked:
            clock.there(known.asked, known.begin)
        clock.back(known.end, each.arrived)
    return found


def trace_of(records: Iterable[Record], begin: float, end: float, facts: dict[str, Any]) -> TraceEvents:
    """Make the trace of the records.

    Args:
        records: in any order of time.
        begin: of the trace, by `perf_counter`. What ended before is left out.
        end: of it.
        facts: of the whole trace; gets `left_out` once all events were taken.
    """
    maker = _Maker(records, begin, end, facts)
    maker.collect()
    return TraceEvents(facts, maker.events())
