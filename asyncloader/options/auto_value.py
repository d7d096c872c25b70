"""Holds the value of a setting that a loader chooses by itself: what is given as "auto".

Data path: options -> [auto_value] -> epoch_config, and the epoch's `EpochTuning`, which changes it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Final, Self

from asyncloader.telemetry.trials import Tuner

AUTO: Final = "auto"


class AutoValue(str):
    """The text "auto", which also compares and converts as the number now: code that compares the setting with a
    number, or passes it on to a loader of ours, goes on working.

    Each loader has its own; a copy begins anew.
    """

    __slots__ = ("_driver", "decisions", "tuner")

    def __new__(cls) -> Self:
        """Make the choice of a new loader."""
        made = super().__new__(cls, AUTO)
        made.tuner = cls._first()
        made.decisions = deque(maxlen=20)
        made._driver = None
        return made

    tuner: Any
    """A `Tuner`, whose value is this loader's."""
    decisions: deque[str]
    """The newest decisions with their reasons, in words."""
    _driver: weakref.ref[Any] | None

    @staticmethod
    def _first() -> Tuner:
        raise NotImplementedError

    @property
    def number(self) -> int:
        """The value now."""
        return int(self.tuner.value)

    @property
    def found(self) -> tuple[int, float]:
        """The value that was kept last, and the factor by which batches come faster than with the first value; 1: no
        other value was kept.
        """
        return int(self.tuner.kept), float(self.tuner.gain)

    def drive(self, driver: object) -> bool:
        """Whether this is the object that changes the value: the first that asks, for as long as it lives. Several
        iterators of a loader would measure one another.
        """
        now = None if self._driver is None else self._driver()
        if now is None:
            self._driver = weakref.ref(driver)
        return now is None or now is driver

    def release(self, driver: object) -> None:
        """Let another object change the value."""
        if self._driver is not None and self._driver() is driver:
            self._driver = None

    def __index__(self) -> int:
        return self.number

    __int__ = __index__

    def __lt__(self, other: Any) -> bool:
        return self.number < other if isinstance(other, (int, float)) else super().__lt__(other)

    def __le__(self, other: Any) -> bool:
        return self.number <= other if isinstance(other, (int, float)) else super().__le__(other)

    def __gt__(self, other: Any) -> bool:
        return self.number > other if isinstance(other, (int, float)) else super().__gt__(other)

    def __ge__(self, other: Any) -> bool:
        return self.number >= other if isinstance(other, (int, float)) else super().__ge__(other)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def number_of(value: Any) -> Any:
    """The number now, of the value of a setting that may be the loader's choice; any other value as it is."""
    return value.number if isinstance(value, AutoValue) else value
