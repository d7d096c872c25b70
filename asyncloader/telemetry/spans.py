"""Collects the spans of a worker's tasks while a trace is recorded, and packs them for the main process. Pure.

Data path: fetchers, transports -> counters -> [spans] -> wire -> trace.

A worker notes spans only for tasks that ask for them (`wire.unpack_task`). They go to the main process with the task's
answer, in a frame before it. Spans of code that runs for no task, as of a stream that reads ahead, go with the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from struct import Struct
from time import perf_counter
from typing import NamedTuple

from asyncloader.telemetry.counters import STAGES, Recorder, end_spans, send_spans
from asyncloader.workers.ipc.wire import MOST_SPAN_BYTES

_OF_READS = ("read", "retry")
NAMES: tuple[str, ...] = (*STAGES, *_OF_READS)
"""The names of spans; in a frame each is a number."""

_HEAD = Struct("=IQdddH")  # epoch, seq, asked, begin, end, number of own spans
_SPAN = Struct("=Bdd")  # name, end, seconds
_NUMBER = {name: number for number, name in enumerate(NAMES)}
_MOST = 1000  # spans of one task, and as many of no task
_MOST_READS = _MOST - 2 * len(NAMES)  # of one task: its stages end after its reads, and must have room

Noted = tuple[str, float, float]
"""A span: name, when it ended, seconds."""


class TaskSpans(NamedTuple):
    """The spans of one task, by the clock of the worker except `asked`.

    Attributes:
        asked: when the main process sent the task.
        begin: when the worker began it.
        end: when the worker sent its answer.
        own: of the task.
        loose: of the worker, of no task.
    """

    asked: float
    begin: float
    end: float
    own: list[Noted]
    loose: list[Noted]


class _Open:
    """The spans of a task that is being carried out."""

    __slots__ = ("asked", "begin", "noted")

    def __init__(self, asked: float, begin: float) -> None:
        self.asked = asked
        self.begin = begin
        self.noted: list[Noted] | None = []  # None: the task was answered


_task: ContextVar[_Open | None] = ContextVar("asyncloader_task_spans", default=None)


class SpanLog:
    """Notes the spans of one worker from now on, until `stop`.

    Args:
        recorder: its counters, which pass each span on.
        process: take the spans of all code of this process, too: a service's process counts for several workers.
    """

    def __init__(self, recorder: Recorder, *, process: bool) -> None:
        self._recorder = recorder
        self._loose: deque[Noted] = deque(maxlen=_MOST)
        send_spans(recorder, self._note, process=process)

    def stop(self) -> None:
        """Note nothing more."""
        end_spans(self._recorder, self._note)

    def begin(self, asked: float, begin: float) -> None:
        """Begin a task; in an event loop call it in the task's own context."""
        _task.set(_Open(asked, begin))

    def _note(self, name: str, seconds: float) -> None:
        task = _task.get()
        # A context outlives its task: that of a stream that reads ahead is the first task's.
        noted = self._loose if task is None or task.noted is None else task.noted
        if noted is self._loose or len(noted) < (_MOST_READS if name in _OF_READS else _MOST):
            noted.append((name, perf_counter(), seconds))

    def answered(self, epoch: int, seq: int) -> bytes:
        """End the current task. Returns the body of its frame; empty if it has no spans."""
        task = _task.get()
        if task is None or task.noted is None:
            return b""
        own, task.noted = task.noted, None
        loose: list[Noted] = []
        while self._loose:
            loose.append(self._loose.popleft())
        head = _HEAD.pack(epoch, seq, task.asked, task.begin, perf_counter(), len(own))
        return head + b"".join(_SPAN.pack(_NUMBER[name], end, seconds) for name, end, seconds in own + loose)


def _head(body: bytes) -> tuple[int, int, float, float, float, int]:
    if not _HEAD.size <= len(body) <= MOST_SPAN_BYTES or (len(body) - _HEAD.size) % _SPAN.size:
        raise ValueError(f"broken stream: {len(body)} bytes of spans")
    epoch, seq, asked, begin, end, own = _HEAD.unpack_from(body)
    return epoch, seq, asked, begin, end, own


def unpack(body: bytes, epoch: int, seq: int) -> TaskSpans | None:
    """Read the spans of a task; None if they are those of another task, or cannot be."""
    try:
        of_epoch, of_seq, asked, begin, end, own = _head(body)
    except ValueError:
        return None
    if (of_epoch, of_seq) != (epoch, seq) or not (0.0 <= asked < 1e12 and 0.0 <= begin <= end < 1e12):
        return None
    spans = list(_spans(body))
    return TaskSpans(asked, begin, end, spans[:own], spans[own:])


def _spans(body: bytes) -> Iterator[Noted]:
    for number, end, seconds in _SPAN.iter_unpack(body[_HEAD.size :]):
        # A node's numbers are not trusted; comparisons with NaN are false.
        if number < len(NAMES) and 0.0 <= end < 1e12 and 0.0 <= seconds <= end:
            yield NAMES[number], end, seconds
