"""Writes lists and dicts, with the arrays and tensors in them, to a segment in the layout of `layout.py`.

Data path: share -> [builder] -> segment -> layout -> a dataset in any process.

The structure is written once, in one pass. Besides the structure itself, memory is only needed for the growing segment,
one table of offsets and one pickled item at a time.
"""

from __future__ import annotations

import array
import io
import itertools
import pickle
from collections.abc import Sequence
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch

from asyncloader.shared.layout import (
    BLOB,
    DICT,
    HEADER,
    LARGE,
    LEAVES,
    NODE,
    NUMBERS,
    RECORDS,
    TEXT,
    UnstableKeyError,
    bucket_count,
    bucket_of,
    hash_shift,
    plain,
    rebuild_array,
    rebuild_tensor,
    stable_hash,
)
from asyncloader.shared.segment import SegmentWriter
from asyncloader.workers.fetch.error_notes import add_note
from asyncloader.workers.ipc.leaves import DTYPE_CODE, reduce_sparse
from asyncloader.workers.notebook_pickling import in_session

_JOINED = 64  # str or bytes that are written at a time
_ALIGN = 16  # the widest element
_WIDE, _WIDE_ALIGN = 1 << 12, 64  # larger leaves are aligned to cache lines
_DEEPEST = 4
"""Small containers around a large one that become nodes, at most."""

Array: TypeAlias = np.ndarray[Any, Any]


class Builder:
    """Writes one structure: call `build` once.

    Args:
        writer: receives the bytes.
    """

    def __init__(self, writer: SegmentWriter) -> None:
        self.session_objects: list[Any] = []
        """Functions and classes of a `__main__` that workers cannot import: a worker gets them before the items."""
        self._writer = writer
        self._nodes: dict[int, int] = {}  # by the container's id, its offset; -1 while it is written
        self._stream = io.BytesIO()
        self._leaves: list[tuple[int, int]] = []
        self._pickler = _ItemPickler(self._stream, self._on_buffer, self.session_objects)

    def build(self, value: Any) -> int:
        """Write a list, tuple or dict with all its contents. Returns the offset of its header.

        Raises:
            ValueError: the structure contains itself.
            TypeError: a dict that becomes a node has keys without a stable hash.
            Exception: pickling an item failed; a note says which item.
        """
        try:
            return self._node(value)
        finally:
            # Breaks the reference cycle with this object, and drops the last item.
            del self._pickler

    def _node(self, value: Any) -> int:
        offset = self._nodes.get(id(value), 0)
        if offset < 0:
            raise ValueError("share() got a list or dict that contains itself: take it out of itself first")
        if not offset:
            self._nodes[id(value)] = -1
            offset = self._dict(value) if isinstance(value, dict) else self._list(value, isinstance(value, tuple))
            # By id: the value lives until the end of `build`, so no other object gets its id.
            self._nodes[id(value)] = offset
        return offset

    def _header(self, kind: int, code: int, is_tuple: bool, size: int, *offsets: int) -> int:
        return self._writer.write(HEADER.pack(kind, code, is_tuple, size, *offsets, *[0] * (4 - len(offsets))), 8)

    # ------------------------------------------------------------------------------------------------ lists

    def _list(
        self, items: Sequence[Any], is_tuple: bool, keys: Sequence[Any] | None = None, *, plain_items: bool = False
    ) -> int:
        types = set(map(type, items))
        if types and types <= {str, np.str_}:
            return self._blobs(TEXT, items, is_tuple)
        if types == {bytes}:
            return self._blobs(BLOB, items, is_tuple)
        if types in ({int}, {float}, {bool}):
            numbers = _numbers(items, types.pop())
            if numbers is not None:
                offset = self._writer.write(numbers, numbers.itemsize)
                return self._header(NUMBERS, ord(numbers.dtype.char), is_tuple, len(numbers), offset)
        # The rows of a large list stay plain, but for those that are large themselves.
        depth = -1 if plain_items else 0 if len(items) >= LARGE else _DEEPEST
        return self._records(items, is_tuple, keys, depth)

    def _blobs(self, kind: int, items: Sequence[Any], is_tuple: bool) -> int:
        """Write some str or bytes end to end."""
        ends = array.array("Q", [self._writer.write(b"")])
        for first in range(0, len(items), _JOINED):
            part = items[first : first + _JOINED]
            if kind == TEXT:
                part = [item.encode("utf-8", "surrogatepass") for item in part]
            self._writer.write(b"".join(part))
            ends.extend(map(len, part))
        return self._with_table(kind, is_tuple, len(items), np.cumsum(ends, dtype=np.uint64))

    def _records(self, items: Sequence[Any], is_tuple: bool, keys: Sequence[Any] | None, depth: int) -> int:
        offsets = array.array("Q")
        for index, item in enumerate(items):
            try:
                offsets.append(self._record(plain(item), depth))
            except Exception as error:
                add_note(error, f"while sharing item {index if keys is None else keys[index]!r}")
                raise
        return self._with_table(RECORDS, is_tuple, len(items), np.array(offsets, np.uint64))

    def _with_table(self, kind: int, is_tuple: bool, size: int, table: Array) -> int:
        """Write the table, its offsets in four bytes each if they fit, and the header."""
        if not size or int(table.max()) < 1 << 32:
            table = table.astype(np.uint32)
        code = ord("I" if table.itemsize == 4 else "Q")
        return self._header(kind, code, is_tuple, size, self._writer.write(table, table.itemsize))

    # ------------------------------------------------------------------------------------------------ dicts

    def _dict(self, value: dict[Any, Any]) -> int:
        keys = list(value)
        starts, order = self._hash_table(keys)
        names = self._list(keys, is_tuple=False, plain_items=True)
        values = self._list(list(value.values()), is_tuple=False, keys=keys)
        return self._header(DICT, 0, False, len(keys), names, values, starts, order)

    def _hash_table(self, keys: list[Any]) -> tuple[int, int]:
        number = bucket_count(len(keys))
        shift = hash_shift(number)
        try:
            buckets = np.fromiter((bucket_of(stable_hash(key), shift) for key in keys), np.int64, len(keys))
        except UnstableKeyError as error:
            raise TypeError(
                f"share() got a dict of {len(keys):,} entries with the key {error}. Its keys must hash alike in every "
                "process: str, bytes, numbers, None, or tuples of these"
            ) from None
        starts = np.zeros(number + 1, np.uint32)
        starts[1:] = np.cumsum(np.bincount(buckets, minlength=number))
        first = self._writer.write(starts, 8)
        # Released before the second table is computed: both are large for a dict of many entries.
        del starts
        order = np.argsort(buckets, kind="stable").astype(np.uint32)
        return first, self._writer.write(order, 8)

    # ------------------------------------------------------------------------------------------------ records

    def _record(self, item: Any, depth: int) -> int:
        if _is_large(item, depth):
            return self._writer.write(bytes([NODE]) + self._node(item).to_bytes(8, "little"))
        self._stream.seek(0)
        self._stream.truncate()
        # Each record is unpickled alone, so it must not refer to objects that an earlier record contains.
        self._pickler.clear_memo()
        self._leaves.clear()
        self._pickler.dump(item)
        if not self._leaves:
            return self._writer.write(self._stream.getbuffer())
        offsets = itertools.chain.from_iterable(self._leaves)
        head = array.array("q", offsets).tobytes()
        count = len(self._leaves).to_bytes(4, "little")
        return self._writer.write(b"".join((bytes([LEAVES]), count, head, self._stream.getbuffer())))

    def _on_buffer(self, buffer: pickle.PickleBuffer) -> None:
        view = buffer.raw()
        offset = self._writer.write(view, _WIDE_ALIGN if view.nbytes >= _WIDE else _ALIGN)
        self._leaves.append((offset, view.nbytes))


class _ItemPickler(pickle.Pickler):
    """Pickles arrays and tensors as leaves, and notes the functions and classes that a notebook's program defines."""

    def __init__(self, stream: io.BytesIO, on_buffer: Any, session_objects: list[Any]) -> None:
        super().__init__(stream, 5, buffer_callback=on_buffer)
        self._session_objects = session_objects
        self._in_session = in_session()

    def reducer_override(self, obj: Any) -> Any:
        """Return the parts that stand for an object; `NotImplemented`: pickle's own."""
        kind = type(obj)
        if kind is np.ndarray:
            return _reduce_array(obj)
        if kind is torch.Tensor:
            return _reduce_tensor(obj)
        defined = self._in_session and isinstance(obj, type | FunctionType) and obj.__module__ == "__main__"
        if defined and obj not in self._session_objects:
            self._session_objects.append(obj)
        return NotImplemented


def _reduce_array(value: Array) -> Any:
    if value.dtype.hasobject or not value.nbytes:
        return value.__reduce_ex__(4)
    # As it lies in memory, if it is contiguous with the first index the fastest.
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    flat = np.ascontiguousarray(value.T if order == "F" else value).reshape(-1).view(np.uint8)
    flat.flags.writeable = False  # it is read-only where it is read, too
    dtype = value.dtype if value.dtype != np.dtype(value.dtype.str) else value.dtype.str
    return rebuild_array, (pickle.PickleBuffer(flat.data), dtype, value.shape, order)


def _reduce_tensor(value: torch.Tensor) -> Any:
    if value.device.type != "cpu":
        raise TypeError(f"share() got a tensor on {value.device}: call cpu() on it first")
    dense = value.layout is torch.strided and value.dtype in DTYPE_CODE and not value.is_nested
    if value.layout is not torch.strided and not value.requires_grad:
        return reduce_sparse(value)  # torch's own keeps each tensor that it rebuilds, to check it
    if not dense or value.requires_grad or value.__dict__ or not value.numel():
        return value.__reduce_ex__(5)
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return rebuild_tensor, (pickle.PickleBuffer(flat.data), DTYPE_CODE[value.dtype], tuple(value.shape))


def _is_large(value: Any, depth: int) -> bool:
    """Whether a list, tuple or dict has `LARGE` entries, or contains one that has, below `depth` others at most.

    Nothing is large below 0.
    """
    if depth < 0 or (not isinstance(value, list | dict) and type(value) is not tuple):  # a named tuple is a value
        return False
    if len(value) >= LARGE:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return depth > 0 and any(_is_large(plain(part), depth - 1) for part in parts)


def _numbers(items: Sequence[Any], kind: type) -> Array | None:
    """Return the numbers as an array, int in the narrowest type; None if a number needs more than 8 bytes."""
    if kind is not int:
        return np.fromiter(items, np.float64 if kind is float else np.bool_, len(items))
    try:
        wide = np.fromiter(items, np.int64, len(items))
    except OverflowError:
        return None
    low, high = int(wide.min()), int(wide.max())
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return wide.astype(dtype)
    return wide
