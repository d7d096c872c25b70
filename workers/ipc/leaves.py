"""Defines leaves: the parts of a batch that are stored as raw bytes, and how tensors of special kinds consist of them.

Data path: worker: collate -> [leaves] -> codec -> ring -> [leaves] -> consumer.

The worker writes a leaf once, to its offset in the slot. A `LeafSpec` has its offset, size and type; from that the
consumer builds a tensor, a storage or a buffer over it.

Sparse and quantized tensors and typed storages are pickled by parts that are plain tensors, which become leaves.
torch's own pickling would work, but has side effects in a process that lives long.
"""

from __future__ import annotations

import copyreg
import math
import mmap
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

# A torch dtype is encoded as its index in this list.
DTYPES: tuple[torch.dtype, ...] = tuple(
    dtype
    for name in [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "complex128",
        "uint16",
        "uint32",
        "uint64",
        "complex32",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ]
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
)
DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
_NUMPY = {
    torch.empty(0, dtype=d, device="cpu").numpy().dtype: d
    for d in DTYPES
    # numpy has no dtypes for these: `dense_view` writes them through torch.
    if d not in (torch.bfloat16, torch.complex32) and not str(d).startswith("torch.float8")
}
_TORCH_TO_NUMPY = {d: n for n, d in _NUMPY.items()}
NUMPY_BY_CODE = tuple(_TORCH_TO_NUMPY.get(d) for d in DTYPES)
_ITEM_SIZE = {d: d.itemsize for d in DTYPES}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return the torch dtype with the same representation in native byte order, or None."""
    return _NUMPY.get(dtype)


def has_code(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be leaves; others are pickled by torch."""
    return dtype in DTYPE_CODE


class Dense(NamedTuple):
    """A contiguous tensor with a storage of its own."""

    offset: int
    numel: int
    dtype: int
    shape: tuple[int, ...]


class Strided(NamedTuple):
    """A tensor over a storage at `offset`; leaves with equal offsets share the storage."""

    offset: int
    nbytes: int
    dtype: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


class Raw(NamedTuple):
    """Plain bytes: a numpy array's buffer, or anything else that is pickled out of band."""

    offset: int
    nbytes: int


class Storage(NamedTuple):
    """An untyped storage."""

    offset: int
    nbytes: int


LeafSpec: TypeAlias = Dense | Strided | Raw | Storage
LEAF_SPECS = (Dense, Strided, Raw, Storage)

_MOST = 1 << 62  # elements or bytes; torch and numpy compute with signed 64-bit numbers


def extent(specs: tuple[LeafSpec, ...]) -> int:
    """Return the number of bytes that memory must have to hold all of these leaves. Then they can be built unchecked.

    numpy and torch check only some of this, each differently: with a negative offset, for example, `numpy.ndarray`
    reads memory before the buffer.

    Raises:
        ValueError: a spec is impossible: a negative or huge number, or a shape that contradicts the size.
    """
    end = 0
    storages: dict[int, int] = {}
    for spec in specs:
        try:
            last = _dense_end(spec) if isinstance(spec, Dense) else _other_end(spec)
        except TypeError:  # not numbers
            last = -1
        if not 0 <= last <= _MOST:
            raise ValueError(f"no part of a batch can be {spec!r:.200}")
        # The storage is built for the first of them, and the others use it: a larger one would read behind its end.
        if last and isinstance(spec, Strided | Storage) and storages.setdefault(spec.offset, last) != last:
            raise ValueError(f"two parts of a batch share a storage and differ in its size, {spec!r:.200}")
        end = max(end, last)
    return end


def _dense_end(spec: Dense) -> int:
    """Return the end of a dense tensor; 0 for an empty one, -1 for an impossible one."""
    offset, numel, code, shape = spec
    count = _product(shape)
    if count != numel or count < 0 or type(code) is not int or not 0 <= code < len(DTYPES):
        return -1
    if not count:
        return 0
    item = _ITEM_SIZE[DTYPES[code]]
    return -1 if type(offset) is not int or offset < 0 or offset % item else offset + count * item


def _other_end(spec: Strided | Raw | Storage) -> int:
    if not isinstance(spec, Strided):
        offset, nbytes = spec
        return -1 if not _are_sizes((offset, nbytes)) else offset + nbytes if nbytes else 0
    offset, nbytes, code, shape, stride, first = spec
    count = _product(shape)
    if count < 0 or not _are_sizes((nbytes, code, first, *stride)) or code >= len(DTYPES) or len(shape) != len(stride):
        return -1
    if type(offset) is not int or offset < 0:
        return -1 if count or nbytes else 0  # an empty tensor has no offset, and no bytes there
    reach = first + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    if not count or reach * _ITEM_SIZE[DTYPES[code]] > nbytes or offset % 16:  # 16: size of the widest element
        return -1
    return offset + nbytes


def _are_sizes(numbers: tuple[int, ...]) -> bool:
    # Not `isinstance`: True is no size.
    return all(type(n) is int and 0 <= n <= _MOST for n in numbers)


def _product(shape: tuple[int, ...]) -> int:
    """Return the number of elements; -1 if torch rejects the shape, as it does if the non-zero dimensions overflow."""
    count = math.prod(shape)
    if type(count) is int and 0 < count <= _MOST and (not shape or min(shape) > 0):
        return count  # the product is an int only if all dimensions are
    return 0 if not count and _are_sizes(shape) and math.prod(n for n in shape if n) <= _MOST else -1


class Leaf:
    """Bytes to be written to the slot. `write` gets the memory and the leaf's absolute offset in it."""

    __slots__ = ("nbytes", "spec", "write")

    def __init__(
        self, nbytes: int, spec: Callable[[int], LeafSpec], write: Callable[[mmap.mmap, int], None] | None
    ) -> None:
        self.nbytes = nbytes
        self.spec = spec
        self.write = write


def dense_view(memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over ``memory[offset:]`` to write to."""
    array = _TORCH_TO_NUMPY.get(dtype)
    if array is not None:
        return torch.from_numpy(np.ndarray(shape, array, memory, offset))
    count = 1
    for n in shape:
        count *= n
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def dense_leaf(
    shape: tuple[int, ...], dtype: torch.dtype, nbytes: int, write: Callable[[mmap.mmap, int], None]
) -> Leaf:
    """Return a leaf that becomes one contiguous tensor."""
    code, count = DTYPE_CODE[dtype], nbytes // _ITEM_SIZE[dtype]
    return Leaf(nbytes, lambda offset: Dense(offset, count, code, shape), write if count else None)


def reduce_sparse(tensor: torch.Tensor) -> Any:
    """Reduce a sparse tensor to its parts. torch's own way keeps every unpickled tensor in a global list forever."""
    if tensor.layout is torch.sparse_coo:
        return _sparse_coo, (*sparse_parts(tensor), tuple(tensor.shape), tensor.is_coalesced())
    if tensor.layout in SPARSE_LAYOUTS:
        return _sparse_compressed, (sparse_parts(tensor), tuple(tensor.shape), tensor.layout)
    return tensor.__reduce_ex__(5)


_PARTS = {
    # `indices` and `values` refuse a tensor that is not coalesced.
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
SPARSE_LAYOUTS = frozenset(_PARTS)
"""The layouts that `sparse_parts` knows."""


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that a sparse one consists of: indices, and last the values."""
    return tuple(getattr(tensor, name)() for name in _PARTS[tensor.layout])


def _sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool
) -> torch.Tensor:
    options: Any = {"dtype": values.dtype, "device": values.device, "check_invariants": False}
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, **options)


def _sparse_compressed(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], shape: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    options: Any = {"dtype": parts[-1].dtype, "device": parts[-1].device, "check_invariants": False}
    return torch.sparse_compressed_tensor(*parts, shape, layout=layout, **options)


def reduce_quantized(tensor: torch.Tensor) -> Any:
    """Reduce a quantized tensor to its parts. torch's own way asks the storage for its type, which is deprecated."""
    if tensor.dtype in (torch.qint8, torch.quint8, torch.qint32):
        scheme = tensor.qscheme()
        if scheme == torch.per_tensor_affine:
            parts = (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
            return torch._make_per_tensor_quantized_tensor, parts  # pyright: ignore[reportPrivateImportUsage]
        if scheme == torch.per_channel_affine:
            channels = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis())
            make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
            return make, (tensor.int_repr(), *channels)
    return tensor.__reduce_ex__(5)


def reduce_typed_storage(storage: torch.storage.TypedStorage) -> Any:
    """Reduce a typed storage to the untyped one in it."""
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    # Without `_internal` torch would warn that typed storages are deprecated.
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


_FIRST_ELEMENTS, _FIRST_VALUES, _DEEPEST = 12, 64, 8  # of what `batch_nbytes` looks at


def batch_nbytes(batch: Any) -> int:
    """Bytes of the tensors in a batch, in plain containers only.

    A sequence of which the first elements hold no tensor, such as a list of token ids, is not read to its end: that
    could take longer than making the batch. Nor is a container within itself, or below many others.
    """
    kind = type(batch)
    if issubclass(kind, torch.Tensor):
        return int(batch.numel() * batch.element_size())
    return _nbytes_within(batch, kind, set()) if issubclass(kind, (dict, list, tuple)) else 0


def _nbytes_within(container: Any, kind: type, around: set[int]) -> int:
    if len(around) == _DEEPEST or id(container) in around:
        return 0
    around.add(id(container))
    # The types' own methods: a subclass may run the user's code.
    if issubclass(kind, dict):
        items, first = iter(dict.values(container)), _FIRST_VALUES
    else:
        items, first = (tuple if issubclass(kind, tuple) else list).__iter__(container), _FIRST_ELEMENTS
    found = 0
    for item in items:
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            found += item.numel() * item.element_size()
        elif issubclass(kind, (dict, list, tuple)):
            found += _nbytes_within(item, kind, around)
        first -= 1
        if not first and not found:
            break
    around.remove(id(container))
    return found


_BY_OWN_RULES = operator.methodcaller("__reduce_ex__", 5)


class Dispatch(dict[type, Any]):
    """The reductions by type: the encoder's own, those in `copyreg`, and one for all subclasses of tensors."""

    def __init__(self, own: dict[type, Any], tensor: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(own)
        self._own = len(own)
        self._tensor = tensor

    def __missing__(self, kind: type) -> Any:
        found = copyreg.dispatch_table.get(kind)
        if found is None and issubclass(kind, torch.Tensor):
            found = self._tensor
        elif found is None and not issubclass(kind, type):
            found = _BY_OWN_RULES  # the pickler would do the same after a KeyError, but it would ask for each object
        if found is None:
            raise KeyError(kind)
        self[kind] = found
        return found

    def forget(self) -> None:
        """Forget the reductions that were found: a user may have registered other functions since."""
        if len(self) > self._own:
            for kind in list(self)[self._own :]:
                del self[kind]
