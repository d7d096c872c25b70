"""What the scheduler is told (events) and what it asks for (actions): plain values, no behaviour.

Data path: sampler -> [events] -> scheduler -> [actions] -> pool.

Named tuples rather than dataclasses: they are made a few times a batch in the training process, and a named tuple
costs a third of a frozen dataclass.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "Action",
    "Assign",
    "Completed",
    "Deliver",
    "Delivered",
    "Died",
    "Event",
    "Exhausted",
    "Fail",
    "Finish",
    "Offered",
    "Pull",
    "SamplerEnded",
    "Started",
    "Task",
]


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
    """A worker process ended unasked."""

    worker: int
    error: BaseException


Event: TypeAlias = Started | Offered | SamplerEnded | Completed | Exhausted | Delivered | Died


# ------------------------------------------------------------------------------------------------ actions


class Pull(NamedTuple):
    """Ask the sampler for `number` index batches; each comes back as `Offered` or `SamplerEnded`."""

    number: int


class Assign(NamedTuple):
    """Give the task to the worker."""

    worker: int
    task: Task


class Deliver(NamedTuple):
    """Hand the outcome to the consumer, after all that were delivered before it."""

    seq: int
    worker: int
    outcome: Any


class Finish(NamedTuple):
    """The epoch is over: nothing is outstanding and nothing will be offered."""


class Fail(NamedTuple):
    """The epoch cannot go on."""

    error: BaseException


Action: TypeAlias = Pull | Assign | Deliver | Finish | Fail
