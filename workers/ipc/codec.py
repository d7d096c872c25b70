"""Encodes batches for shared memory: tensors as raw bytes in the slot, the structure around them as pickle.

Data path: worker: collate -> [codec] -> ring -> reorder -> template -> consumer.

Encoding an object gives a *template* and *leaves*. Leaves are the bytes of tensors and arrays, wherever in the object
they are; each is written once, directly to its offset in the slot. The template is pickle (protocol 5) in which every
leaf is an out-of-band buffer, with a table of the leaves' offsets, sizes and types. Batches of the same shapes have
the same template, so a worker sends it once and then only says "same".

A tensor that is not plain, dense and on the CPU (sparse, quantized, nested, subclasses, `requires_grad`) is pickled by
its own rules; the storages that those rules meet become leaves, too, and of a tensor's storage only its own elements.
Tensors that overlap still do so afterwards.

`template.py` decodes.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import _utils as torch_utils
from torch._tensor import _rebuild_from_type_v2

from asyncloader.workers.ipc.layout import align
from asyncloader.workers.ipc.leaves import (
    DTYPE_CODE,
    LEAF_SPECS,
    Dispatch,
    Leaf,
    LeafSpec,
    Raw,
    reduce_quantized,
    reduce_sparse,
    reduce_typed_storage,
)
from asyncloader.workers.ipc.shared_storage import SharedStorages, StorageView, is_dense

_STRINGS = frozenset([str])

INLINE_PICKLE = 1 << 15
"""Pickle up to this size is sent over the socket; larger pickle goes through the slot."""


class Encoded(NamedTuple):
    """An encoded object: needs `nbytes` of memory, which `write` fills."""

    template: bytes
    nbytes: int
    writes: list[tuple[Callable[[mmap.mmap, int], None], int]]
    pickled: int

    def write(self, memory: mmap.mmap, offset: int) -> None:
        """Fill ``memory[offset : offset + nbytes]``."""
        for write, start in self.writes:
            write(memory, offset + start)


class Encoder:
    """Encodes one object at a time; lives in a worker and is not thread-safe.

    Default collation (`collate.py`) announces leaves with `placeholder` while it builds the batch; all other leaves are
    found by the pickler.
    """

    def __init__(self) -> None:
        self._announced: dict[int, tuple[Leaf, pickle.PickleBuffer]] = {}
        self._leaves: list[Leaf] = []
        # The newest batch that consisted of announced leaves alone: its keys or length, and its structure. And the
        # newest template, with all that it was made from.
        self._plain: tuple[Any, Sequence[bytes]] = None, ()
        self._newest: tuple[Any, bytes] = None, b""
        self._storages = SharedStorages()
        self._dispatch = Dispatch(
            {
                torch.Tensor: self._reduce_tensor,
                torch.UntypedStorage: self._reduce_storage,
                torch.storage.TypedStorage: reduce_typed_storage,
                np.ndarray: self._reduce_array,
            },
            self._reduce_by_own_rules,
        )

    def placeholder(self, leaf: Leaf) -> pickle.PickleBuffer:
        """Return the object that stands for the leaf until it is decoded."""
        # pickle passes a buffer to `_on_buffer`, which finds the leaf by the buffer's identity. The buffer itself is
        # kept, so that no other object gets its identity.
        buffer = pickle.PickleBuffer(bytearray())
        self._announced[id(buffer)] = (leaf, buffer)
        return buffer

    def discard(self) -> None:
        """Forget the leaves announced so far, when the object will not be encoded."""
        self._announced.clear()
        self._storages.clear()
        self._leaves = []

    def encode(self, value: Any) -> Encoded:
        """Pickle `value` around its leaves.

        Raises:
            Exception: whatever pickling raises.
        """
        self._leaves = []
        try:
            plain = self._plain_keys(value)
            if plain is None:
                return self._lay_out(self._structure(value))
            if plain == self._plain[0]:
                self._leaves = [leaf for leaf, _ in self._announced.values()]
            else:
                self._plain = plain, self._structure(value)
            return self._lay_out(self._plain[1])
        finally:
            self.discard()

    def _plain_keys(self, value: Any) -> Any:
        """Return the keys or the length of a dictionary or list of leaves in the order in which they were announced;
        batches for which this is equal have the same structure. None for any other value.
        """
        kind = type(value)
        if kind is dict:
            if _STRINGS.issuperset(map(type, value)) and [*map(id, value.values())] == [*self._announced]:
                return tuple(value)
        elif kind is list and [*map(id, value)] == [*self._announced]:
            return len(value)
        return None

    def _structure(self, value: Any) -> Sequence[bytes]:
        """Return the structure around the leaves that are found in it, in pieces."""
        pieces = _Pieces()
        pickler = pickle.Pickler(pieces, protocol=5, buffer_callback=self._on_buffer)
        self._dispatch.forget()
        pickler.dispatch_table = self._dispatch
        pickler.dump(value)
        return pieces

    def _table(self, specs: list[LeafSpec], inside: int, length: int) -> bytes:
        """Pack the table of leaves; the structure of this length is at `inside`, or follows if that is negative."""
        table = (tuple([(LEAF_SPECS.index(type(spec)), tuple(spec)) for spec in specs]), inside, length)
        return pickle.dumps(table, protocol=5)

    def _head(self, specs: list[LeafSpec], inside: int, length: int) -> bytes:
        table = self._table(specs, inside, length)
        return len(table).to_bytes(4, "little") + table

    def _lay_out(self, structure: Sequence[bytes]) -> Encoded:
        offset = 0
        length = sum(map(len, structure))
        specs: list[LeafSpec] = []
        writes: list[tuple[Callable[[mmap.mmap, int], None], int]] = []
        # Before the leaves: laying out a storage sets the places that the specs of its views name below.
        for shared in self._storages:
            end = shared.place(offset)
            if end > offset:
                # At 0: its views have their places from the beginning of the batch on.
                writes.append((shared.write, 0))
            offset = end
        for leaf in self._leaves:
            spec = leaf.spec(offset)
            specs.append(spec)
            if leaf.write is not None:
                writes.append((leaf.write, offset))
                offset = align(offset + leaf.nbytes)
        if length > INLINE_PICKLE:
            end = offset
            for piece in structure:
                writes.append((_raw_writer(memoryview(piece)), end))
                end += len(piece)
            return Encoded(self._head(specs, offset, length), align(end), writes, length)
        # With the types: leaves of two kinds with equal numbers are equal tuples.
        parts = [*map(type, specs)], specs, structure
        if parts != self._newest[0]:
            self._newest = parts, b"".join((self._head(specs, -1, length), *structure))
        return Encoded(self._newest[1], offset, writes, length)

    def _on_buffer(self, buffer: pickle.PickleBuffer) -> None:
        # Returns None, which is false: pickle then leaves the bytes out of the structure.
        announced = self._announced.get(id(buffer))
        if announced is not None:
            self._leaves.append(announced[0])
            return
        self._leaves.append(_raw_leaf(buffer))

    # ------------------------------------------------------------------------------------------ pickling of tensors

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        # The order of these tests, and each attribute that is read, shows in batches of many tensors.
        if _is_plain(tensor):
            dtype, shape, stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
            nbytes = None
            # torch calls a tensor contiguous whatever the stride of a dimension of size 1 is; the consumer gets that
            # stride, too.
            if tensor.is_contiguous() and (1 not in shape or is_dense(shape, stride)):
                nbytes = tensor.nbytes
            first = int(tensor.storage_offset())
            return _leaf, (self._view(tensor.untyped_storage(), dtype, first, shape, stride, nbytes),)
        if tensor.layout is not torch.strided and not tensor.requires_grad:
            return reduce_sparse(tensor)
        if tensor.is_quantized:
            return reduce_quantized(tensor)
        return self._reduce_by_own_rules(tensor)

    def _view(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        first: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        nbytes: int | None = None,
    ) -> pickle.PickleBuffer:
        """Return what stands for a dense tensor over the storage; of `nbytes`, if these lie one after the other."""
        item = dtype.itemsize
        view = StorageView(first * item, item, DTYPE_CODE[dtype], shape, stride, nbytes)
        self._storages.of(storage).views.append(view)
        # Without a function that writes it: the bytes are written with the storage.
        return self.placeholder(Leaf(0, view.spec, None))

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu":
            return storage.__reduce_ex__(5)
        nbytes = int(storage.nbytes())
        view = StorageView(0, 1, -1, (nbytes,), (1,), nbytes)
        self._storages.of(storage).views.append(view)
        return _leaf, (self.placeholder(Leaf(0, view.spec, None)),)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        """Reduce an array as numpy does. A read-only array comes out writable, as from torch's workers: its memory here
        may belong to a file or an image, but its copy does not.
        """
        reduced: Any = array.__reduce_ex__(5)
        # numpy's reduction has no buffer for arrays with gaps, and for those of objects.
        if array.flags.writeable or not isinstance(reduced[1][0], pickle.PickleBuffer):
            return reduced
        function, (buffer, *others) = reduced
        return function, (self.placeholder(_raw_leaf(buffer)), *others)

    def _reduce_by_own_rules(self, tensor: torch.Tensor) -> Any:
        """Reduce a tensor as its type does, but for the storage: of that, the tensor's own elements are enough."""
        reduced = tensor.__reduce_ex__(5)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *more = reduced
        return (*self._over_a_view(function, arguments), *more)

    def _over_a_view(self, function: Any, arguments: Any) -> tuple[Any, Any]:
        if function is _rebuild_from_type_v2 and len(arguments) == 4:
            inner, kind, inner_arguments, state = arguments
            inner, inner_arguments = self._over_a_view(inner, inner_arguments)
            return function, (inner, kind, inner_arguments, state)
        if function not in _REBUILT_FROM_STORAGE:
            return function, arguments
        storage, first, shape, stride, requires_grad, hooks, *more = arguments
        # The storages of `_rebuild_tensor_v3` have no dtype, so it is an argument there.
        dtype = more.pop(0) if function is torch_utils._rebuild_tensor_v3 else storage.dtype
        untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
        if untyped.device.type != "cpu" or dtype not in DTYPE_CODE:
            return function, arguments
        view = self._view(untyped, dtype, first, tuple(shape), tuple(stride))
        return _rebuild_from_view, (view, requires_grad, hooks, *more)


_REBUILT_FROM_STORAGE = (torch_utils._rebuild_tensor_v2, torch_utils._rebuild_tensor_v3)


def _rebuild_from_view(tensor: torch.Tensor, requires_grad: bool, hooks: Any, metadata: Any = None) -> torch.Tensor:
    """Do what `torch._utils._rebuild_tensor_v2` does once it has made the tensor."""
    tensor.requires_grad = requires_grad
    if metadata:
        torch_utils.set_tensor_metadata(tensor, metadata)
    tensor._backward_hooks = hooks
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu  # `tensor.device` takes thirty times as long
        and tensor.dtype in DTYPE_CODE
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        # Attributes of the user's come over by the tensor's own rules.
        and not tensor.__dict__
        and not tensor.is_nested
        # The memory of these two holds other values than the tensor.
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _Pieces(list[bytes]):
    """A file of a pickler, which writes large `bytes` as they are: these are then copied once, into the slot."""

    __slots__ = ()
    write = list.append


def _raw_leaf(buffer: pickle.PickleBuffer) -> Leaf:
    view = buffer.raw()
    nbytes = view.nbytes
    return Leaf(nbytes, lambda offset: Raw(offset, nbytes), _raw_writer(view) if nbytes else None)


def _raw_writer(view: memoryview) -> Callable[[mmap.mmap, int], None]:
    source = np.frombuffer(view, np.uint8)

    def write(memory: mmap.mmap, offset: int) -> None:
        np.ndarray(source.shape, np.uint8, memory, offset)[:] = source

    return write


def _leaf(value: Any) -> Any:
    """Identity: pickled as the function that turns a decoded leaf into itself."""
    return value
