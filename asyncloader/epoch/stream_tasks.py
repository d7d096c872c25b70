"""Counts the tasks that a stream's workers are to be offered, where the credits change. Pure.

Data path: none; the scheduler of an iterable dataset asks it with each delivery.
"""

from __future__ import annotations


class StreamTasks:
    """The tasks of an iterable dataset: a new one for each that was delivered, more where credits were raised, none for
    a while where they were lowered.

    Args:
        credits: outstanding tasks per worker at the beginning.
    """

    __slots__ = ("_credits", "_surplus")

    def __init__(self, credits: int) -> None:
        self._credits = credits
        self._surplus = 0  # tasks that are too many; negative: too few

    def begin(self, credits: int) -> None:
        """The first tasks are offered: so many for each worker."""
        self._credits = credits

    def due(self, credits: int, active: int, outstanding: int) -> int:
        """The number of tasks to offer for one that was delivered.

        Args:
            credits: outstanding tasks per worker now.
            active: workers that still have data.
            outstanding: tasks, without the one that was delivered.
        """
        if credits != self._credits:
            self._surplus += (self._credits - credits) * active
            self._credits = credits
        # Workers whose data has ended took tasks along: then there are fewer already.
        if self._surplus > 0 and outstanding >= credits * active:
            self._surplus -= 1
            return 0
        more, self._surplus = -min(0, self._surplus), max(0, self._surplus)
        return 1 + more
