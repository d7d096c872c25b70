"""Counts what it costs a worker that its tasks are held back to save a slot of its ring. Pure arithmetic.

Data path: beside held_tasks, which holds the tasks.

A worker that is without a task loses time only if the consumer has to wait for a batch, and no more than that: what is
lost is at most the smaller of both times. It may be a small part of the time that the worker has worked.
"""

from __future__ import annotations

PART = 0.02
"""The part of a worker's time that may be lost."""

_TASKS = 32  # that the times are counted over
_TURN_S = 2e-4  # from sending a task to a worker without one until it has begun


class HoldingCost:
    """The times of the worker's last tasks, in seconds. Older ones count less and less."""

    def __init__(self) -> None:
        self._worked = self._idle = self._waited = 0.0
        self._all_waits = 0.0  # of the consumer, when they were last counted
        self._idle_since: float | None = None
        self._blocked_since: float | None = None

    def made(self, seconds: float) -> None:
        """The worker has made a batch in this time."""
        keep = 1.0 - 1.0 / _TASKS
        self._worked = keep * self._worked + seconds
        self._idle *= keep
        self._waited *= keep

    def idle(self, now: float, all_waits: float, *, awaiting: bool) -> None:
        """The worker has no task now, and one of its tasks is held back.

        Args:
            now: the time.
            all_waits: how long the consumer has waited for batches so far; a wait is added when it ends.
            awaiting: whether the consumer waits now.
        """
        if self._idle_since is None:
            self._idle_since = now
        self._waited += all_waits - self._all_waits
        self._all_waits = all_waits
        if not awaiting:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now

    def left(self, now: float) -> float:
        """Seconds for which the worker may go on without a task while the consumer waits."""
        idle = 0.0 if self._idle_since is None else now - self._idle_since + _TURN_S
        blocked = 0.0 if self._blocked_since is None else now - self._blocked_since
        return PART * self._worked - min(self._idle + idle, self._waited + blocked)

    def sent(self, now: float) -> None:
        """The worker was sent a task that was held back."""
        if self._idle_since is not None:
            self._idle += now - self._idle_since + _TURN_S
        self._idle_since = self._blocked_since = None

    def forget(self) -> None:
        """Count from now on: another number of slots is in use."""
        self._idle = self._waited = 0.0
        self._idle_since = self._blocked_since = None
