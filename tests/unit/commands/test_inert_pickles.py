"""Pickles of every protocol are read without an import, a call or an object of theirs."""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest

from asyncloader.commands.checkpoint_file import InertUnpickler
from asyncloader.commands.loader_states import OtherObject, describe, find_states

SHARED = [1, "a"]
PLAIN: list[Any] = [
    {"epoch": 3, "nested": [{"a": (1, 2, 3, 4)}, [], (), {}, (1,), (1, 2)], "b": [None, True, False]},
    [0, -1, 255, 65536, 2**31, -(2**31), 2**64, -(2**70), 10**300, 1.5, -math.inf],
    ["", "é", "\ud800", "数" * 300, "x" * 70_000, "line\nend"],
    [SHARED, SHARED, {"again": SHARED}],
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", PLAIN, ids=["mapping", "numbers", "texts", "shared"])
def test_plain_values(value: Any, protocol: int) -> None:
    """Are those that unpickling gives, and the file is left at the pickle's end."""
    file = io.BytesIO(pickle.dumps(value, protocol) + b"rest")
    assert InertUnpickler(file).load() == value
    assert file.read() == b"rest"


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Trainer:
    def __init__(self, inner: Any) -> None:
        self.loader = inner
        self.itself = self


class Pair(NamedTuple):
    loader: Any
    step: int


class Steps(list[Any]):
    pass


class Called:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> Any:
        return Called, (self.inner,)


STATE = dict.fromkeys(("version", "mode", "kind", "epoch", "step"), 1)
PLACES: dict[str, tuple[Any, str]] = {
    "attribute": (Trainer(STATE), "loader"),
    "slot": (Slotted([Trainer(STATE)]), "inner[0].loader"),
    "named tuple": (Pair(STATE, 3), "[0]"),
    "list's subclass": (Steps([0, STATE]), "[1]"),
    "deque": ({"last": deque([STATE])}, "last[0]"),
    "made by a call": (Called(STATE), "[0]"),
    "ordered": (OrderedDict(a=[], b=STATE), "b"),
    "the state itself": (OrderedDict(STATE), "the file"),
    "frozenset": (frozenset([Trainer(STATE)]), "[0].loader"),
    "set": ({Trainer(STATE)}, "[0].loader"),
    "keys that are not texts": ({None: 0, ("train", 0): {7: {b"k": STATE}}}, "('train', 0).7.b'k'"),
}


@pytest.mark.parametrize("name", PLACES)
def test_states_in_other_objects(name: str) -> None:
    """Are found, wherever the class keeps its values, and under any key."""
    value, place = PLACES[name]
    found: dict[str, Any] = {}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        found = dict(find_states(InertUnpickler(io.BytesIO(pickle.dumps(value, protocol))).load()))
        assert [*found.values()] == [STATE] if name != "the state itself" else len(found) == 1
    assert [*found] == [place]


def test_a_state_below_all_that_python_can_call() -> None:
    """Is found, and its place is shortened."""
    program = b"\x80\x04" + pickle.dumps(STATE, 4)[2:-1] + b"\x85" * 100_000 + b"."
    ((place, state),) = find_states(InertUnpickler(io.BytesIO(program)).load())
    assert state == STATE
    assert place.endswith("[0][0]")
    assert len(place) < 1000


def test_a_state_with_a_value_that_doubles() -> None:
    """Is found once, and is refused without being printed."""
    value: Any = []
    for _ in range(100):
        value = [value, value]
    ((place, state),) = find_states({"deep": value, "loader": STATE | {"version": value}})
    assert describe(place, state)[0].state == "problem"


HOSTILE = {
    "called": b"cposix\nsystem\n(S'exit 1'\ntR.",
    "instance": b"(S'exit 1'\niposix\nsystem\n.",
    "object": b"(cposix\nsystem\nS'exit 1'\no.",
    "attributes": b"\x80\x02cbuiltins\nobject\n)\x81}X\x09\x00\x00\x00__class__cbuiltins\nint\nsb.",
    "attributes of a function": b"c_codecs\nencode\n(N}S'__defaults__'\nNsS'__code__'\nNstb.",
    "attributes of a list": b"\x80\x02]}S'__class__'\nNsb.",
    "a registered class": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_programs_of_strangers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plain values, and objects that stand for others, or are refused; nothing is imported."""
    monkeypatch.setattr("builtins.__import__", None)
    before = {**vars(OtherObject)}
    try:
        found = InertUnpickler(io.BytesIO(HOSTILE[name])).load()
    except (pickle.UnpicklingError, AttributeError, TypeError, ValueError):
        found = None
    assert found is None or type(found) is OtherObject
    assert before == {**vars(OtherObject)}
