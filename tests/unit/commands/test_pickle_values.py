"""Pickles of every protocol are read without being unpickled, and programs of strangers do no harm."""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest

from asyncloader.commands import pickle_values
from asyncloader.commands.pickle_values import PickleError, read_pickle
from asyncloader.commands.state_words import describe, find_states

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
    assert read_pickle(file) == value
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
        found = dict(find_states(read_pickle(io.BytesIO(pickle.dumps(value, protocol)))))
        assert [*found.values()] == [STATE] if name != "the state itself" else len(found) == 1
    assert [*found] == [place]


def test_a_state_below_all_that_python_can_call() -> None:
    """Is found, and its place is shortened."""
    program = b"\x80\x04" + pickle.dumps(STATE, 4)[2:-1] + b"\x85" * 100_000 + b"."
    ((place, state),) = find_states(read_pickle(io.BytesIO(program)))
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


@pytest.mark.parametrize("kind", [bytes, bytearray, str])
def test_large_values_are_passed_over(kind: Any) -> None:
    """So that a model's bytes in a checkpoint are not read."""
    large = kind(2_000_000) if kind is not str else "x" * 2_000_000
    found = read_pickle(io.BytesIO(pickle.dumps({"model": large, "loader": STATE}, 5)))
    assert not found["model"]
    assert found["loader"] == STATE


_MANY, _DEEP = 100_000, 250_000  # hashing tuples that nest so deep overflows the stack
HOSTILE: dict[str, tuple[bytes, str]] = {
    "called": (b"cposix\nsystem\n(S'exit 1'\ntR.", ""),
    "instance": (b"(S'exit 1'\niposix\nsystem\n.", ""),
    "object": (b"(cposix\nsystem\nS'exit 1'\no.", ""),
    "state": (b"\x80\x02cbuiltins\nobject\n)\x81}X\x09\x00\x00\x00__class__cbuiltins\nint\nsb.", ""),
    "attributes of a function": (b"c_codecs\nencode\n(N}S'__defaults__'\nNsS'__code__'\nNstb.", ""),
    "numbers that share a hash, as keys": (
        b"\x80\x02}("
        + b"".join(b"\x8a\x10%bN" % (n * (2**61 - 1)).to_bytes(16, "little") for n in range(_MANY))
        + b"u.",
        "",
    ),
    "a tuple that doubles, as a key": (b"\x80\x02})" + b"2\x86" * 100 + b"N" + b"s.", ""),
    "a large text, encoded again and again": (
        b"\x80\x02]c_codecs\nencode\nX\x00\x00\x10\x00"
        + b"x" * (1 << 20)
        + b"\x85q\x000q\x010"
        + b"h\x01h\x00Ra" * _MANY
        + b".",
        "",
    ),
    "a large tuple of arguments, again and again": (
        b"\x80\x02(" + b"N" * _MANY + b"tq\x000](" + b"cposix\nsystem\nh\x00R" * _MANY + b"e.",
        "",
    ),
    "a frame of 4 EiB": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.", ""),
    "a line without end": (b"V" + b"x" * (2 << 20), "damaged"),
    "extension": (b"\x80\x02\x82\x01.", ""),
    "a tuple that nests deep, as a key": (b"\x80\x02}(" + b")" + b"\x85" * _DEEP + b"K\x01u.", ""),
    "a tuple that nests deep, in a set": (b"\x80\x04\x8f(" + b")" + b"\x85" * _MANY + b"\x90.", ""),
    "a list that nests deep": (b"\x80\x02" + b"]" * _MANY + b"a" * (_MANY - 1) + b".", ""),
    "a far place in the memo": (b"\x80\x02]r\xff\xff\xff\xff.", ""),
    "a text of 4 EiB": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.", "damaged"),
    "an array of 4 EiB": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"a.", "damaged"),
    "a number of 2 GiB": (b"\x80\x02\x8b\xff\xff\xff\x7fa.", "damaged"),
    "a number of many digits": (b"I" + b"9" * 100_000 + b"\n.", "damaged"),
    "no mark": (b"\x80\x02t.", "damaged"),
    "nothing to pop": (b"\x80\x020.", "damaged"),
    "nothing": (b"\x80\x02.", "damaged"),
    "no such memo": (b"\x80\x02h\x05.", "damaged"),
    "an odd number of items": (b"\x80\x02}(K\x01u.", "damaged"),
    "no end": (b"\x80\x02K\x01", "damaged"),
    "no instruction": (b"\x80\x02\xff.", "damaged"),
    "empty": (b"", "damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_programs_of_strangers(name: str) -> None:
    """Are carried out without calling, importing, allocating or hashing what they ask for, or are refused."""
    program, why = HOSTILE[name]
    if not why:
        read_pickle(io.BytesIO(program))
        return
    with pytest.raises(PickleError, match=why):
        read_pickle(io.BytesIO(program))


def test_a_program_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is ended after a number of instructions."""
    monkeypatch.setattr(pickle_values, "MOST_STEPS", 1000)
    with pytest.raises(PickleError, match="more than 1,000 instructions"):
        read_pickle(io.BytesIO(b"\x80\x02" + b"N0" * 10_000))
