"""Decodes batches from shared memory: builds a tensor over each leaf, and has the unpickler insert them.

Data path: worker -> ring -> reorder -> [template] -> consumer.

This is pickle between our own processes; nothing from elsewhere is ever decoded here. `codec.py` encodes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, Self, TypeAlias, cast

import numpy as np
import torch

from asyncloader.workers.ipc.leaves import (
    DTYPES,
    LEAF_SPECS,
    NUMPY_BY_CODE,
    Dense,
    LeafSpec,
    Raw,
    Storage,
    Strided,
    extent,
)
from asyncloader.workers.ipc.ring import Anchor

Memory: TypeAlias = Anchor | np.ndarray[Any, np.dtype[np.uint8]]
"""The memory that leaves are built on: a slot's anchor, or a private copy of it."""


class Template:
    """The decoding side of a template; made once and used for every batch that says "same".

    The pickle in it is trusted, the numbers are not: a worker may die in the middle of a write, and user code in it may
    write anywhere. Whatever the offsets are, nothing outside the anchor is read.

    Raises:
        ValueError: these bytes are not a template.
    """

    __slots__ = ("_extent", "_inside", "_simple", "_size", "_specs", "_structure")

    lasting = True
    """Whether it also decodes later batches, and holds none."""

    def __init__(self, template: bytes) -> None:
        size = int.from_bytes(template[:4], "little")
        try:
            if len(template) < 4 + size:
                raise ValueError(f"{len(template)} bytes with a table of {size}")
            specs, inside, length = self._read_table(template[4 : 4 + size])
            self._specs: tuple[LeafSpec, ...] = tuple(specs)
            self._inside, self._size = int(inside), int(length)
            # With the structure, if that lies among the leaves: it is read from the same memory.
            self._extent = extent((*self._specs, Raw(max(0, self._inside), self._size if self._inside >= 0 else 0)))
        except Exception as error:
            raise ValueError(f"a worker's answer is broken: its template cannot be read ({error})") from error
        self._structure = template[4 + size :]
        simple = [
            (p.shape, NUMPY_BY_CODE[p.dtype], p.offset)
            for p in self._specs
            if type(p) is Dense and NUMPY_BY_CODE[p.dtype] is not None and p.numel
        ]
        # Only if all leaves are of that kind: by column, as `build` maps a function over them.
        self._simple = tuple(zip(*simple, strict=True)) if len(simple) == len(self._specs) else ()

    def _read_table(self, table: bytes) -> tuple[Iterable[LeafSpec], int, int]:
        """Read what `Encoder._table` made."""
        specs, inside, length = pickle.loads(table)
        return (LEAF_SPECS[kind](*values) for kind, values in specs), inside, length

    def with_structure(self, memory: Callable[[], Memory]) -> Self:
        """Return the template of one batch, whose structure may be among its leaves, in this memory. Here that is read
        when the batch is built.

        Raises:
            ValueError: it cannot be read.
        """
        del memory
        return self

    def build(self, anchor: Memory | None) -> Any:
        """Return the object, with leaves that are views of the anchor's memory (None if there are no bytes).

        Raises:
            ValueError: a leaf is not within the anchor.
            Exception: whatever unpickling the user's objects raises.
        """
        if self._extent and (anchor is None or len(anchor) < self._extent):
            raise self._too_short(anchor)
        if self._simple:
            # Only dense tensors of common types. In C, because it determines the loader's speed on small batches.
            shapes, dtypes, offsets = self._simple
            arrays = map(cast("Callable[..., Any]", np.ndarray), shapes, dtypes, repeat(anchor), offsets)
            leaves = list(map(torch.from_numpy, arrays))
            return self._with_leaves(anchor, leaves)
        return self._with_leaves(anchor, self._leaves_in(anchor))

    def copy_out(self, anchor: Memory) -> Any:
        """Return the object, with leaves in private memory, copied with the GIL released.

        Each leaf has an allocation of its own, so that labels which are kept do not keep the images; leaves that
        overlap share their allocation. Errors as `build`.
        """
        if len(anchor) < self._extent:
            raise self._too_short(anchor)
        return self._with_leaves(anchor, self._private_leaves(anchor))

    def _with_leaves(self, anchor: Memory | None, leaves: list[Any]) -> Any:
        structure = self._structure if self._inside < 0 else self._structure_in(anchor)
        # `buffers` may hold any objects: each is passed to the function that the pickled buffer was an argument of.
        return pickle.loads(structure, buffers=leaves)

    def _too_short(self, anchor: Memory | None) -> ValueError:
        there = 0 if anchor is None else len(anchor)
        return ValueError(f"a worker's answer is broken: a batch that ends at byte {self._extent} of {there}")

    def _structure_in(self, anchor: Memory | None) -> memoryview:
        """Return the structure that is among the leaves: a view of this memory."""
        if self._extent and (anchor is None or len(anchor) < self._extent):
            raise self._too_short(anchor)
        assert anchor is not None or not self._size
        return memoryview(b"") if anchor is None else _bytes(anchor, self._inside, self._size)

    def _leaves_in(self, anchor: Memory | None) -> list[Any]:
        """Build the leaves. The anchor must be as long as `_extent`."""
        storages: dict[int, torch.UntypedStorage] = {}
        return [_build_leaf(spec, anchor, storages) for spec in self._specs]

    def _private_leaves(self, anchor: Memory) -> list[Any]:
        """Build the leaves over copies of their bytes. The anchor must have them."""
        shared = {spec.offset: spec.nbytes for spec in self._specs if isinstance(spec, Strided | Storage)}
        own = sum(_nbytes(spec) for spec in self._specs if isinstance(spec, Dense | Raw))
        # A template may name the same bytes many times. Copied leaf by leaf, they would take any multiple of the batch.
        if own + sum(shared.values()) > self._extent:  # no encoder of ours: many leaves of the same bytes
            return self._leaves_in(_private(anchor, 0, self._extent))
        if self._simple:
            simple = zip(*self._simple, strict=True)
            return [torch.from_numpy(np.ndarray(s, d, anchor, o).copy()) for s, d, o in simple]  # type: ignore[arg-type]
        storages = {
            offset: torch.from_numpy(_private(anchor, offset, nbytes)).untyped_storage()
            for offset, nbytes in shared.items()
            if nbytes
        }
        return [
            _build_leaf(spec._replace(offset=0), _private(anchor, spec.offset, nbytes), storages)
            if isinstance(spec, Dense | Raw) and (nbytes := _nbytes(spec))
            else _build_leaf(spec, anchor, storages)
            for spec in self._specs
        ]


def _nbytes(spec: Dense | Raw) -> int:
    return spec.nbytes if isinstance(spec, Raw) else spec.numel * DTYPES[spec.dtype].itemsize


def _private(anchor: Memory, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a copy of these bytes. numpy's plain memcpy: torch's would use the trainer's OpenMP threads."""
    return np.ndarray((nbytes,), np.uint8, anchor, offset).copy()  # type: ignore[arg-type]


def _build_leaf(spec: LeafSpec, anchor: Memory | None, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(spec, Dense):
        dtype = DTYPES[spec.dtype]
        if not spec.numel:
            # `torch.frombuffer` refuses a length of 0.
            return torch.empty(spec.shape, dtype=dtype, device="cpu")
        assert anchor is not None
        return torch.frombuffer(anchor, dtype=dtype, count=spec.numel, offset=spec.offset).view(spec.shape)
    if isinstance(spec, Strided):
        dtype = DTYPES[spec.dtype]
        # Without elements it has no bytes, and no place from which they could be read.
        if spec.offset < 0:
            return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="cpu")
        storage = _build_storage(spec, anchor, storages)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, spec.first, spec.shape, spec.stride)
    if isinstance(spec, Storage):
        whole = _build_storage(spec, anchor, storages)
        whole.__class__ = _PickledStorage
        return whole
    if not spec.nbytes:
        return bytearray()
    assert anchor is not None
    return _bytes(anchor, spec.offset, spec.nbytes)


def _bytes(anchor: Memory, offset: int, nbytes: int) -> memoryview:
    return memoryview(anchor).cast("B")[offset : offset + nbytes]  # type: ignore[arg-type]


class _PickledStorage(torch.UntypedStorage):
    """An untyped storage that, like those from torch's own unpickling, has an `_untyped_storage`.

    `torch._utils._rebuild_tensor_v3` (unsigned and float8 dtypes) uses it.
    """

    @property
    def _untyped_storage(self) -> torch.UntypedStorage:
        return self


def _build_storage(
    spec: Strided | Storage, anchor: Memory | None, storages: dict[int, torch.UntypedStorage]
) -> torch.UntypedStorage:
    """Return one storage for all leaves with the same offset; empty storages are not shared."""
    if not spec.nbytes:
        return torch.UntypedStorage(0, device="cpu")
    storage = storages.get(spec.offset)
    if storage is None:
        storage = storages[spec.offset] = _bytes_tensor(anchor, spec.offset, spec.nbytes).untyped_storage()
    return storage


def _bytes_tensor(anchor: Memory | None, offset: int, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    assert anchor is not None
    return torch.frombuffer(anchor, dtype=torch.uint8, count=nbytes, offset=offset)
