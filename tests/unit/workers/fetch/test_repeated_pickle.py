"""A state that is pickled again and again: unchanged parts are pickled once, and each pickle has the whole state."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from asyncloader.workers.fetch.repeated_pickle import RepeatedPickle

LONG = 1000
ELEMENTS: list[Any] = [7, 7.5, True, None, "text", b"bytes", (1, 2), [1], {"a": 1}, np.int64(7), np.zeros(2)]


class Odd:
    """An object that cannot be compared."""

    name = "odd"

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


def shown(state: Any) -> str:
    """A state's contents, types included."""
    if isinstance(state, dict):
        return repr({key: shown(value) for key, value in state.items()})
    if isinstance(state, (list, tuple)):
        return repr([type(state).__name__, *map(shown, state)])
    return f"{type(state).__name__} {getattr(state, 'name', state)!r}"


Change = tuple[str, int, Any]
CHANGES = st.tuples(
    st.sampled_from(["none", "none", "set", "append", "inside", "another", "shorter", "drop"]),
    st.integers(0, LONG - 1),
    st.sampled_from([1, -1, 2.5, "new", None, Odd()]),
)


@example(ELEMENTS.index(True), [("none", 0, None), ("set", 0, 1)])
@given(st.sampled_from(range(len(ELEMENTS))), st.lists(CHANGES, max_size=8))
def test_each_pickle_gives_the_state_of_its_moment(kind: int, changes: list[Change]) -> None:
    """The pickle is right whatever changed since the last: in place, deep inside of an element, or by another list."""
    element = pickle.loads(pickle.dumps(ELEMENTS[kind]))
    state: dict[str, Any] = {"order": [*range(LONG)], "odd": [element] * LONG, "at": 0, "short": [1, 2]}
    repeated = RepeatedPickle()
    for change, at, value in [("none", 0, None), *changes]:
        state["at"] += 1
        for key in ("order", "odd"):
            found = state.setdefault(key, [*range(LONG)])
            if change == "set":
                found[min(at, len(found) - 1)] = value
            elif change == "append":
                found.append(value)
            elif change == "inside" and isinstance(element, (list, dict, np.ndarray)):
                element[0] = at
            elif change == "another":
                state[key] = list(found)
            elif change == "shorter":
                state[key] = found[: max(1, len(found) // 2)]
            elif change == "drop":
                del state[key]
        loaded = pickle.loads(pickle.dumps(repeated.lean(state), 5))
        assert shown(loaded) == shown(state)


def test_an_order_is_pickled_once() -> None:
    """From the third pickle on its bytes are reused, also if the state contains a copy of it."""
    order, repeated = [*range(LONG)], RepeatedPickle()
    before = None
    for at in range(5):
        lean = repeated.lean({"order": list(order), "at": at})
        if at >= 1:
            assert lean["order"] is not order
            assert before is None or lean["order"] is before
            before = lean["order"]
    for other in (None, torch.zeros(3), [1, 2], "text"):
        assert repeated.lean(other) is other
