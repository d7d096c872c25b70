"""Packs plain values as MessagePack with their types, and unpacks them. Nothing that is unpacked is ever executed.

Data path: loader -> [values] -> connection -> [values] -> worker, and back.

MessagePack's own types stand for themselves: None, booleans, integers of 64 bits, floats, strings and bytes. Every
other value is an array whose first element says what the rest is: ``[0, 1, 2]`` is the list ``[1, 2]``, ``[1, 1, 2]``
the tuple ``(1, 2)``. What is in no table here cannot be packed, and the error says where it is.

Named tuples and dataclasses are packed by name. Those of the loader itself are known; a user's must be registered where
they are unpacked, by `register_batch_type`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch

from asyncloader.events import PositionedIndex
from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.memory.leaves import SPARSE_LAYOUTS, sparse_parts

__all__ = ["LEAF", "Unsendable", "build", "decode", "pack", "register_batch_type", "unpack"]

_LIST, _TUPLE, _DICT, _SET, _FROZENSET, _ORDERED, _BIG, _COMPLEX, _BYTEARRAY = range(9)
_NAMED, _SCALAR, _ARRAY, _TENSOR, _SIZE, _DTYPE = range(9, 15)
LEAF: Final = 15
"""An array ``[LEAF, number, ...]``: a part of a batch whose bytes are elsewhere (`batches.py`)."""
_SPARSE = 16

_DEPTH = 64
_PLAIN = frozenset([type(None), bool, float, str, bytes])
_ARRAY_KINDS = frozenset("biufcMmSU")

_OURS: dict[str, type] = {kind.__name__: kind for kind in (PositionedIndex, Cursor, SkippedSample)}
_OUR_NAMES = {kind: name for name, kind in _OURS.items()}
_registered: dict[str, type] = {}
_TENSOR_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype) and dtype.itemsize
}
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _TENSOR_DTYPES.values()}

_T = TypeVar("_T", bound=type)


class Unsendable(TypeError):
    """A value that cannot be packed.

    Attributes:
        path: how to get to it from the value that was given, as in ``["meta"][0]``.
        what: the value's type, and what may be done.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path = ""

    def __str__(self) -> str:
        return f"{self.path or 'it'} {self.what}"


def register_batch_type(kind: _T) -> _T:
    """Allow batches from a service to contain objects of this type, a named tuple or a dataclass. For use as decorator.

    The service sends the fields with the type's module and name; the loader's process makes the object, by calling the
    type with them. Only registered types are ever called.

    Raises:
        TypeError: it is neither a named tuple nor a dataclass.
    """
    if not (dataclasses.is_dataclass(kind) or _is_named_tuple(kind)):
        raise TypeError(f"register_batch_type takes a named tuple or a dataclass, but got {kind!r}")
    _registered[_name(kind)] = kind
    return kind  # pyright: ignore[reportReturnType] - it narrows the type by the test above


def pack(value: Any, special: Callable[[Any], Any] | None = None) -> bytes:
    """Pack a value.

    Args:
        value: the value.
        special: called with what has no place in the tables above; returns what stands for it, or None.

    Raises:
        Unsendable: a part of it cannot be packed.
    """
    try:
        return msgspec.msgpack.encode(_flat(value, special))
    except RecursionError:
        raise Unsendable("refers to itself, or is nested too deeply to be sent") from None
    except UnicodeEncodeError as error:
        raise Unsendable(
            f"contains a text that is not valid Unicode, {error.object!r:.60}, and cannot be sent"
        ) from None


def unpack(data: bytes | memoryview) -> Any:
    """Return the value that was packed. The bytes are not trusted.

    Raises:
        ValueError: they are no packed value, or of a type that is not registered here.
    """
    return build(decode(data), ())


def decode(data: bytes | memoryview) -> Any:
    """Return the tree that `build` makes the value of.

    Raises:
        ValueError: the bytes are not MessagePack.
    """
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"broken stream: not a packed value ({error})") from None


def build(tree: Any, leaves: Sequence[Any], depth: int = _DEPTH) -> Any:
    """Return the value of a decoded tree, whose leaves are these. Errors as `unpack`."""
    if type(tree) is not list:
        if type(tree) is dict or not (tree is None or isinstance(tree, int | float | str | bytes)):
            raise ValueError(f"broken stream: a packed {type(tree).__name__}")
        return tree
    if not tree or not depth:
        raise ValueError("broken stream: an empty packed value" if not tree else "broken stream: nested too deeply")
    tag, depth = tree[0], depth - 1
    try:
        if tag == _LIST:
            return [build(each, leaves, depth) for each in tree[1:]]
        if tag == _TUPLE:
            return tuple([build(each, leaves, depth) for each in tree[1:]])
        if tag == LEAF:
            return _leaf(tree, leaves)
        values = [build(each, leaves, depth) for each in tree[1:]]
        return _BUILD[tag](*values)
    except ValueError:
        raise
    except Exception as error:  # a missing tag, too few values, a key that cannot be hashed, a constructor that raises
        raise ValueError(
            f"broken stream: a packed value that cannot be read ({type(error).__name__}: {error})"
        ) from None


# ---------------------------------------------------------------------------------------------------- packing


def _flat(value: Any, special: Callable[[Any], Any] | None) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else [_BIG, hex(value)]
    if kind is list or kind is tuple:
        return [_LIST if kind is list else _TUPLE, *_items(value, special)]
    if kind is dict or kind is OrderedDict:
        return [_DICT if kind is dict else _ORDERED, *_pairs(value, special)]
    if isinstance(value, torch.Tensor) and value.layout in SPARSE_LAYOUTS and kind is torch.Tensor:
        return _sparse_parts(value, special)
    if special is not None and (made := special(value)) is not None:
        return made
    if kind in _FLAT:
        return _FLAT[kind](value)
    if kind is set or kind is frozenset:
        return [_SET if kind is set else _FROZENSET, *_items(value, special)]
    if isinstance(value, np.generic):
        return [_SCALAR, *_array_parts(np.asarray(value))]
    if _is_named_tuple(kind):
        return [_NAMED, _name(kind), *_fields(value, kind._fields, special)]
    if dataclasses.is_dataclass(value):
        return [_NAMED, _name(kind), *_fields(value, _init_fields(kind), special)]
    raise Unsendable(
        f"is a {kind.__module__}.{kind.__qualname__}, which a service does not send: it sends plain values, "
        "containers, tensors, arrays, named tuples and dataclasses"
    )


def _at(error: Unsendable, step: str) -> Unsendable:
    error.path = step + error.path
    return error


def _items(values: Any, special: Callable[[Any], Any] | None) -> list[Any]:
    flat = []
    for number, value in enumerate(values):
        try:
            flat.append(_flat(value, special))
        except Unsendable as error:
            raise _at(error, f"[{number}]") from None
    return flat


def _pairs(values: dict[Any, Any], special: Callable[[Any], Any] | None) -> list[Any]:
    flat: list[Any] = []
    for key, value in values.items():
        try:
            flat += (_flat(key, special), _flat(value, special))
        except Unsendable as error:
            raise _at(error, f"[{key!r:.40}]") from None
    return flat


def _fields(value: Any, names: Sequence[str], special: Callable[[Any], Any] | None) -> list[Any]:
    flat = []
    for name in names:
        try:
            flat.append(_flat(getattr(value, name), special))
        except Unsendable as error:
            raise _at(error, f".{name}") from None
    return flat


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _init_fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _name(kind: type) -> str:
    return _OUR_NAMES.get(kind) or f"{kind.__module__}.{kind.__qualname__}"


def _array_parts(array: np.ndarray[Any, Any]) -> list[Any]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise Unsendable(f"is an array of dtype {array.dtype}, which a service does not send")
    return [array.dtype.str, [_TUPLE, *array.shape], array.tobytes()]


def _tensor_parts(tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.requires_grad:
        raise Unsendable("is a tensor that is not a plain dense one in the CPU's memory, which a service does not send")
    if tensor.is_conj() or tensor.is_neg() or tensor.dtype not in _DTYPE_NAMES:
        raise Unsendable(f"is a tensor of {tensor.dtype} that a service does not send")
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [_DTYPE_NAMES[tensor.dtype], [_TUPLE, *tensor.shape], data]


_SPARSE_LAYOUTS = {str(layout): layout for layout in SPARSE_LAYOUTS}


def _sparse_parts(tensor: torch.Tensor, special: Callable[[Any], Any] | None) -> list[Any]:
    if tensor.requires_grad or tensor.device.type != "cpu":
        raise Unsendable("is a sparse tensor with a gradient, or on a device, which a service does not send")
    coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    parts = [_flat(part, special) for part in sparse_parts(tensor)]
    return [_SPARSE, str(tensor.layout), [_TUPLE, *tensor.shape], coalesced, *parts]


_FLAT: dict[type, Callable[[Any], list[Any]]] = {
    complex: lambda value: [_COMPLEX, value.real, value.imag],
    bytearray: lambda value: [_BYTEARRAY, bytes(value)],
    torch.Size: lambda value: [_SIZE, *value],
    torch.dtype: lambda value: [_DTYPE, _DTYPE_NAMES[value]],
    torch.Tensor: lambda value: [_TENSOR, *_tensor_parts(value)],
    np.ndarray: lambda value: [_ARRAY, *_array_parts(value)],
}

# -------------------------------------------------------------------------------------------------- unpacking


def _leaf(tree: list[Any], leaves: Sequence[Any]) -> Any:
    number = tree[1] if len(tree) > 1 else None
    if type(number) is not int or not 0 <= number < len(leaves):
        raise ValueError(f"broken stream: leaf {number!r} of {len(leaves)}")
    return leaves[number] if len(tree) == 2 else _ON_LEAF[tree[2]](leaves[number], *tree[3:])


def _leaf_array(buffer: Any, dtype: str, shape: list[int], order: str) -> np.ndarray[Any, Any]:
    kind, fortran = _dtype(dtype), order == "F"
    checked = _shape(shape, kind.itemsize, memoryview(buffer).nbytes)
    return np.ndarray(checked, kind, buffer, order="F" if fortran else "C")


_ON_LEAF: dict[str, Callable[..., Any]] = {"array": _leaf_array}


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name) if type(name) is str else None
    if dtype is None or dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"broken stream: an array of dtype {name!r:.40}")
    return dtype


def _shape(shape: Sequence[int], itemsize: int, nbytes: int) -> tuple[int, ...]:
    if len(shape) > 64 or any(type(n) is not int or n < 0 for n in shape) or math.prod(shape) * itemsize != nbytes:
        raise ValueError(f"broken stream: an array of shape {list(shape)[:8]} in {nbytes} bytes")
    return tuple(shape)


def _array(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray[Any, Any]:
    kind = _dtype(dtype)
    return np.frombuffer(bytearray(data), kind).reshape(_shape(shape, kind.itemsize, len(data)))


def _tensor(name: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    dtype = _TENSOR_DTYPES[name]
    checked = _shape(shape, dtype.itemsize, len(data))
    if not data:
        return torch.empty(checked, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(checked)


def _sparse(name: str, shape: tuple[int, ...], coalesced: bool, *parts: Any) -> Any:
    layout = _SPARSE_LAYOUTS[name]
    special: dict[str, Any] = {"is_coalesced": coalesced} if layout is torch.sparse_coo else {"layout": layout}
    make: Any = torch.sparse_coo_tensor if layout is torch.sparse_coo else torch.sparse_compressed_tensor
    return make(*parts, shape, **special, check_invariants=True)


def _named(name: str, *values: Any) -> Any:
    kind = _OURS.get(name) or _registered.get(name)
    if kind is None:
        raise ValueError(
            f"a batch contains a {name}, and only types that were registered are made from a service's answers: call "
            f"asyncloader.register_batch_type({name.rpartition('.')[2]})"
        )
    if dataclasses.is_dataclass(kind):
        return kind(**dict(zip(_init_fields(kind), values, strict=True)))
    return kind(*values)


def _dict(*flat: Any) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


_BUILD: dict[int, Callable[..., Any]] = {
    _DICT: _dict,
    _ORDERED: lambda *flat: OrderedDict(_dict(*flat)),
    _SET: lambda *values: set(values),
    _FROZENSET: lambda *values: frozenset(values),
    _BIG: lambda text: int(text, 16),
    _COMPLEX: complex,
    _BYTEARRAY: lambda data: bytearray(memoryview(data)),
    _NAMED: _named,
    _SCALAR: lambda dtype, shape, data: _array(dtype, shape, data)[()],
    _ARRAY: _array,
    _TENSOR: _tensor,
    _SIZE: lambda *values: torch.Size(values),
    _DTYPE: lambda name: _TENSOR_DTYPES[name],
    _SPARSE: _sparse,
}
