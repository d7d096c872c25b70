"""Defines the byte layout of a shared structure, and the list and the dict that read it.

Data path: share -> builder -> segment -> [layout] -> a dataset in any process.

A structure is a tree of *nodes*. A node's header has its kind, the number of entries, and the offsets of its parts; all
offsets are absolute. The segment contains no Python objects, so reading it changes no reference counts and copies no
pages of a forked process. A node takes a few Python objects, whatever its number of entries.

    TEXT, BLOB      str as UTF-8, bytes: all of them end to end, and a table of count + 1 offsets
    NUMBERS         int in the narrowest of 1 to 8 bytes, float in 8, bool in 1
    RECORDS         all other objects: a table of count offsets of records
    DICT            a node with the keys, a node with the values, and a hash table: bucket b holds the
                    indices ``order[starts[b] : starts[b + 1]]`` of its keys

A record is a pickle (first byte 0x80); or NODE and the offset of another node; or LEAVES, a list of leaves, and a
pickle that has the leaves as out-of-band buffers. A leaf is a range of bytes, of which an array or tensor becomes a
view.
"""

from __future__ import annotations

import numbers
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch

from asyncloader.shared.segment import SharedSegment, is_spawning
from asyncloader.workers.ipc.leaves import DTYPES

LARGE = 1024
"""Least entries of a list or dict inside another that becomes a node."""

TEXT, BLOB, NUMBERS, RECORDS, DICT = range(1, 6)
_KINDS = {TEXT: "str", BLOB: "bytes", RECORDS: "objects"}
_NUMBER_KINDS = {"d": "float", "?": "bool"}
NODE, LEAVES = 1, 2  # a pickle begins with 0x80

HEADER = struct.Struct("=BBB5x5q")
"""kind, the table's format character, whether it is a tuple, and count; a list has the offset of its table (0, 0, 0), a
dict those of the keys, the values, `starts` and `order`."""
_WIDTHS = {code: struct.calcsize(code) for code in "?bhilIQdq"}
_OFFSET = struct.Struct("=q")
_LEAF = struct.Struct("=qq")
_COUNT = struct.Struct("=i")

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: multiplicative (Fibonacci) hashing
_MASK = (1 << 64) - 1

T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)


def _table(segment: SharedSegment, offset: int, count: int, code: str) -> memoryview:
    """Return `count` numbers of this format from `offset` on; its items are Python numbers."""
    return segment.read_only[offset : offset + count * _WIDTHS[code]].cast(code)  # type: ignore[call-overload, no-any-return]


def _load(segment: SharedSegment, offset: int) -> Any:
    """Rebuild the object of the record at `offset`."""
    view = segment.view
    tag = view[offset]
    if tag > LEAVES:
        return pickle.loads(view[offset:])  # a pickle marks its own end
    if tag == NODE:
        return open_node(segment, *_OFFSET.unpack_from(view, offset + 1))
    (count,) = _COUNT.unpack_from(view, offset + 1)
    start = offset + 1 + _COUNT.size
    end = start + count * _LEAF.size
    # Writable, as torch has no read-only tensors. A write changes only this process's private pages. Buffers that were
    # pickled as read-only, as those of all arrays are, become read-only again.
    leaves = [view[first : first + nbytes] for first, nbytes in _LEAF.iter_unpack(view[start:end])]
    return pickle.loads(view[end:], buffers=leaves)


def open_node(segment: SharedSegment, offset: int) -> SharedList[Any] | SharedDict[Any, Any]:
    """Return the list or dict whose header is at `offset`. Reads no entries."""
    return (SharedDict if segment.view[offset] == DICT else SharedList)(segment, offset)


def _reader(kind: int, segment: SharedSegment, table: memoryview) -> Callable[[int], Any]:
    """Return a function that reads an entry."""
    # A closure for each kind: a str costs a look-up, a slice and a decode, and no branch.
    memory = segment.memory
    if kind == TEXT:
        return lambda i: memory[table[i] : table[i + 1]].decode("utf-8", "surrogatepass")
    if kind == BLOB:
        return lambda i: memory[table[i] : table[i + 1]]
    if kind == NUMBERS:
        return table.__getitem__
    return lambda i: _load(segment, table[i])


class SharedList(Sequence[T_co], Generic[T_co]):
    """A read-only list in shared memory, made by `share`.

    Indexing rebuilds the item: O(1), nothing is cached. A slice is a view and copies nothing. Equal to the list (or
    tuple) that it was made from. Reading from several threads is safe.
    """

    __slots__ = ("__weakref__", "_item", "_kind", "_offset", "_range", "_segment", "_table", "is_tuple")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, segment: SharedSegment, offset: int, indices: range | None = None) -> None:
        kind, code, is_tuple, count, at, *_ = HEADER.unpack_from(segment.view, offset)
        self._segment = segment
        self._offset = offset
        self._range = range(count) if indices is None else indices
        self._table = _table(segment, at, count + (kind in (TEXT, BLOB)), chr(code))
        self._item = _reader(kind, segment, self._table)
        self._kind: int = kind
        self.is_tuple: bool = is_tuple != 0

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[T_co]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return SharedList(self._segment, self._offset, self._range[index])
        try:
            position = self._range[index]
        except IndexError:
            text = f"index {index} is out of range for a SharedList of {len(self):,} items"
            raise IndexError(text) from None
        return self._item(position)

    def __iter__(self) -> Iterator[T_co]:
        return map(self._item, self._range)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SharedList):
            if other.is_tuple != self.is_tuple:
                return False
        elif not isinstance(other, tuple if self.is_tuple else list):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    def __repr__(self) -> str:
        kind = _KINDS.get(self._kind) or _NUMBER_KINDS.get(self._table.format, "int")
        return f"<SharedList: {len(self):,} {kind}>"

    def __copy__(self) -> SharedList[T_co]:
        return self

    def __deepcopy__(self, memo: Any) -> SharedList[T_co]:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the list as an array; of int, float or bool a read-only view, unless `dtype` or `copy` need a copy."""
        if self._kind != NUMBERS:
            return np.array(self.tolist(), dtype)
        start, stop, step = self._range.start, self._range.stop, self._range.step
        view = (
            np.asarray(self._table)[start : stop if stop >= 0 else None : step]
            if self
            else np.empty(0, self._table.format)
        )
        return np.array(view, dtype) if copy else view.astype(dtype or view.dtype, copy=False)

    def __reduce__(self) -> Any:
        if is_spawning():
            return SharedList, (self._segment, self._offset, self._range)
        return (tuple if self.is_tuple else list), (self.tolist(),)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment that contains this list."""
        return self._segment.nbytes

    def tolist(self) -> list[T_co]:
        """Return a plain list of plain items. Arrays and tensors in it are still views of the segment."""
        return list(map(plain, self))


class SharedDict(Mapping[K, V_co], Generic[K, V_co]):
    """A read-only dict in shared memory, made by `share`.

    Looking up a key takes O(1) and rebuilds the value. Iteration order is that of the dict that it was made from, to
    which it is equal. Reading from several threads is safe.
    """

    __slots__ = ("__weakref__", "_keys", "_offset", "_order", "_segment", "_shift", "_starts", "_values")

    def __init__(self, segment: SharedSegment, offset: int) -> None:
        _, _, _, count, keys, values, starts, order = HEADER.unpack_from(segment.view, offset)
        buckets = bucket_count(count)
        self._segment = segment
        self._offset = offset
        self._keys: SharedList[K] = SharedList(segment, keys)
        self._values: SharedList[V_co] = SharedList(segment, values)
        self._shift = hash_shift(buckets)
        self._starts = _table(segment, starts, buckets + 1, "I")
        self._order = _table(segment, order, count, "I")

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: K) -> V_co:
        try:
            bucket = bucket_of(stable_hash(key), self._shift)
        except UnstableKeyError:
            # A key of such a type is not in the dict: the builder has refused it.
            raise KeyError(key) from None
        for at in range(self._starts[bucket], self._starts[bucket + 1]):
            # Compared, because a bucket holds keys with different hashes, and different keys may have the same hash.
            index: int = self._order[at]
            if self._keys._item(index) == key:
                value: V_co = self._values._item(index)
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __repr__(self) -> str:
        return f"<SharedDict: {len(self):,} keys>"

    def __copy__(self) -> SharedDict[K, V_co]:
        return self

    def __deepcopy__(self, memo: Any) -> SharedDict[K, V_co]:
        return self

    def __reduce__(self) -> Any:
        if is_spawning():
            return SharedDict, (self._segment, self._offset)
        return dict, (self.todict(),)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment that contains this dict."""
        return self._segment.nbytes

    def todict(self) -> dict[K, V_co]:
        """Return a plain dict of plain values. Arrays and tensors in it are still views of the segment."""
        return dict(zip(self._keys, map(plain, self._values), strict=True))


def plain(value: Any) -> Any:
    """Return a shared list, tuple or dict as a plain copy, and any other value as it is."""
    if isinstance(value, SharedList):
        return tuple(value.tolist()) if value.is_tuple else value.tolist()
    return value.todict() if isinstance(value, SharedDict) else value


# ------------------------------------------------------------------------------------------------ arrays and tensors


def rebuild_array(buffer: memoryview, dtype: str | np.dtype[Any], shape: tuple[int, ...], order: Any) -> Any:
    """Return an array as a view of a leaf; for unpickling."""
    return np.ndarray(shape, dtype, buffer, order=order)


def rebuild_tensor(buffer: memoryview, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor as a view of a leaf; for unpickling."""
    return torch.frombuffer(buffer, dtype=DTYPES[code]).view(shape)


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


def bucket_count(size: int) -> int:
    """Return the number of buckets of a dict: a power of two."""
    return 1 << max(1, size - 1).bit_length()


def hash_shift(buckets: int) -> int:
    """Return the bits of a hash that do not choose one of these buckets."""
    return 65 - buckets.bit_length()


def bucket_of(hashed: int, shift: int) -> int:
    """Return the bucket: the upper ``64 - shift`` bits of the product with 2**64 / golden ratio (Knuth, TAOCP 6.4)."""
    return (hashed * _GOLDEN & _MASK) >> shift
