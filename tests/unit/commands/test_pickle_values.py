"""Pickles of every protocol are read without being unpickled, and programs of strangers do no harm."""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from typing import Any

import pytest

from asyncloader.commands import pickle_values
from asyncloader.commands.pickle_values import OtherObject, PickleError, read_pickle

SHARED = [1, "a"]
PLAIN: list[Any] = [
    {"epoch": 3, "nested": [{"a": (1, 2, 3, 4)}, [], (), {}, (1,), (1, 2)], 7: None, 0.5: True, b"k": False},
    [0, -1, 255, 65536, 2**31, -(2**31), 2**64, -(2**70), 10**300, 1.5, -math.inf],
    ["", "é", "\ud800", "数" * 300, "x" * 70_000, "line\nend", b"", b"\xff\x00", b"b" * 300, b"b" * 70_000],
    [SHARED, SHARED, {"again": SHARED}],
    OrderedDict(a=1, b=[2]),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", PLAIN, ids=["mapping", "numbers", "texts", "shared", "ordered"])
def test_plain_values(value: Any, protocol: int) -> None:
    """Are those that unpickling gives, and the file is left at the pickle's end."""
    file = io.BytesIO(pickle.dumps(value, protocol) + b"rest")
    assert read_pickle(file) == value
    assert file.read() == b"rest"


class Slotted:
    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = [Trainer()]


class Trainer:
    def __init__(self) -> None:
        self.state = {"loader": 1}
        self.itself = self


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_other_objects(protocol: int) -> None:
    """Have their attributes, wherever the class keeps them; the elements of others are left out."""
    given = {"t": Slotted(), "set": {1}, "frozen": frozenset("a"), "class": Trainer, "number": 1j}
    found = read_pickle(io.BytesIO(pickle.dumps(given, protocol)))
    trainer = found["t"]["inner"][0]
    assert trainer["state"] == {"loader": 1}
    assert trainer["itself"] is trainer
    assert all(isinstance(found[name], OtherObject) for name in ("set", "frozen", "class", "number"))


_MANY, _DEEP = 100_000, 250_000  # hashing tuples that nest so deep overflows the stack
HOSTILE: dict[str, tuple[bytes, str]] = {
    "called": (b"cposix\nsystem\n(S'exit 1'\ntR.", ""),
    "instance": (b"(S'exit 1'\niposix\nsystem\n.", ""),
    "object": (b"(cposix\nsystem\nS'exit 1'\no.", ""),
    "state": (b"\x80\x02cbuiltins\nobject\n)\x81}X\x09\x00\x00\x00__class__cbuiltins\nint\nsb.", ""),
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
