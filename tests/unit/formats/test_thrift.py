"""Thrift's compact protocol: what is wanted is read and written again, and no bytes can do harm."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats.thrift import BINARY, BOOL, I8, I16, I32, I64, Kind, ListOf, Struct, decode, encode

INNER = Struct({1: I64, 3: BOOL})
ALL = Struct(
    {
        1: BOOL,
        2: I8,
        3: I16,
        4: I32,
        20: I64,
        300: BINARY,
        301: ListOf(I32),
        302: ListOf(BOOL),
        303: INNER,
        304: ListOf(INNER),
        305: ListOf(ListOf(I8)),
    }
)


def values_of(kind: Kind) -> st.SearchStrategy[Any]:
    if isinstance(kind, Struct):
        return st.fixed_dictionaries({}, optional={number: values_of(each) for number, each in kind.fields.items()})
    if isinstance(kind, ListOf):
        return st.lists(values_of(kind.item), max_size=20)
    if kind in (I8, I16, I32, I64):
        bits = {I8: 8, I16: 16, I32: 32, I64: 64}[kind]
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    return st.booleans() if kind == BOOL else st.binary(max_size=300)


def test_bytes_of_the_specification() -> None:
    """Field headers with short and long numbers, zigzag numbers, booleans in the header, lists of 15 and more."""
    data = bytes([0x11, 0x13, 0xFF, 0x14, 0x01, 0x15, 0xAC, 0x02, 0x0B - 5, 0x28, 0x02, 0x00])
    assert decode(data, ALL) == {1: True, 2: -1, 3: -1, 4: 150, 20: 1}
    assert encode({301: list(range(15))}, ALL)[:5] == bytes([0x09, 0xDA, 0x04, 0xF5, 0x0F])


@given(values_of(ALL))
@settings(deadline=None)
def test_what_is_written_is_read(values: dict[int, Any]) -> None:
    """Every value of every kind, with fields in any place."""
    assert decode(encode(values, ALL) + b"behind", ALL) == values


@given(values_of(ALL))
@settings(deadline=None)
def test_what_is_not_wanted_is_skipped(values: dict[int, Any]) -> None:
    """Of whatever kind it is; the others come through."""
    choices: list[dict[int, Kind]] = [{20: I64, 303: INNER}, {305: ListOf(ListOf(I8))}, {}]
    for kinds in choices:
        assert decode(encode(values, ALL), Struct(kinds)) == {n: v for n, v in values.items() if n in kinds}


@given(st.data())
@settings(deadline=None)
def test_any_bytes_are_a_struct_or_a_value_error(data: st.DataObject) -> None:
    """Damaged ones, and bytes that were never a struct."""
    good = encode(data.draw(values_of(ALL)), ALL)
    spoiled = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        spoiled[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    for each in (bytes(spoiled), good[: data.draw(st.integers(0, len(good) - 1))], data.draw(st.binary(max_size=40))):
        try:
            found = decode(each, ALL)
        except ValueError:
            continue
        assert decode(encode(found, ALL), ALL) == found


def test_maps_sets_and_doubles_are_skipped() -> None:
    """They are of no interest, but their lengths are."""
    mapped = bytes([0x1B, 0x02, 0x85, 0x01, 97, 0x02, 0x01, 98, 0x04])
    double = bytes([0x17]) + bytes(8)
    empty = bytes([0x1B, 0x00])
    set_ = bytes([0x1A, 0x21, 0x01, 0x02])
    end = bytes([0x06, 0x28, 0x0A, 0x00])
    assert decode(mapped + double + empty + set_ + end, Struct({20: I64})) == {20: 5}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "truncated"),
        (b"\x11", "truncated"),
        (bytes([0x18, 0x01, 0x61, 0x00]), "a value of type 8"),
        (bytes([0x09, 0xDA, 0x04, 0xF5, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]), "a list of 4,294,967,295 items"),
        (bytes([0x08, 0xD8, 0x04, 0xFF, 0xFF, 0x03, 0x00]), "65,535 bytes are claimed"),
        (bytes([0x06, 0x28]) + b"\xff" * 10 + b"\x01", "more than 64 bits"),
        (bytes([0x04, 0x06, 0x80, 0x80, 0x04, 0x00]), "more than 16 bits"),
        (b"\x5d", "unknown type 13"),
        (bytes([0x5C]) * 100, "nested deeper"),
        (bytes([0x59] + [0x19] * 100), "nested deeper"),
    ],
)
def test_each_error_says_where(data: bytes, match: str) -> None:
    """Sizes are checked before memory is set aside for them, depth before the interpreter's limit."""
    with pytest.raises(ValueError, match=match):
        decode(data, ALL)
