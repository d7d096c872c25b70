"""Thrift's compact protocol: structs whose wanted fields are known, read from hostile bytes and written again. Pure.

Data path: bytes of a Parquet footer -> [fields by number] -> `parquet_meta`.

What is not wanted is skipped, so what is written again holds nothing that was not looked at. Source: the Thrift
repository's `doc/specs/thrift-compact-protocol.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = [
    "BINARY",
    "BOOL",
    "I8",
    "I16",
    "I32",
    "I64",
    "Kind",
    "ListOf",
    "Struct",
    "Truncated",
    "decode",
    "decode_at",
    "encode",
]

BOOL: Final = 1  # false is 2
I8: Final = 3
I16: Final = 4
I32: Final = 5
I64: Final = 6
DOUBLE: Final = 7
BINARY: Final = 8
LIST: Final = 9
SET: Final = 10
MAP: Final = 11
STRUCT: Final = 12

BITS = {I8: 8, I16: 16, I32: 32, I64: 64}

DEEPEST = 32


class ListOf(NamedTuple):
    """A list of one kind."""

    item: Kind


class Struct(NamedTuple):
    """A struct: the kinds of the wanted fields, by number."""

    fields: Mapping[int, Kind]


Kind: TypeAlias = int | ListOf | Struct
"""`BOOL`, `I8` to `I64`, `BINARY`, a list or a struct. Values: bool, int, bytes, list, and dict by field number."""


class Truncated(ValueError):
    """The bytes end before the struct does."""


def decode(data: bytes, wanted: Struct) -> dict[int, Any]:
    """Read the struct at the beginning of `data`.

    Raises:
        ValueError: it is truncated, nested too deeply, or a wanted field is of another kind than it should be.
    """
    return decode_at(data, wanted, 0)[0]


def decode_at(data: bytes, wanted: Struct, at: int) -> tuple[dict[int, Any], int]:
    """Read the struct that begins at byte `at`, and give the place after it too. Errors as `decode`.

    Raises:
        Truncated: with more bytes behind these it might be a struct.
    """
    decoder = _Decoder(data, at)
    return decoder.struct(wanted, 0), decoder.at


def encode(values: Mapping[int, Any], kinds: Struct) -> bytes:
    """Write a struct as `decode` gives it."""
    out = bytearray()
    _write_struct(out, values, kinds)
    return bytes(out)


class _Decoder:
    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def struct(self, wanted: Struct, depth: int) -> dict[int, Any]:
        found: dict[int, Any] = {}
        fields = wanted.fields
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer(I16)
            kind = fields.get(number)
            if kind is None:
                self._skip(head & 15, depth + 1)
            else:
                found[number] = self._value(head & 15, kind, depth + 1)
        return found

    def _value(self, wire: int, kind: Kind, depth: int, *, item: bool = False) -> Any:
        """A value of the kind that is wanted. A bool is its own type in a field, and a byte as an `item`."""
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST}")
        if isinstance(kind, Struct):
            self._expect(wire, STRUCT)
            return self.struct(kind, depth)
        if isinstance(kind, ListOf):
            self._expect(wire, LIST)
            size, of = self._list_head()
            return [self._value(of, kind.item, depth + 1, item=True) for _ in range(size)]
        if kind == BOOL:
            if wire not in (1, 2):
                self._expect(wire, BOOL)
            return self._byte() == 1 if item else wire == 1
        self._expect(wire, kind)
        return self._bytes(self._varint()) if kind == BINARY else self._integer(kind)

    def _expect(self, wire: int, kind: int) -> None:
        if wire != kind:
            raise ValueError(f"a value of type {wire} before byte {self.at:,}, where type {kind} belongs")

    def _skip(self, wire: int, depth: int, *, item: bool = False) -> None:
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST}")
        if wire in (1, 2):
            if item:
                self._byte()
        elif wire == I8:
            self._byte()
        elif wire in (I16, I32, I64):
            self._varint()
        elif wire == DOUBLE:
            self._bytes(8)
        elif wire == BINARY:
            self._bytes(self._varint())
        elif wire in (LIST, SET):
            size, of = self._list_head()
            for _ in range(size):
                self._skip(of, depth + 1, item=True)
        elif wire == MAP:
            size = self._varint()
            self._check_count(size)
            kinds = self._byte() if size else 0
            for _ in range(size):
                self._skip(kinds >> 4, depth + 1, item=True)
                self._skip(kinds & 15, depth + 1, item=True)
        elif wire == STRUCT:
            while head := self._byte():
                if not head >> 4:
                    self._varint()
                self._skip(head & 15, depth + 1)
        else:
            raise ValueError(f"a value of the unknown type {wire} before byte {self.at:,}")

    def _list_head(self) -> tuple[int, int]:
        head = self._byte()
        size = head >> 4
        if size == 15:
            size = self._varint()
        self._check_count(size)
        return size, head & 15

    def _check_count(self, size: int) -> None:
        """Each item takes a byte at least."""
        if size > len(self._data) - self.at:
            raise Truncated(f"a list of {size:,} items at byte {self.at:,}, where {len(self._data):,} bytes end")

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise Truncated(f"truncated at byte {self.at:,}")
        self.at += 1
        return self._data[self.at - 1]

    def _bytes(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise Truncated(f"{size:,} bytes are claimed at byte {self.at:,}, where {len(self._data):,} bytes end")
        self.at += size
        return self._data[self.at - size : self.at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError(f"a number of more than 64 bits before byte {self.at:,}")

    def _integer(self, kind: int) -> int:
        if kind == I8:
            byte = self._byte()
            return byte - 256 if byte > 127 else byte
        value = self._varint()
        value = (value >> 1) ^ -(value & 1)
        if not -(1 << BITS[kind] - 1) <= value < 1 << BITS[kind] - 1:
            raise ValueError(f"the number {value:,} before byte {self.at:,} has more than {BITS[kind]} bits")
        return value


def _write_struct(out: bytearray, values: Mapping[int, Any], kinds: Struct) -> None:
    last = 0
    for number in sorted(values):
        kind, value = kinds.fields[number], values[number]
        wire = _wire(kind)
        if kind == BOOL and not value:
            wire = 2
        if 0 < number - last < 16:
            out.append((number - last) << 4 | wire)
        else:
            out.append(wire)
            _write_varint(out, _zigzag(number))
        last = number
        if kind != BOOL:
            _write_value(out, value, kind)
    out.append(0)


def _write_value(out: bytearray, value: Any, kind: Kind) -> None:
    if isinstance(kind, Struct):
        _write_struct(out, value, kind)
    elif isinstance(kind, ListOf):
        if len(value) < 15:
            out.append(len(value) << 4 | _wire(kind.item))
        else:
            out.append(0xF0 | _wire(kind.item))
            _write_varint(out, len(value))
        for item in value:
            _write_value(out, item, kind.item)
    elif kind == BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind == BOOL:
        out.append(1 if value else 2)
    elif kind == I8:
        out.append(value & 255)
    else:
        _write_varint(out, _zigzag(value))


def _wire(kind: Kind) -> int:
    if isinstance(kind, Struct):
        return STRUCT
    return LIST if isinstance(kind, ListOf) else kind


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _write_varint(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
