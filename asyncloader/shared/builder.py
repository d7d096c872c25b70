"""Writes lists, dicts, arrays and tensors to a segment in the layout of `layout.py`. Pure.

Data path: share -> [builder] -> segment -> layout -> a dataset in any process.

The structure is written once, in one pass. Besides the structure itself, memory is only needed for the growing segment,
one table of offsets and one pickled item at a time.
"""

from __future__ import annotations

import array
import copyreg
import functools
import io
import itertools
import pickle
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from asyncloader.shared.layout import (
    BLOB,
    EXTERNAL,
    HEADER,
    LARGE,
    LARGE_DICT,
    LEAVES,
    NODE,
    NUMBERS,
    RECORDS,
    REGION,
    SMALL_DICT,
    TEXT,
    ShareHeader,
    UnstableKeyError,
    bucket_of,
    itself,
    rebuild_array,
    rebuild_tensor,
    stable_hash,
)
from asyncloader.workers.fetch.error_notes import add_note
from asyncloader.workers.memory.leaves import DTYPE_CODE, reduce_quantized, reduce_sparse

_CHUNK = 1 << 14  # entries encoded at a time
_JOINED = 1 << 22  # most bytes (characters) that are joined before they are written
_ALIGN = 16  # the widest element
_WIDE, _WIDE_ALIGN = 1 << 12, 64  # larger leaves are aligned to cache lines

Array: TypeAlias = np.ndarray[Any, Any]


class Sink(Protocol):
    """Receives the bytes, in order of their offsets."""

    def write(self, data: Any, align: int = 1) -> int:
        """Append the bytes of any contiguous buffer at the next multiple of `align`. Returns their offset."""
        ...


class _SessionPickler(pickle.Pickler):
    """Notes each function and class of `__main__` that it meets."""

    def __init__(self, noted: list[Any], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._noted = noted
        self._seen: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__" and id(obj) not in self._seen:
            self._seen.add(id(obj))
            self._noted.append(obj)
        return NotImplemented


class Builder:
    """Writes one structure to one sink: call `build` once.

    Args:
        sink: receives the bytes.
        shared: types of objects that are already shared. They are not written, but collected in `externals`.
        large: least number of entries of a large list or dict.
        session: workers cannot import `__main__`. Its functions and classes that the items use are collected in
            `externals`, too, so that a worker gets them before the items.
    """

    def __init__(self, sink: Sink, shared: tuple[type, ...] = (), large: int = LARGE, *, session: bool = False) -> None:
        self.externals: list[Any] = []
        self._sink = sink
        self._nodes: dict[int, int] = {}
        self._open: set[int] = set()
        self._stream = io.BytesIO()
        self._leaves: list[tuple[int, int]] = []
        self._shared = shared
        self._large = large
        self._region = pickle.PickleBuffer(bytearray())
        self._placeholders: dict[int, tuple[pickle.PickleBuffer, int]] = {}
        pickler = functools.partial(_SessionPickler, self.externals) if session else pickle.Pickler
        self._pickler = pickler(self._stream, protocol=5, buffer_callback=self._on_buffer)
        self._pickler.dispatch_table = {
            **copyreg.dispatch_table,
            np.ndarray: self._reduce_array,
            torch.Tensor: self._reduce_tensor,
            **dict.fromkeys(shared, self._reduce_shared),
        }

    def build(self, value: Any) -> int:
        """Write a list, tuple or dict with all its contents. Returns the offset of its header.

        Raises:
            ValueError: the structure contains itself.
            TypeError: a large dict in it has keys without a stable hash.
            Exception: pickling an item failed; a note says which item.
        """
        try:
            return self._node(value)
        finally:
            # Breaks the reference cycle with this object, and drops the last item.
            del self._pickler

    def _node(self, value: Any) -> int:
        known = self._nodes.get(id(value))
        if known is not None:
            return known
        # Its node is not complete: a structure that contains itself would be written without end.
        if id(value) in self._open:
            raise ValueError("share() got a list or dict that contains itself: take it out of itself first")
        self._open.add(id(value))
        offset = self._dict(value) if isinstance(value, dict) else self._list(value, isinstance(value, tuple))
        self._open.remove(id(value))
        # By id: the value lives until the end of `build`, so no other object gets its id.
        self._nodes[id(value)] = offset
        return offset

    def _header(self, header: ShareHeader) -> int:
        return self._sink.write(HEADER.pack(*header), 8)

    # ------------------------------------------------------------------------------------------------ lists

    def _list(self, items: Sequence[Any], is_tuple: bool, keys: Sequence[Any] | None = None) -> int:
        types = set(map(type, items))
        if types and types <= {str, np.str_}:
            return self._blobs(TEXT, items, is_tuple)
        if types == {bytes}:
            return self._blobs(BLOB, items, is_tuple)
        if types in ({int}, {float}, {bool}):
            numbers = _numbers(items, types.pop())
            if numbers is not None:
                return self._header(self._numbers_header(numbers, is_tuple))
        return self._records(items, is_tuple, keys)

    def _numbers_header(self, numbers: Array, is_tuple: bool) -> ShareHeader:
        offset = self._sink.write(numbers, numbers.itemsize)
        return ShareHeader(NUMBERS, ord(numbers.dtype.char), is_tuple, len(numbers), offset)

    def _blobs(self, kind: int, items: Sequence[Any], is_tuple: bool) -> int:
        offsets = np.zeros(len(items) + 1, np.uint64)
        offsets[0] = self._sink.write(b"")
        for first in range(0, len(items), _CHUNK):
            part: Any = items[first : first + _CHUNK]
            lengths = self._blob_chunk(kind, part)
            offsets[first + 1 : first + 1 + len(part)] = offsets[first] + np.cumsum(lengths)
        code, table = self._table(offsets)
        return self._header(ShareHeader(kind, code, is_tuple, len(items), table))

    def _blob_chunk(self, kind: int, part: Any) -> Array:
        """Write some str or bytes end to end. Returns the number of bytes of each."""
        lengths = np.fromiter(map(len, part), np.uint64, len(part))
        if int(lengths.sum()) > _JOINED:
            # One by one: joined, these items would take too much memory.
            for index, item in enumerate(part):
                data = item if kind == BLOB else item.encode("utf-8", "surrogatepass")
                self._sink.write(data)
                lengths[index] = len(data)
            return lengths
        if kind == BLOB:
            self._sink.write(b"".join(part))
            return lengths
        text = "".join(part)
        if text.isascii():  # one byte per character
            self._sink.write(text.encode())
            return lengths
        encoded = [item.encode("utf-8", "surrogatepass") for item in part]
        self._sink.write(b"".join(encoded))
        return np.fromiter(map(len, encoded), np.uint64, len(encoded))

    def _records(self, items: Sequence[Any], is_tuple: bool, keys: Sequence[Any] | None) -> int:
        offsets = array.array("Q")
        rows = len(items) >= self._large
        for index, item in enumerate(items):
            try:
                offsets.append(self._record(item, rows))
            except Exception as error:
                add_note(error, f"while sharing item {index if keys is None else keys[index]!r}")
                raise
        code, table = self._table(np.frombuffer(offsets, np.uint64) if offsets else np.zeros(0, np.uint64))
        return self._header(ShareHeader(RECORDS, code, is_tuple, len(items), table))

    def _table(self, offsets: Array) -> tuple[int, int]:
        """Write the offsets, in four bytes each if they fit. Returns the format character and the table's offset."""
        if not len(offsets) or int(offsets.max()) < 1 << 32:
            offsets = offsets.astype(np.uint32)
        return ord("I" if offsets.itemsize == 4 else "Q"), self._sink.write(offsets, offsets.itemsize)

    # ------------------------------------------------------------------------------------------------ dicts

    def _dict(self, value: dict[Any, Any]) -> int:
        keys = list(value)
        if len(keys) < self._large:
            record = self._record(keys, rows=True)
            return self._header(ShareHeader(SMALL_DICT, 0, 0, len(keys), record, self._values(value, keys)))
        bits = (len(keys) - 1).bit_length()
        code, starts, order = self._hash_table(keys, bits)
        names = self._list(keys, is_tuple=False)
        return self._header(
            ShareHeader(LARGE_DICT, code, 0, len(keys), names, self._values(value, keys), starts, order, bits)
        )

    def _values(self, value: dict[Any, Any], keys: list[Any]) -> int:
        return self._list(list(value.values()), is_tuple=False, keys=keys)

    def _hash_table(self, keys: list[Any], bits: int) -> tuple[int, int, int]:
        hashes = (bucket_of(stable_hash(key), 64 - bits) for key in keys)
        try:
            buckets = np.fromiter(hashes, np.int64, len(keys))
        except UnstableKeyError as error:
            raise TypeError(
                f"share() got a dict of {len(keys):,} entries with the key {error}. A dict of {self._large:,} entries "
                "or more needs keys that hash alike in every process: str, bytes, numbers, None, or tuples of these"
            ) from None
        dtype = np.dtype(np.uint32 if len(keys) < 1 << 32 else np.uint64)
        starts = np.zeros((1 << bits) + 1, dtype)
        starts[1:] = np.cumsum(np.bincount(buckets, minlength=1 << bits))
        first = self._sink.write(starts, 8)
        # Released before the second table is computed: both are large for a dict of many entries.
        del starts
        order = np.argsort(buckets, kind="stable").astype(dtype)
        return ord("I" if dtype.itemsize == 4 else "Q"), first, self._sink.write(order, 8)

    # ------------------------------------------------------------------------------------------------ records

    def _record(self, item: Any, rows: bool) -> int:
        if isinstance(item, list | dict | tuple) and self._wants_node(item, rows):
            return self._sink.write(bytes([NODE]) + self._node(item).to_bytes(8, "little"))
        self._stream.seek(0)
        self._stream.truncate()
        # Each record is unpickled alone, so it must not refer to objects that an earlier record contains.
        self._pickler.clear_memo()
        self._leaves.clear()
        try:
            self._pickler.dump(item)
        finally:
            self._placeholders.clear()
        if not self._leaves:
            return self._sink.write(self._stream.getbuffer())
        offsets = itertools.chain.from_iterable(self._leaves)
        head = array.array("q", offsets).tobytes()
        return self._sink.write(
            b"".join((bytes([LEAVES]), len(self._leaves).to_bytes(4, "little"), head, self._stream.getbuffer()))
        )

    def _on_buffer(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is self._region:
            self._leaves.append((REGION, 0))
            return
        shared = self._placeholders.get(id(buffer))
        if shared is not None:
            self._leaves.append((EXTERNAL, shared[1]))
            return
        view = buffer.raw()
        self._leaves.append((self._write_leaf(view, view.nbytes), view.nbytes))

    def _write_leaf(self, data: Any, nbytes: int) -> int:
        return self._sink.write(data, _WIDE_ALIGN if nbytes >= _WIDE else _ALIGN)

    def _reduce_shared(self, value: Any) -> Any:
        if getattr(value, "_shared", value) is None:  # a copy of a shared array, in private memory, which may change
            return self._reduce_array(np.asarray(value))
        placeholder = pickle.PickleBuffer(bytearray())
        self._placeholders[id(placeholder)] = (placeholder, len(self.externals))
        self.externals.append(value)
        return itself, (placeholder,)

    def _reduce_array(self, value: Array) -> Any:
        if value.dtype.hasobject or not value.nbytes:
            return value.__reduce_ex__(4)
        offset = self._write_leaf(array_bytes(value), value.nbytes)
        dtype = value.dtype if value.dtype != np.dtype(value.dtype.str) else value.dtype.str
        return rebuild_array, (self._region, offset, dtype, value.shape, array_order(value))

    def _reduce_tensor(self, value: torch.Tensor) -> Any:
        if value.device.type != "cpu":
            raise TypeError(f"share() got a tensor on {value.device}: call cpu() on it first")
        if value.layout is not torch.strided and not value.requires_grad:
            return reduce_sparse(value)
        if value.is_quantized:
            return reduce_quantized(value)
        if (
            value.requires_grad
            or value.is_nested
            or value.__dict__
            or value.dtype not in DTYPE_CODE
            or not value.numel()
        ):
            return value.__reduce_ex__(5)
        data = tensor_bytes(value)
        offset = self._write_leaf(data, data.nbytes)
        return rebuild_tensor, (self._region, offset, DTYPE_CODE[value.dtype], tuple(value.shape))

    def _wants_node(self, value: Any, rows: bool, above: tuple[int, ...] = ()) -> bool:
        """Return whether this list, tuple or dict inside another becomes a separate node; see `share`."""
        if isinstance(value, tuple) and type(value) is not tuple:
            return False  # a named tuple is a value
        if len(value) >= self._large:
            return True
        # A container that contains itself is left to the pickler, which can write it.
        if rows or id(value) in above:
            return False
        above = (*above, id(value))
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return any(
            isinstance(part, self._shared)
            or (isinstance(part, list | dict | tuple) and self._wants_node(part, rows=False, above=above))
            for part in parts
        )


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


def array_order(value: Array) -> str:
    """Return the memory order of `array_bytes`: "F" (first index fastest) or "C"."""
    return "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"


def array_bytes(value: Array) -> Array:
    """Return the elements of an array without objects as bytes; a view if it is contiguous, in either order."""
    plain = value.T if array_order(value) == "F" else value
    return np.ascontiguousarray(plain).reshape(-1).view(np.uint8)


def tensor_bytes(value: torch.Tensor) -> Array:
    """Return the elements of a dense CPU tensor as bytes, last index fastest; a view if it is contiguous."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    flat: Array = plain.reshape(-1).view(torch.uint8).numpy()
    return flat
