"""Defines the byte layout of a shared structure, and reads it. Pure.

Data path: share -> builder -> segment -> [layout] -> a dataset in any process.

A structure is a tree of *nodes*. A node's header has its kind, the number of entries, and the offsets of its parts; all
offsets are absolute. The segment contains no Python objects, so reading it changes no reference counts and copies no
pages of a forked process. A node takes a few Python objects, whatever its number of entries.

    TEXT, BLOB      str as UTF-8, bytes: all of them end to end, and a table of count + 1 offsets
    NUMBERS         int in the narrowest of 1 to 8 bytes, float in 8, bool in 1
    RECORDS         all other objects: a table of count offsets of records
    SMALL_DICT      the keys, pickled, which are read into a Python dict; a node with the values, in the keys' order
    LARGE_DICT      a node with the keys, a node with the values, and a hash table: bucket b holds the
                    indices ``order[starts[b] : starts[b + 1]]`` of its keys

A record is a pickle (first byte 0x80); or NODE and the offset of another node; or LEAVES, a list of leaves, and a
pickle that has the leaves as out-of-band buffers. A leaf is a range of bytes; or REGION, the mapped segment, of which
arrays and tensors become views; or EXTERNAL, an object that was shared before.
"""

from __future__ import annotations

import math
import mmap
import numbers
import pickle
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from asyncloader.workers.memory.leaves import DTYPES

LARGE = 1024
"""Least entries of a list or dict inside another that becomes a node, and of a dict that gets a hash table."""

TEXT, BLOB, NUMBERS, RECORDS, SMALL_DICT, LARGE_DICT = range(1, 7)
DICTS = (SMALL_DICT, LARGE_DICT)
_KINDS = {TEXT: "str", BLOB: "bytes", RECORDS: "objects"}
NODE, LEAVES = 1, 2  # a pickle begins with 0x80
EXTERNAL, REGION = -1, -2  # used instead of a leaf's offset

HEADER = struct.Struct("=BBB5x6q")
_OFFSET = struct.Struct("=q")
_LEAF = struct.Struct("=qq")
_COUNT = struct.Struct("=i")

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: multiplicative (Fibonacci) hashing
_MASK = (1 << 64) - 1


class ShareHeader(NamedTuple):
    """A node's header; `HEADER` packs it."""

    kind: int
    code: int
    """Format character of the node's table, as in `struct`."""
    is_tuple: int
    size: int
    a: int = 0
    """NUMBERS: the numbers. SMALL_DICT: the record of the keys. LARGE_DICT: the node of the keys. Else the table."""
    b: int = 0
    """Dicts: the node of the values."""
    c: int = 0
    """LARGE_DICT: `starts`."""
    d: int = 0
    """LARGE_DICT: `order`."""
    bits: int = 0
    """LARGE_DICT: the table has ``2**bits`` buckets."""


class Region:
    """A mapped segment, and the objects besides its bytes that a reader needs.

    Args:
        memory: the mapping, from the segment's first byte on.
        externals: objects that records refer to by number: they were already shared when the structure was built.
        wrap: makes the reader's object for a node that lies inside another node.
        owner: kept alive, and not used.
    """

    __slots__ = ("externals", "memory", "owner", "view", "wrap")

    def __init__(
        self, memory: mmap.mmap, externals: tuple[Any, ...], wrap: Callable[[Node], Any], owner: Any = None
    ) -> None:
        self.memory = memory
        self.view = memoryview(memory).toreadonly()
        self.externals = externals
        self.wrap = wrap
        self.owner = owner

    def table(self, offset: int, count: int, code: str) -> memoryview:
        """Return `count` numbers of this format from `offset` on; its items are Python numbers."""
        return self.view[offset : offset + count * struct.calcsize(code)].cast(code)  # type: ignore[call-overload, no-any-return]

    def load(self, offset: int) -> Any:
        """Rebuild the object of the record at `offset`."""
        view = self.view
        tag = view[offset]
        if tag > LEAVES:
            return pickle.loads(view[offset:])  # a pickle marks its own end
        if tag == NODE:
            return self.wrap(open_node(self, *_OFFSET.unpack_from(view, offset + 1)))
        (count,) = _COUNT.unpack_from(view, offset + 1)
        start = offset + 1 + _COUNT.size
        end = start + count * _LEAF.size
        leaves = [self._leaf(*leaf) for leaf in _LEAF.iter_unpack(view[start:end])]
        return pickle.loads(view[end:], buffers=leaves)

    def _leaf(self, offset: int, nbytes: int) -> Any:
        if offset == REGION:
            return self
        return self.externals[nbytes] if offset == EXTERNAL else self.view[offset : offset + nbytes]


class ListNode:
    """A list in a segment. `item(i)` returns entry i, for 0 <= i < `count`, unchecked; `kind` names the entries."""

    __slots__ = ("_table", "_view", "count", "is_tuple", "item", "kind", "offset", "region")

    def __init__(self, region: Region, offset: int, header: ShareHeader) -> None:
        self.region = region
        self.offset = offset
        self.count = header.size
        self.is_tuple = bool(header.is_tuple)
        code = chr(header.code)
        extra = header.kind in (TEXT, BLOB)
        self._table = region.table(header.a, header.size + extra, code)
        self.kind = {"d": "float", "?": "bool"}.get(code, "int") if header.kind == NUMBERS else _KINDS[header.kind]
        self.item: Callable[[int], Any] = _reader(header.kind, region, self._table)

    def numbers(self) -> np.ndarray[Any, Any] | None:
        """Return the entries as a read-only array; None if they are not numbers."""
        return np.asarray(self._table) if self.kind in ("int", "float", "bool") else None


class DictNode:
    """A dict in a segment, in the order of its keys: `key(i)` and `value(i)` for 0 <= i < `count`, unchecked."""

    __slots__ = ("_by_key", "_keys", "_order", "_shift", "_starts", "count", "key", "offset", "region", "value")

    def __init__(self, region: Region, offset: int, header: ShareHeader) -> None:
        self.region = region
        self.offset = offset
        self.count = header.size
        self.value: Callable[[int], Any] = _open_list(region, header.b).item
        self._by_key: dict[Any, int] | None = None
        if header.kind == SMALL_DICT:
            keys: list[Any] = region.load(header.a)
            self.key: Callable[[int], Any] = keys.__getitem__
            self._by_key = {key: index for index, key in enumerate(keys)}
            return
        self.key = _open_list(region, header.a).item
        self._shift = 64 - header.bits
        code = chr(header.code)
        self._starts = region.table(header.c, (1 << header.bits) + 1, code)
        self._order = region.table(header.d, header.size, code)

    def find(self, key: Any) -> int:
        """Return the index of the key; -1 if it is missing.

        Raises:
            TypeError: the key cannot be hashed.
        """
        if self._by_key is not None:
            return self._by_key.get(key, -1)
        try:
            bucket = bucket_of(stable_hash(key), self._shift)
        except UnstableKeyError:
            # A key of such a type is not in the dict: the builder has refused it.
            return -1
        for at in range(self._starts[bucket], self._starts[bucket + 1]):
            # Compared, because a bucket holds keys with different hashes, and different keys may have the same hash.
            index: int = self._order[at]
            if self.key(index) == key:
                return index
        return -1


Node: TypeAlias = ListNode | DictNode


def open_node(region: Region, offset: int) -> Node:
    """Return the node whose header is at `offset`. Reads no entries, except the keys of a small dict."""
    header = ShareHeader(*HEADER.unpack_from(region.view, offset))
    return (DictNode if header.kind in DICTS else ListNode)(region, offset, header)


def _open_list(region: Region, offset: int) -> ListNode:
    node = open_node(region, offset)
    assert isinstance(node, ListNode)
    return node


def _reader(kind: int, region: Region, table: memoryview) -> Callable[[int], Any]:
    """Return a function that reads an entry."""
    # A closure for each kind: a str costs a look-up, a slice and a decode, and no branch.
    memory = region.memory
    if kind == TEXT:
        return lambda i: memory[table[i] : table[i + 1]].decode("utf-8", "surrogatepass")
    if kind == BLOB:
        return lambda i: memory[table[i] : table[i + 1]]
    if kind == NUMBERS:
        return table.__getitem__
    load = region.load
    return lambda i: load(table[i])


# ------------------------------------------------------------------------------------------------ arrays and tensors


def rebuild_array(
    region: Region, offset: int, dtype: str | np.dtype[Any], shape: tuple[int, ...], order: str
) -> np.ndarray[Any, Any]:
    """Return an array as a read-only view of the region; for unpickling."""
    return np.ndarray(shape, dtype, region.view, offset, order="F" if order == "F" else "C")


def rebuild_tensor(region: Region, offset: int, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor as a view of the region; for unpickling."""
    # From the writable mapping: torch has no read-only tensors. A write changes only this process's private pages.
    count = math.prod(shape)
    return torch.frombuffer(region.memory, dtype=DTYPES[code], count=count, offset=offset).view(shape)


def itself(leaf: Any) -> Any:
    """Return an object that was shared before; for unpickling."""
    return leaf


# ------------------------------------------------------------------------------------------------------------ hashing


class UnstableKeyError(TypeError):
    """A key whose hash is not the same in every process."""


def stable_hash(key: Any) -> int:
    """Return a hash below 2**64 that is the same in every process, and for all keys that are equal.

    str and bytes by CRC-32; numbers by Python's own hash, which is not randomized; None; tuples of such keys.

    Raises:
        UnstableKeyError: the key has another type.
        TypeError: the key cannot be hashed at all.
    """
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key)
    # Numbers that are equal have equal hashes, whatever their types: 1, 1.0 and True.
    own = hash(key)
    if type(key) is int or isinstance(key, numbers.Number):
        return own & _MASK
    if key is None:
        return 1
    if isinstance(key, tuple):
        mixed = len(key)
        for part in key:
            mixed = (mixed * 1_000_003 ^ stable_hash(part)) & _MASK
        return mixed
    raise UnstableKeyError(f"{key!r}, of type {type(key).__name__}")


def bucket_of(hashed: int, shift: int) -> int:
    """Return the bucket: the upper ``64 - shift`` bits of the product with 2**64 / golden ratio (Knuth, TAOCP 6.4)."""
    return (hashed * _GOLDEN & _MASK) >> shift
