"""What the scheduler is told (events) and what it asks for (actions): plain values, no behaviour.

Data path: sampler -> [events] -> scheduler -> [actions] -> pool.

Named tuples rather than dataclasses: they are made a few times a batch in the training process, and a named tuple
costs a third of a frozen dataclass.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from asyncloader.errors import WorkerDied

__all__ = [
    "ENDED",
    "NOTHING",
    "Action",
    "AllDropped",
    "Assign",
    "Completed",
    "Deliver",
    "Delivered",
    "Died",
    "Event",
    "Exhausted",
    "Fail",
    "Finish",
    "Notice",
    "Offered",
    "Poisoned",
    "PoolFailed",
    "PositionedIndex",
    "Pull",
    "Replace",
    "Replaced",
    "SamplerEnded",
    "Started",
    "Task",
    "WorkerFailure",
    "bare_index",
]


class PositionedIndex(NamedTuple):
    """An index, or a list of them, and the global position of its first sample: what a sampler gives in seeded mode."""

    position: int
    index: Any


def bare_index(index: Any) -> Any:
    """The index, or the list of them, without its position."""
    return index.index if isinstance(index, PositionedIndex) else index


class Task(NamedTuple):
    """Everything needed to make one batch, again if need be.

    `index` is what the sampler gave: a list of indices, one index, or None for an iterable dataset.
    """

    epoch: int
    seq: int
    index: Any


# ------------------------------------------------------------------------------------------------ events


class Started(NamedTuple):
    """The epoch begins; every worker is ready to be given tasks."""


class Offered(NamedTuple):
    """The sampler gave one index batch."""

    index: Any


class SamplerEnded(NamedTuple):
    """The sampler has no more index batches in this epoch."""


class Completed(NamedTuple):
    """A worker answered a task. `outcome` is opaque here: a batch's descriptor or a user's error."""

    worker: int
    seq: int
    outcome: Any


class Exhausted(NamedTuple):
    """A worker's copy of an iterable dataset ended at this task; it ignores the tasks that follow."""

    worker: int
    seq: int


class Delivered(NamedTuple):
    """The consumer took this task's outcome: its credit returns."""

    seq: int


class Died(NamedTuple):
    """A worker process ended unasked; everything that it had sent was reported before.

    `at_work` says that it had started up, so that a task may have killed it; `retired` that it left by itself, because
    it had grown too large. `obstacle` says why a replacement could not go on where it was; empty if it can. `outside`
    says that somebody else killed it, so that no task is to blame.
    """

    worker: int
    error: WorkerDied
    at_work: bool = True
    retired: bool = False
    obstacle: str = ""
    outside: bool = False


class Replaced(NamedTuple):
    """A new process is in the worker's place."""

    worker: int


class PoolFailed(NamedTuple):
    """The workers' side cannot go on: no descriptors left, a broken stream."""

    error: BaseException


Event: TypeAlias = Started | Offered | SamplerEnded | Completed | Exhausted | Delivered | Died | Replaced | PoolFailed


# ------------------------------------------------------------------------------------------------ actions


class Pull(NamedTuple):
    """Ask the sampler for `number` index batches; each comes back as `Offered` or `SamplerEnded`."""

    number: int


class Assign(NamedTuple):
    """Give the task to the worker. `suspect`: a worker died over it before."""

    worker: int
    task: Task
    suspect: bool = False


class Replace(NamedTuple):
    """Start a new process in the worker's place; `Replaced` tells that it is there."""

    worker: int


class Deliver(NamedTuple):
    """Hand the outcome to the consumer, after all that were delivered before it."""

    seq: int
    worker: int
    outcome: Any


class Poisoned(NamedTuple):
    """The outcome of a task that killed its workers and is not tried again."""

    task: Task
    deaths: tuple[WorkerDied, ...]


class Finish(NamedTuple):
    """The epoch is over: nothing is outstanding and nothing will be offered."""


class Fail(NamedTuple):
    """The epoch cannot go on."""

    error: BaseException


Action: TypeAlias = Pull | Assign | Replace | Deliver | Finish | Fail


# ------------------------------------------------------------------- outcomes, and what goes beside the batches


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ENDED: Final = _Mark("ENDED")
"""In place of an index: the sampler has no more."""


NOTHING: Final = _Mark("NOTHING")
"""In place of an index: there is no plain sampler, or it ended before."""


class WorkerFailure:
    """A task's outcome when user code raised: `error` is an exception, or torch's wrapper of one."""

    __slots__ = ("bad", "busy", "error")

    def __init__(self, error: Any, busy: float, bad: bytes) -> None:
        self.error = error
        self.busy = busy
        self.bad = bad


class AllDropped(NamedTuple):
    """A task's outcome when all of its samples were left out: there is no batch."""

    busy: float
    cursor: bytes
    bad: bytes


class Notice(NamedTuple):
    """A worker was replaced: something that the consumer should know, beside the batches.

    Attributes:
        retired: it had left by itself, because it had grown.
        warning: a text for the user; may be empty.
    """

    retired: bool
    warning: str
