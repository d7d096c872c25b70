"""Lays out the tensors of a batch by storage: bytes that several of them use are copied once, unused ones never.

Data path: worker: collate -> codec: [shared_storage] -> ring.

Tensors whose ranges overlap share a storage afterwards, as before. All others get bytes of their own, however much of
their storage lies between them: a batch of views into a dataset's tensor costs the samples, not the dataset. Different
views whose ranges overlap, such as two columns of a table, cost the range.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import prod
from operator import mul

import numpy as np
import torch

from asyncloader.workers.ipc.layout import PAGE, align
from asyncloader.workers.ipc.leaves import Dense, LeafSpec, Storage, Strided

_MOST_GAPS = 4
"""Copied bytes per used byte up to which strides are kept: gaps between a tensor's elements are then copied, too. Four
is one channel of an RGBA image. Up to a page they are always kept."""

_UNITS = {item: np.dtype(name) for item, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "c16"))}


class SharedStorages:
    """The storages of one batch."""

    def __init__(self) -> None:
        self._found: dict[int, SharedStorage] = {}

    def of(self, storage: torch.UntypedStorage) -> SharedStorage:
        """Return the same object for the same storage."""
        # The address of the storage itself: two tensors may have separate Python objects for it. `SharedStorage` keeps
        # it alive.
        key: int = storage._cdata
        shared = self._found.get(key)
        if shared is None:
            self._found[key] = shared = SharedStorage(storage)
        return shared

    def __iter__(self) -> Iterator[SharedStorage]:
        return iter(self._found.values())

    def clear(self) -> None:
        """Forget them."""
        self._found.clear()


class StorageView:
    """A tensor over a storage, and its place once the batch is laid out.

    Args:
        start: the byte of the storage where it begins.
        item: bytes of one element.
        code: the dtype's; negative: the storage itself.
        shape: sizes.
        stride: strides, in elements.
        nbytes: if the elements lie one after the other: their bytes.
    """

    __slots__ = ("code", "dense", "end", "item", "placed", "shape", "start", "stride", "used")

    placed: LeafSpec

    def __init__(
        self,
        start: int,
        item: int,
        code: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        nbytes: int | None = None,
    ) -> None:
        self.start = start
        self.item = item
        self.code = code
        self.shape = shape
        self.stride = stride
        self.dense = nbytes is not None
        span = self.used = nbytes or 0
        if nbytes is None and 0 not in shape:
            reach = sum(map(mul, shape, stride)) - sum(stride) + 1
            span = reach * item
            # A dimension with stride 0 repeats its elements, which take their bytes once.
            self.used = min(reach, prod(n for n, step in zip(shape, stride, strict=True) if step)) * item
        self.end = start + span

    def spec(self, _: int) -> LeafSpec:
        """Return its place in the slot."""
        return self.placed

    def put(self, offset: int, nbytes: int, first: int, stride: tuple[int, ...], *, alone: bool) -> None:
        """Place it in `nbytes` at `offset`, `first` bytes after their beginning."""
        if self.code < 0:
            self.placed = Storage(offset, nbytes)
        elif alone and (self.dense or is_dense(self.shape, stride)):
            self.placed = Dense(offset, nbytes // self.item, self.code, self.shape)
        else:
            self.placed = Strided(offset, nbytes, self.code, self.shape, stride, first // self.item)

    def compact_stride(self) -> tuple[int, ...] | None:
        """Return strides without gaps, in the same order; None if elements overlap. Repeated dimensions stay so."""
        stride = list(self.stride)
        span = reach = 1
        for step, dim in sorted((s, d) for d, s in enumerate(stride) if s and self.shape[d] > 1):
            if step < reach:
                return None
            stride[dim] = span
            span *= self.shape[dim]
            reach += (self.shape[dim] - 1) * step
        return tuple(stride)


class SharedStorage:
    """A storage, the batch's views of it, and how these are copied."""

    __slots__ = ("_compact", "_ranges", "storage", "views")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.views: list[StorageView] = []
        self._ranges: list[tuple[int, int, int]] = []  # offset in the batch, first and last byte of the storage
        self._compact: list[tuple[int, StorageView, tuple[int, ...]]] = []

    def place(self, offset: int) -> int:
        """Lay the views out from `offset` of the batch on, and return where they end."""
        self._ranges.clear()
        self._compact.clear()
        views = [view for view in self.views if view.used]
        if len(views) < len(self.views):
            for view in self.views:
                if not view.used:
                    # A view without bytes has no place: -1 for a tensor.
                    view.put(0 if view.code < 0 else -1, 0, 0, view.stride, alone=False)
        for touching in (views,) if len(views) == 1 else _touching(views):
            # In one piece, with its gaps.
            if _is_tight(touching):
                offset = self._place_range(touching, offset)
                continue
            # Gaps can be left out only if all views have the same elements: one view's gap may be another's element.
            same = len({(view.start, view.item, view.shape, view.stride) for view in touching}) == 1
            compact = touching[0].compact_stride() if same else None
            if compact is None:
                offset = self._place_range(touching, offset)
            else:
                offset = self._place_compact(touching, compact, offset)
        return offset

    def _place_range(self, views: list[StorageView], offset: int) -> int:
        """Place views that share a range of the storage."""
        if len(views) == 1:
            (view,) = views
            first, last = view.start, view.end
            view.put(offset, last - first, 0, view.stride, alone=True)
        else:
            first = min(view.start for view in views) // 16 * 16  # aligned to the widest element
            last = max(view.end for view in views)
            for view in views:
                view.put(offset, last - first, view.start - first, view.stride, alone=False)
        self._ranges.append((offset, first, last))
        return align(offset + last - first)

    def _place_compact(self, views: list[StorageView], stride: tuple[int, ...], offset: int) -> int:
        """Place views of the same elements without the gaps between these."""
        for view in views:
            view.put(offset, view.used, 0, stride, alone=len(views) == 1)
        self._compact.append((offset, views[0], stride))
        return align(offset + views[0].used)

    def write(self, memory: mmap.mmap, offset: int) -> None:
        """Copy the views' bytes to a batch's memory at `offset`."""
        # As bytes, because numpy lacks some of torch's dtypes.
        source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.storage).numpy()
        for place, first, last in self._ranges:
            np.ndarray((last - first,), np.uint8, memory, offset + place)[:] = source[first:last]
        for place, view, stride in self._compact:
            unit = _UNITS[view.item]
            # A dimension that repeats its elements is copied once.
            shape = tuple(n if step else 1 for n, step in zip(view.shape, stride, strict=True))
            there, here = ([step * view.item for step in steps] for steps in (view.stride, stride))
            np.ndarray(shape, unit, memory, offset + place, here)[...] = np.ndarray(
                shape, unit, source, view.start, there
            )


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether these are the strides of a new tensor with elements, also those of dimensions of size 1."""
    expected = 1
    for n, step in zip(reversed(shape), reversed(stride), strict=True):
        if step != expected:
            return False
        expected *= n
    return True


def _is_tight(views: list[StorageView]) -> bool:
    """Whether the range of these views may be copied with its gaps."""
    if len(views) == 1 and views[0].dense:
        return True
    span = max(view.end for view in views) - min(view.start for view in views)
    return span <= max(PAGE, _MOST_GAPS * sum(view.used for view in views))


def _touching(views: list[StorageView]) -> Iterator[list[StorageView]]:
    """Split the views into groups whose ranges do not overlap."""
    views.sort(key=lambda view: view.start)
    group: list[StorageView] = []
    end = 0
    for view in views:
        if group and view.start >= end:
            yield group
            group = []
        group.append(view)
        end = max(end, view.end)
    if group:
        yield group
