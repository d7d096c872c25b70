"""Packs plain values as MessagePack with their types, so that reading them executes no code of the sender.

Data path: loader -> [msgpack_values] -> connection -> unpacking -> worker, and back.

MessagePack's own types stand for themselves: None, booleans, integers of 64 bits, floats and strings; bytes are its
extension 0. Every other value is an array whose first element is a `Kind`: ``[0, 1, 2]`` is the list ``[1, 2]``,
``[1, 1, 2]`` the tuple ``(1, 2)``. Types that are in no table here cannot be packed, and the error names their place.

Named tuples and dataclasses are packed by name. Those of the loader itself are known; a user's types must be registered
in the process that unpacks them, by `batch_types.register_batch_type`.
"""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from asyncloader.base.events import Cursor, PositionedIndex, SkippedSample
from asyncloader.service.protocol.batch_types import is_named_tuple, name_of, why_unrestorable
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.ipc.leaves import DTYPES


class Kind:
    """The first element of an array: the type of the packed value."""

    LIST, TUPLE, DICT, SET, FROZENSET, ORDERED, BIG, COMPLEX, BYTEARRAY = range(9)
    NAMED, SCALAR, ARRAY, TENSOR, SIZE, DTYPE, LEAF = range(9, 16)


LEAF: Final = Kind.LEAF
"""An array ``[LEAF, number, ...]``: a part of a batch whose bytes are in the payload (`msgpack_codec.py`)."""

MOST_ARRAYS: Final = 100_000
"""Containers of a value, at most, and another for each 8 bytes of its packed form: an empty container is packed in one
byte, and takes about 80 bytes of memory. Numbers and texts need no such limit."""
_ARRAY_BYTES = 8
_MOST_ARRAYS_EVER = 1 << 20  # counting them takes half a second
MOST_KEYS: Final = 1 << 20
"""Keys of a value's sets and dictionaries that are not texts, at most. Python's hashes of texts are secret. Those of
numbers are not, and a sender can choose numbers so that a key takes 20 times as long. The worst keys tried take 0.8
seconds."""
DEPTH: Final = 64
"""Arrays in arrays of a packed value, at most."""
_DEEPEST = DEPTH - 2  # containers in containers: an array of numpy in the last takes two more
BYTES = 0  # MessagePack extension: msgspec cannot distinguish MessagePack's own bytes from strings in a union
_PLAIN = frozenset([type(None), bool, float, str])
_INTEGER = {int}
SECRETLY_HASHED = frozenset([type(None), bool, str, bytes])
ARRAY_KINDS = frozenset("biufcMmSU")

OURS: dict[str, type] = {kind.__name__: kind for kind in (PositionedIndex, Cursor, EpochStart, SkippedSample)}
_OUR_NAMES = {kind: name for name, kind in OURS.items()}
ALL_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype) and dtype.itemsize
}
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in ALL_DTYPES.values()}


class Unsendable(TypeError):
    """A value that cannot be packed.

    Attributes:
        path: its place in the value that was given, as in ``["meta"][0]``.
        what: the value's type, and possible remedies.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path = ""

    def __str__(self) -> str:
        return f"{self.path or 'it'} {self.what}"


def pack(value: Any, special: Callable[[Any], Any] | None = None) -> bytes:
    """Pack a value.

    Args:
        value: the value.
        special: called with values other than plain numbers, texts and containers; returns the packed form, or None.

    Raises:
        Unsendable: a part of it cannot be packed.
    """
    # The limits of the reader are checked here, too: an error at the sample names the cause, and a refused message
    # would end the connection instead.
    try:
        made = msgspec.msgpack.encode(_flat(value, _Packing(special)))
    except UnicodeEncodeError as error:
        raise Unsendable(
            f"contains a text that is not valid Unicode, {error.object!r:.60}, and cannot be sent"
        ) from None
    if len(made) > MOST_ARRAYS and (most := too_many_arrays(made)):
        raise Unsendable(f"has more than {most:,} containers in {len(made):,} bytes: send tensors or arrays")
    return made


def _tree_type() -> Any:
    # A union without maps, nested `DEPTH` times: so the decoder itself refuses maps, whose keys Python would hash, and
    # deeper nesting.
    scalars: Any = None | bool | int | float | str | Ext
    made = scalars
    for _ in range(DEPTH):
        made = scalars | types.GenericAlias(list, (made,))
    return made


decoder = msgspec.msgpack.Decoder[Any](_tree_type())
"""Reads a packed value as a tree: lists of lists, numbers, texts and extensions."""

_ARRAY_HEADS = bytes([*range(0x90, 0xA0), 0xDC, 0xDD])
_MOST_HEADS = 1 << 22  # that are read to count the containers among them, which takes half a second
_SIZED = {
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xDC: (2, 0),
    0xDD: (4, 0),
}
"""By the first byte of a long text, extension or array: the bytes of its size, and further bytes of its head."""
_FIXED = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 1),
    0xCA: 5,
    0xCB: 9,
    **{first: 1 + (1 << (first & 3)) for first in range(0xCC, 0xD4)},
    **{first: 2 + (1 << (first - 0xD4)) for first in range(0xD4, 0xD9)},
}
"""By the first byte of a number, or of a short extension: its bytes."""


def too_many_arrays(data: bytes) -> int:
    """Return the permitted number of containers if the packed value has more; else 0."""
    most = min(MOST_ARRAYS + len(data) // _ARRAY_BYTES, _MOST_ARRAYS_EVER)
    if len(data) - len(data.translate(None, _ARRAY_HEADS)) <= most:
        return 0
    # There are many bytes that may begin an array. They may also be part of numbers or texts, so the heads are read in
    # order. A value with too many of these heads is refused as well: reading them would take too long.
    at = found = 0
    for _ in range(_MOST_HEADS):
        if at >= len(data) or found > most:
            return most if found > most else 0
        head = data[at]
        if 0x90 <= head < 0xA0 or head in (0xDC, 0xDD):
            found += 1
            at += 1 + (_SIZED[head][0] if head >= 0xDC else 0)
        elif head in _SIZED:
            size, more = _SIZED[head]
            at += 1 + size + more + int.from_bytes(data[at + 1 : at + 1 + size], "big")
        elif 0xA0 <= head < 0xC0:
            at += 1 + head - 0xA0
        else:  # a map, and all else that is unknown, is refused by the decoder
            at += _FIXED.get(head, 1)
    return most


# ---------------------------------------------------------------------------------------------------- packing


class _Packing:
    """State while one value is packed: the function for special types, the containers around, and the keys so far."""

    __slots__ = ("_depth", "_keys", "special")

    def __init__(self, special: Callable[[Any], Any] | None) -> None:
        self.special = special
        self._depth = 0
        self._keys = 0

    def parts(self, values: Iterable[Any], names: Iterable[Any], step: str, of_each: int = 1) -> list[Any]:
        """Pack the parts of a container, of which each name has `of_each`.

        `step` leads from the container to a part, as ``[{!r:.40}]``, for errors.
        """
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Unsendable(f"is nested more than {_DEEPEST} levels deep, or refers to itself, and cannot be sent")
        flat: list[Any] = []
        try:
            for value in values:
                flat.append(value if type(value) in _PLAIN else _flat(value, self))  # noqa: PERF401 - counted below
        except Unsendable as error:
            error.path = step.format([*names][len(flat) // of_each]) + error.path
            raise
        self._depth -= 1
        return flat

    def check_keys(self, values: Any) -> None:
        """Count the keys of a set or dictionary. Raises Unsendable if they are too many."""
        if not SECRETLY_HASHED.issuperset(map(type, values)):
            self._keys += len(values)
            if self._keys > MOST_KEYS:
                raise Unsendable(f"has, with the values before it, more than {MOST_KEYS:,} keys that are not texts")


def _flat(value: Any, packing: _Packing) -> Any:
    # Exact types: packed as its base, an object of a subclass would arrive without its own type and state.
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        # Hexadecimal, because Python refuses, and reads slowly, integers of many decimal digits.
        return value if -(1 << 63) <= value < 1 << 64 else [Kind.BIG, hex(value)]
    if kind is list or kind is tuple:
        tag, kinds = Kind.LIST if kind is list else Kind.TUPLE, set(map(type, value))
        # A list of numbers, such as a batch's indices, is packed without a call for each.
        plain = kinds <= _PLAIN or (kinds == _INTEGER and min(value) >= -(1 << 63) and max(value) < 1 << 64)
        return [tag, *(value if plain else packing.parts(value, range(len(value)), "[{}]"))]
    if kind in _OUR_NAMES:  # named tuples, all of them
        return [Kind.NAMED, _OUR_NAMES[kind], *packing.parts(value, kind._fields, ".{}")]
    if kind is dict or kind is OrderedDict:
        packing.check_keys(value)
        pairs = packing.parts(chain.from_iterable(value.items()), value, "[{!r:.40}]", 2)
        return [Kind.DICT if kind is dict else Kind.ORDERED, *pairs]
    # Before `_FLAT`: in a batch, tensors and arrays become leaves, and `_FLAT` packs them with their bytes.
    if packing.special is not None and (made := packing.special(value)) is not None:
        return made
    if kind in _FLAT:
        return _FLAT[kind](value)
    if kind is set or kind is frozenset:
        packing.check_keys(value)
        return [Kind.SET if kind is set else Kind.FROZENSET, *packing.parts(value, value, "[{!r:.40}]")]
    if isinstance(value, np.generic):
        return [Kind.SCALAR, *_array_parts(np.asarray(value))]
    if is_named_tuple(kind):
        if why := why_unrestorable(kind, value):
            raise Unsendable(why)
        return [Kind.NAMED, name_of(kind), *packing.parts(value, kind._fields, ".{}")]
    if dataclasses.is_dataclass(kind):
        return [Kind.NAMED, name_of(kind), *_attributes(value, packing)]
    raise Unsendable(
        f"is a {kind.__module__}.{kind.__qualname__}, which a service does not send: it sends plain values, "
        "containers, tensors, arrays, named tuples and dataclasses"
    )


def _attributes(value: Any, packing: _Packing) -> list[Any]:
    """Return the names and values of a dataclass object's attributes: its fields, and others that were set."""
    if why := why_unrestorable(type(value)):
        raise Unsendable(why)
    # `object`'s own: that of a dataclass with slots leaves out attributes that are no fields.
    state: Any = object.__getstate__(value)
    attributes: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):  # those in `__dict__`, and those in `__slots__`
        attributes |= part or {}
    values = packing.parts(attributes.values(), attributes, ".{}")
    return [*chain.from_iterable(zip(attributes, values, strict=True))]


def _array_parts(array: np.ndarray[Any, Any]) -> list[Any]:
    if array.dtype.kind not in ARRAY_KINDS:
        raise Unsendable(f"is an array of dtype {array.dtype}, which a service does not send")
    return [array.dtype.str, [Kind.TUPLE, *array.shape], Ext(BYTES, array.tobytes())]


def why_unsendable(tensor: torch.Tensor) -> str:
    """Return what keeps a service from sending a tensor, in words; empty: nothing does."""
    if tensor.layout is not torch.strided:
        return f"is a tensor of layout {tensor.layout}, which a service does not send: send its indices and values"
    if tensor.device.type != "cpu":
        return f"is a tensor on {tensor.device}: a service sends those in the CPU's memory"
    if tensor.requires_grad:
        return "is a tensor with requires_grad=True, which a service does not send: detach() it"
    if tensor.dtype not in DTYPES or tensor.is_nested:  # quantized ones are of other dtypes
        return f"is a {'nested ' if tensor.is_nested else ''}tensor of {tensor.dtype}, which a service does not send"
    extra = ", ".join(vars(tensor))
    return f"is a tensor with attributes of its own, which a service does not send: {extra}" if extra else ""


def _tensor_parts(tensor: torch.Tensor) -> list[Any]:
    if why := why_unsendable(tensor):
        raise Unsendable(why)
    # A copy: the bytes of a conjugated or negated view are those of the original, and a tensor with a single element is
    # contiguous whatever its stride is, and may then not be viewed as bytes.
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [DTYPE_NAMES[tensor.dtype], [Kind.TUPLE, *tensor.shape], Ext(BYTES, data)]


_FLAT: dict[type, Callable[[Any], Any]] = {
    bytes: lambda value: Ext(BYTES, value),
    complex: lambda value: [Kind.COMPLEX, value.real, value.imag],
    bytearray: lambda value: [Kind.BYTEARRAY, Ext(BYTES, bytes(value))],
    torch.Size: lambda value: [Kind.SIZE, *value],
    torch.dtype: lambda value: [Kind.DTYPE, DTYPE_NAMES[value]],
    torch.Tensor: lambda value: [Kind.TENSOR, *_tensor_parts(value)],
    np.ndarray: lambda value: [Kind.ARRAY, *_array_parts(value)],
}
