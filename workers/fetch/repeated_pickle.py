"""Pickles a state again and again, but each long list in it only when it has changed.

Data path: dataset -> dataset_state, which uses [repeated_pickle]. A stream's state often has the order of its whole
epoch, of which only the position changes from batch to batch.
"""

from __future__ import annotations

import pickle
from typing import Any

_LONG = 1000  # elements from which comparing a list is worth it
# Elements that cannot change in their place. Neither bools nor floats, which equal other values: True is 1, and 0.0 is
# -0.0. That an int was replaced by an equal bool or float is not noticed; comparing types takes as long as pickling.
_FIXED = frozenset({int, str, bytes, type(None)})


class _KeptPickle:
    """A list that was pickled before. Unpickling gives the list."""

    __slots__ = ("before", "data")

    def __init__(self, value: Any) -> None:
        self.before = list(value)  # a copy: the dataset may change its list in place
        self.data: bytes | None = None  # None: not known to stay the same

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)

    def is_still(self, value: Any) -> bool:
        """Whether the list has the elements of before, and none of them can have changed in its place."""
        try:
            same = bool(self.before == value)  # compares addresses first: 0.7 ns for each element
        except Exception:  # of the elements' own comparison
            return False
        if same and self.data is None:
            if not _FIXED.issuperset(map(type, value)):
                return False
            self.data = pickle.dumps(value, 5)
        return same


class RepeatedPickle:
    """One state's pickles. A list is compared from its second time on, and not pickled from its third."""

    def __init__(self) -> None:
        self._kept: dict[Any, _KeptPickle] = {}

    def lean(self, state: Any) -> Any:
        """Return the state to pickle, with the pickle of before in the place of each long list that did not change."""
        if type(state) is not dict:
            return state
        kept, lean = self._kept, dict[Any, Any]()
        # Only the lists of this state are kept, so that keys that have disappeared hold no memory.
        self._kept = {}
        for key, value in state.items():
            lean[key] = value
            if type(value) is list and len(value) >= _LONG:
                before = kept.get(key)
                still = before is not None and before.is_still(value)
                self._kept[key] = before if before is not None and still else _KeptPickle(value)
                if still:
                    lean[key] = before
        return lean
