"""Counts and times the work of one process for a loader, in memory that other processes may read at any time. Pure.

Data path: transports, fetchers, stages -> [counters] -> statistics.

A `Recorder` is a block of doubles: sums (`KEYS`), and a sum and a histogram of seconds for each stage that a batch
passes (`STAGES`). A worker's block is shared memory, so its numbers are seen while it is busy or stuck, and outlive it.
Each stage is timed by one thread of one process; sums to which two threads add at the same time may lose an addition.

A histogram has four buckets per octave, from 1 us to half an hour: quantiles are exact to a tenth. Blocks of several
processes are merged by adding them up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import accumulate
from math import frexp
from struct import Struct
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncloader.telemetry.figures import STORE_FIGURES
from asyncloader.telemetry.slow_samples import SLOW_BYTES

KEYS = tuple(STORE_FIGURES)
"""The sums of transports, in the order of `stats()`, where they have the prefix ``store/``."""

PROCESS_KEYS: tuple[str, ...] = ("cpu_s", "delayed_s", "sampled_s", "sampled_cpu_s")
"""A worker's CPU time since its start-up, and the time that its main thread was ready to run but had no CPU; without
workers: of some of the batches, how long they took, how much of that they computed, and were kept from computing."""

Stage = Literal[
    "sampler",
    "snapshot",
    "queue",
    "fetch",
    "decode",
    "collate",
    "write",
    "transfer",
    "order",
    "pin",
    "h2d",
    "wait",
    "consumer",
    "start_process",
    "start_import",
    "start_dataset",
    "first_read",
]
STAGES: tuple[Stage, ...] = Stage.__args__  # type: ignore[attr-defined]
"""The stages in the order in which a batch passes them; at the end those of a worker's start."""

CONNECTION_KEY = "connection"
"""In a process of a service, whose task it carries out: the number of a worker connection, from 1; 0: of none."""

_SUMS = (*KEYS, *PROCESS_KEYS, CONNECTION_KEY)
_BUCKETS = 124
_LAST = _BUCKETS - 1
_BASE: dict[str, int] = {stage: len(_SUMS) + number * (1 + _BUCKETS) for number, stage in enumerate(STAGES)}
_INDEX = {key: number for number, key in enumerate(_SUMS)}
_DOUBLES = len(_SUMS) + len(STAGES) * (1 + _BUCKETS)

_OWN = len(_SUMS)  # from here on a worker's own, where several workers share a process
_ENTRY = Struct("<Hd")

BLOCK_BYTES = 8 * _DOUBLES
"""Size of a recorder's block."""

RECORD_BYTES = BLOCK_BYTES + SLOW_BYTES
"""Size of a recorder's memory: its block, and behind it the slowest samples."""


def _bucket(us: float) -> int:
    mantissa, exponent = frexp(us)
    return min(_LAST, max(0, 4 * exponent + int(8.0 * mantissa) - 8))


def _quarters(bucket: int) -> int:
    """The least quarters of a microsecond in a bucket."""
    return (4 + bucket % 4) << bucket // 4 if bucket else 0


# The buckets of times below 4 ms, by quarters of a microsecond: to look one up takes half as long as to compute it.
_SHORT_S = _quarters(48) / 4e6
_SHORT = b"".join(bytes([bucket]) * (_quarters(bucket + 1) - _quarters(bucket)) for bucket in range(48))


class Recorder:
    """The counts and times of one process.

    Args:
        memory: a writable buffer of `RECORD_BYTES` zeros; None: private memory.
    """

    __slots__ = ("_noted", "block", "sink", "slow")

    def __init__(self, memory: Any = None) -> None:
        view = memoryview(bytearray(RECORD_BYTES) if memory is None else memory)
        self.block = view[:BLOCK_BYTES].cast("d")
        self.slow = view[BLOCK_BYTES:RECORD_BYTES]
        """For a `SlowSamples`. It is not packed: the slowest samples of a service's workers are not known."""
        self._noted: dict[Stage, deque[float]] = {}  # times that `count_noted` will count
        self.sink: Callable[[str, float], object] | None = None
        """While a trace is recorded: called with the name and the seconds of each span that ends."""

    def keep(self) -> None:
        """Go on with private copies, so that the memory may go."""
        self.block = memoryview(bytearray(self.block)).cast("d")
        self.slow = memoryview(bytearray(self.slow))

    def packed(self) -> bytes:
        """The stages' part of the block, for a process that cannot read it: number and value of each that is not 0."""
        return b"".join(
            _ENTRY.pack(number, value) for number, value in enumerate(self.block) if value and number >= _OWN
        )

    def take(self, data: bytes) -> None:
        """Set what another process has packed.

        Raises:
            ValueError: these are no such bytes.
        """
        if len(data) % _ENTRY.size:
            raise ValueError(f"broken stream: {len(data)} bytes of counts")
        entries = list(_ENTRY.iter_unpack(data))
        # All entries are checked before the first is set: broken bytes change nothing. NaN fails the comparison, too.
        if any(not (_OWN <= number < _DOUBLES and 0.0 <= value < 1e300) for number, value in entries):
            raise ValueError("broken stream: counts that cannot be")
        for number, value in entries:
            self.block[number] = value

    def add(self, key: str, number: float = 1) -> None:
        """Add `number` to a sum."""
        self.block[_INDEX[key]] += number

    def put(self, key: str, number: float) -> None:
        """Set a sum that is kept elsewhere."""
        self.block[_INDEX[key]] = number

    def time(self, stage: Stage, seconds: float) -> None:
        """Record that a batch spent so long in a stage."""
        bucket = _SHORT[int(seconds * 4e6)] if 0.0 <= seconds < _SHORT_S else _bucket(seconds * 1e6)
        base, block = _BASE[stage], self.block
        block[base] += seconds
        block[base + 1 + bucket] += 1.0
        sink = self.sink  # read once: another thread may end the trace
        if sink is not None:
            sink(stage, seconds)

    def note(self, stage: Stage) -> Callable[[float], object]:
        """Return a function that notes a time of this stage, in any thread, for `count_noted`. Like `time`, and takes a
        tenth of its time.
        """
        # A built-in method: a call of it runs no Python code.
        return self._noted.setdefault(stage, deque()).append

    def count_noted(self, least: int = 1) -> None:
        """Count the times that were noted since the last call. Any thread; call it before `block` is read.

        Args:
            least: a stage with fewer noted times is left for a later call.
        """
        for stage, noted in list(self._noted.items()):
            if len(noted) < least:
                continue
            seconds: list[float] = []
            with suppress(IndexError):  # another thread counts them, too
                for _ in range(len(noted)):
                    seconds.append(noted.popleft())  # noqa: PERF401 - times that were taken are kept
            if not seconds:
                continue
            # As `_bucket`, for all at once.
            mantissas, exponents = np.frexp(np.array(seconds) * 1e6)
            buckets = np.clip(4 * exponents + (8.0 * mantissas).astype(np.int64) - 8, 0, _LAST)
            base = _BASE[stage]
            into = np.asarray(self.block)[base : base + 1 + _BUCKETS]
            # One call in C: another thread's addition comes before it or after it.
            np.add(into, np.array([sum(seconds), *np.bincount(buckets, minlength=_BUCKETS)]), out=into)


class StageTimes(NamedTuple):
    """How long batches spent in one stage: how many there were, and seconds. Quantiles are exact to a tenth."""

    number: int
    total: float
    p50: float
    p95: float
    p99: float


def total(block: Sequence[float], key: str) -> float:
    """Return a sum of a block, or of a sum or difference of blocks."""
    return block[_INDEX[key]]


def stage_sum(block: Sequence[float], stage: Stage) -> float:
    """Return the seconds of a stage, without its quantiles, which take longer."""
    return block[_BASE[stage]]


def stage_times(block: Sequence[float], stage: Stage) -> StageTimes:
    """Evaluate a stage's part of a block, or of a sum or difference of blocks."""
    base = _BASE[stage]
    buckets = block[base + 1 : base + 1 + _BUCKETS]
    count = sum(buckets)
    if not count:
        return StageTimes(0, block[base], 0.0, 0.0, 0.0)
    sums = list(accumulate(buckets))  # once, and searched in C: exporters ask for all stages of all workers
    p50, p95, p99 = (_quantile(buckets, sums, share * count) for share in (0.5, 0.95, 0.99))
    return StageTimes(round(count), block[base], p50, p95, p99)


def number_below(block: Sequence[float], stage: Stage, octave: int) -> float:
    """Return how often a stage took less than ``2**octave`` microseconds. `octave` is from 1 to 31."""
    base = _BASE[stage] + 1
    return sum(block[base : base + 4 * octave])


def _quantile(buckets: Sequence[float], sums: Sequence[float], rank: float) -> float:
    """The seconds below which `rank` of the entries lie, taken to be spread evenly within each bucket. `sums`: of the
    entries up to each bucket.
    """
    bucket = bisect_left(sums, rank)
    if bucket == _BUCKETS:
        return _EDGES[_BUCKETS]
    low, high, number = _EDGES[bucket], _EDGES[bucket + 1], buckets[bucket]
    return low + (high - low) * (rank - (sums[bucket] - number)) / number if number else low


def _edge(bucket: int) -> float:
    """The least seconds in a bucket; all below a microsecond are in the first."""
    octave, quarter = divmod(bucket, 4)
    return (1 + quarter / 4) * 2.0**octave * 1e-6 if bucket else 0.0


_EDGES = [_edge(bucket) for bucket in range(_BUCKETS + 1)]


_process = Recorder()
_current: ContextVar[Recorder | None] = ContextVar("asyncloader_recorder", default=None)


def count(key: str, number: float = 1) -> None:
    """Add to a sum of the loader that this code runs for; outside of any, of the process."""
    (_current.get() or _process).add(key, number)


def span(name: str, seconds: float) -> None:
    """Pass a span that ends now, and is no stage, to the trace of the loader that this code runs for, if any."""
    sink = (_current.get() or _process).sink
    if sink is not None:
        sink(name, seconds)


def send_spans(recorder: Recorder, sink: Callable[[str, float], object], *, process: bool = False) -> None:
    """Set the recorder's sink, and that of all other code of its process (`process`: also if it serves others)."""
    recorder.sink = sink
    if process or _process.block is recorder.block:
        _process.sink = sink


def end_spans(recorder: Recorder, sink: Callable[[str, float], object]) -> None:
    """Undo `send_spans`; where another recorder of the process has set its own sink since, that stays."""
    recorder.sink = None
    if _process.sink == sink:
        _process.sink = None


class recording:  # noqa: N801 - used as a function; a generator would take three times as long
    """Context whose code, and the tasks that it starts, count for this recorder's loader."""

    __slots__ = ("_recorder", "_token")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._token = _current.set(self._recorder)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def record_process(recorder: Recorder) -> None:
    """Have all code of this process count for this recorder: a worker serves one loader."""
    _process.block = recorder.block
    _process.sink = None
    _current.set(None)  # a forked worker inherits its parent's


class TimedCollate:
    """A collate function whose calls, within the fetch of a batch, are timed.

    Attributes:
        seconds: of the last call; the reader sets it to 0.
    """

    __slots__ = ("_function", "_time", "seconds")

    def __init__(self, function: Callable[[Any], Any], time: Callable[[Stage, float], None]) -> None:
        self._function = function
        self._time = time
        self.seconds = 0.0

    def __call__(self, samples: Any) -> Any:
        """Return the batch of these samples."""
        began = perf_counter()
        batch = self._function(samples)
        self.seconds = perf_counter() - began
        self._time("collate", self.seconds)
        return batch
