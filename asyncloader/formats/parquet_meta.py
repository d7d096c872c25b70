"""A Parquet file's footer: where its row groups are, checked before anything is read by it. Sans I/O.

Data path: [footer] -> ranges to read -> columns -> samples.

    PAR1    row groups: column chunks, each in pages    metadata (Thrift)    its length: u4    PAR1

Source: the Parquet format's `README.md` and `parquet.thrift`. The metadata comes over the network and is believed in
nothing: the schema must be a tree, each chunk must belong to its leaf and lie in the file, each count must be possible.
pyarrow then gets what was checked, written anew, and no statistics, indexes, bloom filters or metadata of the user's:
pyarrow 26 ends the process at some contradictions in them, and rows are read without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncloader.formats.base import ShardError
from asyncloader.formats.parquet_arrow import pyarrow
from asyncloader.formats.thrift import BINARY, BOOL, I8, I32, I64, ListOf, Struct, decode, encode

__all__ = ["MAX_FOOTER_BYTES", "TAIL_BYTES", "Footer", "RowGroup", "footer_size", "parse_footer"]

TAIL_BYTES = 1 << 16
"""What is worth reading of a file's end at once: most footers are smaller."""

MAX_FOOTER_BYTES = 64 << 20
"""Larger metadata is refused; it takes several times its size once parsed."""

MAGIC = b"PAR1"
ENCRYPTED = b"PARE"
LEAST = 12  # the magic twice and the length

DEEPEST = 100
WIDEST = 16 << 20
"""Bytes of a value of fixed length, at most."""

FIXED_LENGTH = 7  # the last one of the physical types
CODECS = range(8)

# parquet.thrift, by field numbers: what is read and written again.
_EMPTY = Struct({})
_TIME = Struct({1: BOOL, 2: Struct({1: _EMPTY, 2: _EMPTY, 3: _EMPTY})})
_LOGICAL = Struct(
    {
        **dict.fromkeys((1, 2, 3, 4, 6, 11, 12, 13, 14, 15), _EMPTY),  # string, map, list, enum, date, null, ..., half
        5: Struct({1: I32, 2: I32}),  # decimal: scale, precision
        7: _TIME,
        8: _TIME,
        10: Struct({1: I8, 2: BOOL}),  # integer: bits, signed
    }
)
_TYPE, _LENGTH, _REPETITION, _NAME, _CHILDREN, _CONVERTED = range(1, 7)
_ELEMENT = Struct(
    {
        _TYPE: I32,
        _LENGTH: I32,
        _REPETITION: I32,
        _NAME: BINARY,
        _CHILDREN: I32,
        _CONVERTED: I32,
        7: I32,  # scale
        8: I32,  # precision
        10: _LOGICAL,
    }
)
_PATH, _CODEC, _VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA, _DICTIONARY = 3, 4, 5, 6, 7, 9, 11
_COLUMN = Struct(
    {
        _TYPE: I32,
        2: ListOf(I32),  # encodings
        _PATH: ListOf(BINARY),
        _CODEC: I32,
        _VALUES: I64,
        _UNCOMPRESSED: I64,
        _COMPRESSED: I64,
        _DATA: I64,
        _DICTIONARY: I64,
    }
)
_FILE_PATH, _OFFSET, _META, _CRYPTO = 1, 2, 3, 8
_CHUNK = Struct({_FILE_PATH: BINARY, _OFFSET: I64, _META: _COLUMN, _CRYPTO: _EMPTY})
_COLUMNS, _BYTES, _GROUP_ROWS = 1, 2, 3
_GROUP = Struct({_COLUMNS: ListOf(_CHUNK), _BYTES: I64, _GROUP_ROWS: I64})
_SCHEMA, _ROWS, _GROUPS, _PAIRS, _ENCRYPTION = 2, 3, 4, 5, 8
_FILE = Struct(
    {
        1: I32,  # version
        _SCHEMA: ListOf(_ELEMENT),
        _ROWS: I64,
        _GROUPS: ListOf(_GROUP),
        _PAIRS: ListOf(Struct({1: BINARY, 2: BINARY})),
        6: BINARY,  # created by
        _ENCRYPTION: _EMPTY,
    }
)
ARROW_SCHEMA = b"ARROW:schema"
"""The one pair of the user's metadata that matters: the types that Parquet has no words for."""


class Leaf(NamedTuple):
    """A column of the file: its path, the outermost name first, and its physical type."""

    path: tuple[str, ...]
    type: int


class RowGroup(NamedTuple):
    """The part of a row group that is read.

    Attributes:
        number: which.
        first: number of its first row in the file.
        rows: how many.
        chunks: ``(start, length)`` in bytes of each column chunk, ascending.
        uncompressed: bytes of them when decompressed, as the file says.
    """

    number: int
    first: int
    rows: int
    chunks: tuple[tuple[int, int], ...]
    uncompressed: int


@dataclass(frozen=True, slots=True)
class Footer:
    """What is known of a file.

    Attributes:
        url: the file's.
        size: its bytes.
        end: offset of the metadata; everything else lies before it.
        metadata: pyarrow's.
        edges: the number of each row group's first row and, last, of all rows; ascending.
        names: of the columns, nested ones by their outermost name.
        leaves: of the schema.
        groups: of the metadata, as Thrift has them.
    """

    url: str
    size: int
    end: int
    metadata: Any
    edges: tuple[int, ...]
    names: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    groups: list[dict[int, Any]]

    @property
    def rows(self) -> int:
        """Rows in the file."""
        return self.edges[-1]

    def group(self, number: int, columns: frozenset[str] | None = None) -> RowGroup:
        """Give the ranges of a row group. `columns`: of these only.

        Raises:
            ShardError: a range does not lie in the file, or a number is impossible.
        """
        chunks: list[tuple[int, int]] = []
        uncompressed = 0
        for leaf, chunk in zip(self.leaves, self.groups[number][_COLUMNS], strict=True):
            if columns is None or leaf.path[0] in columns:
                meta = chunk[_META]
                start, length = meta[_DATA], meta[_COMPRESSED]
                if 0 < meta.get(_DICTIONARY, 0) < start:
                    start = meta[_DICTIONARY]
                if start < len(MAGIC) or length < 0 or start + length > self.end:
                    raise self.error(
                        f"column {'.'.join(leaf.path)[:80]!r} of row group {number} claims {length:,} bytes at byte "
                        f"{start:,}, which do not lie in the file"
                    )
                uncompressed += meta[_UNCOMPRESSED]
                chunks.append((start, length))
        first, after = self.edges[number : number + 2]
        return RowGroup(number, first, after - first, tuple(sorted(chunks)), uncompressed)

    def error(self, message: str) -> ShardError:
        """Make an error about the metadata."""
        return ShardError(message, url=self.url, offset=self.end)


def footer_size(tail: bytes, size: int, url: str) -> int:
    """The bytes at the end of a file that `parse_footer` wants, from its last bytes.

    Args:
        tail: the last 8 bytes or more; the whole file, if it is shorter.
        size: of the file.
        url: of the file, for errors.

    Raises:
        ShardError: it is no Parquet file, is encrypted, or claims a footer that is larger than itself or allowed.
    """
    if size < LEAST or len(tail) < 8:
        raise ShardError(f"no Parquet file: it has {size:,} bytes", url=url, offset=0)
    magic = tail[-4:]
    if magic == ENCRYPTED:
        raise ShardError("an encrypted Parquet file, which cannot be read", url=url, offset=size - 4)
    if magic != MAGIC:
        raise ShardError("no Parquet file, or a truncated one: it does not end with PAR1", url=url, offset=size - 4)
    length = int.from_bytes(tail[-8:-4], "little")
    if length > size - LEAST:
        raise ShardError(f"the footer claims {length:,} bytes, and there are {size:,}", url=url, offset=size - 8)
    if length > MAX_FOOTER_BYTES:
        raise ShardError(f"the footer has {length:,} bytes; {MAX_FOOTER_BYTES:,} are allowed", url=url, offset=size - 8)
    return length + 8


def parse_footer(data: bytes, size: int, url: str) -> Footer:
    """Parse and check the metadata. Takes CPU time, about 50 microseconds a column chunk: call it in a thread.

    Args:
        data: the last `footer_size` bytes of the file.
        size: of the file.
        url: of the file.

    Raises:
        ShardError: the metadata is damaged or impossible.
        ImportError: pyarrow is not installed.
    """
    arrow, parquet = pyarrow()
    end = size - len(data)
    try:
        values = decode(data[:-8], _FILE)
        leaves = _check(values)
        clean = encode(values, _FILE)
        footer = MAGIC + clean + len(clean).to_bytes(4, "little") + MAGIC
        metadata = parquet.read_metadata(arrow.BufferReader(footer))
        names = tuple(metadata.schema.to_arrow_schema().names)
        _expect(len(set(names)) == len(names), "two columns have the same name")
    except (arrow.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        text = str(error)[:300] or type(error).__name__
        raise ShardError(f"the Parquet footer is damaged: {text}", url=url, offset=end) from error
    edges = [0]
    for group in values[_GROUPS]:
        edges.append(edges[-1] + group[_GROUP_ROWS])
    return Footer(url, size, end, metadata, tuple(edges), names, leaves, values[_GROUPS])


def _check(values: dict[int, Any]) -> tuple[Leaf, ...]:
    """Check the metadata, and drop what pyarrow shall not see. Raises ValueError; KeyError for what is missing."""
    _expect(_ENCRYPTION not in values, "the file is encrypted")
    leaves = tuple(_leaves(values[_SCHEMA]))
    total = 0
    for number, group in enumerate(values[_GROUPS]):
        rows, chunks = group[_GROUP_ROWS], group[_COLUMNS]
        _expect(rows >= 0, f"row group {number} claims {rows} rows")
        _expect(len(chunks) == len(leaves), f"row group {number} has {len(chunks)} columns, the schema {len(leaves)}")
        total += rows
        for leaf, chunk in zip(leaves, chunks, strict=True):
            where = f"column {'.'.join(leaf.path)[:80]!r} of row group {number}"
            _expect(not chunk.pop(_FILE_PATH, b""), f"{where} lies in another file")
            _expect(_CRYPTO not in chunk, f"{where} is encrypted")
            chunk[_OFFSET] = 0  # deprecated, and required
            meta = chunk[_META]
            _expect(tuple(part.decode() for part in meta[_PATH]) == leaf.path, f"{where} has another path")
            _expect(meta[_TYPE] == leaf.type, f"{where} has another type than the schema")
            _expect(meta[_CODEC] in CODECS, f"{where} has the unknown compression {meta[_CODEC]}")
            _expect(meta[_UNCOMPRESSED] >= 0 and meta[_VALUES] >= 0, f"{where} claims a negative size")
            _expect(_DATA in meta and _COMPRESSED in meta, f"{where} lacks its place")
    _expect(total == values[_ROWS], f"the file claims {values[_ROWS]:,} rows, its row groups {total:,}")
    values[_PAIRS] = [pair for pair in values.get(_PAIRS, ()) if pair.get(1) == ARROW_SCHEMA and 2 in pair][:1]
    return leaves


def _leaves(schema: list[dict[int, Any]]) -> list[Leaf]:
    """The leaves of the schema, which must be a tree, in its order: a group comes before what is in it."""
    _expect(len(schema) > 0, "there is no schema")
    leaves: list[Leaf] = []
    path: list[str] = []
    left = [schema[0].get(_CHILDREN, 0)]  # elements that are still to come in each open group
    schema[0].get(_NAME, b"").decode()
    for element in schema[1:]:
        _expect(left[-1] > 0, "the schema has elements that belong to no group")
        left[-1] -= 1
        name = element[_NAME].decode()
        children = element.get(_CHILDREN, 0)
        _expect(element.get(_REPETITION) in (0, 1, 2), f"column {name[:80]!r} lacks its repetition")
        if children > 0:
            _expect(len(left) < DEEPEST, f"the schema is nested deeper than {DEEPEST}")
            element.pop(_TYPE, None)
            left.append(children)
            path.append(name)
        else:
            kind = element.get(_TYPE, -1)
            _expect(children == 0 and 0 <= kind <= FIXED_LENGTH, f"column {name[:80]!r} has no type")
            length = element.get(_LENGTH, 0)
            _expect(
                kind != FIXED_LENGTH or 0 < length <= WIDEST, f"column {name[:80]!r} has values of {length:,} bytes"
            )
            leaves.append(Leaf((*path, name), kind))
        while len(left) > 1 and left[-1] == 0:
            left.pop()
            path.pop()
    _expect(left == [0], "the schema has fewer elements than its groups claim")
    return leaves


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
