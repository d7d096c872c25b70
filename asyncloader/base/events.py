"""Defines tasks, the scheduler's actions, and the outcomes of tasks: plain values without behaviour.

Data path: sampler -> scheduler -> [events: actions] -> pool.

Most are named tuples and not dataclasses: a few are made per batch in the training process, and a named tuple costs a
third of a frozen dataclass.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from asyncloader.errors import WorkerDied


class PositionedIndex(NamedTuple):
    """An index, or a list of indices, with the global position of its first sample. Used in seeded mode.

    A tuple has the position of each sample, where they are not neighbours in the order.
    """

    position: int | tuple[int, ...]
    index: Any

    @property
    def first(self) -> int:
        """The position of the first sample."""
        return self.position[0] if isinstance(self.position, tuple) else self.position


def bare_index(index: Any) -> Any:
    """The index, or list of indices, without its position."""
    return index.index if isinstance(index, PositionedIndex) else index


class Task(NamedTuple):
    """Everything that is needed to make one batch, repeatedly if necessary.

    `index` is the sampler's item: a list of indices, or one index; for an iterable dataset None, or the number of a
    stream where a worker serves several.
    """

    epoch: int
    seq: int
    index: Any


class Died(NamedTuple):
    """A worker process ended unexpectedly; all its earlier answers have been reported.

    `at_work`: it had finished its start-up, so a task may have killed it. `left`: it exited by itself because its
    memory had grown too large. `obstacle`: why a replacement cannot resume where it was; empty if it can. `outside`:
    another process killed it, so no task is to blame. `lost`: only the connection to it has ended.
    """

    worker: int
    error: WorkerDied
    at_work: bool = True
    left: bool = False
    obstacle: str = ""
    outside: bool = False
    lost: bool = False


# ------------------------------------------------------------------------------------------------ actions


class Pull(NamedTuple):
    """Request `number` indices from the sampler; each comes back as `Scheduler.offered` or `sampler_ended`."""

    number: int


class Assign(NamedTuple):
    """Give the task to the worker. `suspect`: it may have killed a worker before."""

    worker: int
    task: Task
    suspect: bool = False


class Replace(NamedTuple):
    """Start a new process to replace the worker; `Scheduler.replaced` follows once it runs."""

    worker: int


class Deliver(NamedTuple):
    """Pass the outcome to the consumer, after all earlier outcomes.

    `stream`: the stream that it came from, where a worker serves several.
    """

    seq: int
    worker: int
    outcome: Any
    stream: int | None = None

    @property
    def copy(self) -> int:
        """The copy of the dataset that it came from: the stream's, or the worker's."""
        return self.worker if self.stream is None else self.stream


class Poisoned(NamedTuple):
    """The outcome of a task that killed its workers and is not retried."""

    task: Task
    deaths: tuple[WorkerDied, ...]


class Finish(NamedTuple):
    """The epoch is complete: nothing is outstanding and nothing more will be offered."""


class Fail(NamedTuple):
    """The epoch cannot continue."""

    error: BaseException


Action: TypeAlias = Pull | Assign | Replace | Deliver | Finish | Fail


# ------------------------------------------------------------------- outcomes and notices


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ENDED: Final = _Mark("ENDED")
"""Stands for an index: the sampler has no more."""


NOTHING: Final = _Mark("NOTHING")
"""Stands for an index: there is no plain sampler, or it had ended before."""


class SamplerFailed(NamedTuple):
    """Stands for an index: the sampler has raised, and gives no more."""

    error: Exception


class SkippedSample(NamedTuple):
    """A sample that raised, and how that was handled.

    Attributes:
        index: as the sampler gave it; for a sample of an iterable dataset None, or of a shard which one it is, in words
            (``"'000013' of 's3://bucket/train-7.tar'"``).
        position: in seeded mode, its position in the epoch's order; for an iterable dataset, its number in the worker's
            stream (both from 0); else None.
        worker: number of the worker, or of the stream of a dataset with `loader_streams`; 0 without workers.
        pid: process id of the worker.
        error: type and text of the exception, as in ``"ValueError: bad jpeg"``; at most 1000 characters.
        traceback: the exception's, as text; the last 16000 characters at most.
        action: "skipped" (dropped from its batch), "refilled" (another index took its place) or "replaced" (by the
            value of the `on_error` function). A substitute that raises has a record of its own, which says "skipped".
        substitute: the index that took its place when it was refilled, else None.
    """

    index: Any
    position: int | None
    worker: int
    pid: int
    error: str
    traceback: str
    action: str
    substitute: Any


class Cursor(NamedTuple):
    """The state of one worker's copy of a dataset after some batches.

    Attributes:
        batches: batches that this worker has answered in the epoch: made, or raised the error of.
        samples: samples read from its stream.
        ended: the stream is exhausted.
        dataset: the dataset's state; None for a dataset without a state.
        iterator: its iterator's state; None without a state, or if the iterator is the dataset itself.
        problem: why the state could not be saved; empty if it could.
        itself: whether the dataset is its own iterator. "": it is not. "within": it is, and `dataset` was taken after
            ``iter(dataset)``, and is restored after it. "before": it is, and the state is that of another epoch's end.
            After it is restored, ``iter(dataset)`` is called once more, which begins the epoch. "ended": it is not, and
            its iterator's state is that of another epoch's end. It is restored, because persistent workers would have
            had it: effects on the process, such as a generator that is set, hold for the next epoch. Then
            ``iter(dataset)`` is called once more.
    """

    batches: int
    samples: int
    ended: bool
    dataset: Any
    iterator: Any
    problem: str = ""
    itself: str = ""

    def epoch_later(self) -> Cursor | None:
        """Return the next epoch's first cursor, for a cursor at an epoch's end; None without a state."""
        if self.problem or (self.dataset is None and self.iterator is None):
            return None
        if self.iterator is not None:
            return Cursor(0, 0, False, self.dataset, self.iterator, itself="ended")
        return Cursor(0, 0, False, self.dataset, None, itself="before" if self.itself else "")


class PackedCursor(NamedTuple):
    """A cursor in the bytes that its codec made of it. Only the codec knows them; `value` gives the cursor.

    A cursor comes with each batch, and most are replaced by the next batch's before a state is saved. Unpacking takes
    microseconds for a state of one number, and milliseconds for a state that holds the order of its epoch. The training
    process unpacks a cursor only for a state. The bytes are also a snapshot: changes that the dataset makes to its
    state, or the user to a saved one, do not reach them.

    Attributes:
        data: the packed cursor.
        unpack: reads `data`; its fields in the order of `Cursor`.
    """

    data: bytes
    unpack: Callable[[bytes], Any] = pickle.loads

    @property
    def value(self) -> Cursor:
        """The cursor: a new copy each time, because a dataset that is restored may keep its state and change it."""
        return Cursor(*self.unpack(self.data))


class WorkerFailure:
    """A task's outcome if user code raised: `error` is an exception, or torch's wrapper of one. `unbegun`: the worker
    could not begin the epoch.
    """

    __slots__ = ("busy", "error", "records", "unbegun")

    def __init__(self, error: Any, busy: float, records: Sequence[SkippedSample], *, unbegun: bool = False) -> None:
        self.unbegun = unbegun
        self.error = error
        self.busy = busy
        self.records = records


class AllDropped(NamedTuple):
    """A task's outcome if all of its samples were dropped, so that there is no batch."""

    busy: float
    cursor: PackedCursor | None
    records: Sequence[SkippedSample]


class Notice(NamedTuple):
    """Notifies the consumer that a worker is being replaced.

    Attributes:
        left: the worker had exited by itself, because its memory had grown.
        warning: a text for the user; may be empty.
    """

    left: bool
    warning: str


class CopyBegun(NamedTuple):
    """A copy of the dataset, of a worker or a stream, began the epoch; the cursor says at which state."""

    copy: int
    cursor: PackedCursor
