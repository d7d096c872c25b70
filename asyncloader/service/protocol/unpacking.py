"""Reads values that `msgpack_values.py` has packed. The sender has the token, and is not trusted.

Data path: connection -> [unpacking] -> worker; connection -> [unpacking] -> consumer.

The type of a decoded value is checked before it is hashed, compared or printed. The memory and the time that a value
takes are bounded by the bytes of its packed form: see `MOST_ARRAYS` and `MOST_KEYS`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from msgspec.msgpack import Ext

from asyncloader.base.peer_text import line_of
from asyncloader.packing.windows import Window
from asyncloader.service.protocol.batch_types import REGISTERED, name_of
from asyncloader.service.protocol.msgpack_values import (
    ALL_DTYPES,
    BYTES,
    DEPTH,
    DTYPE_NAMES,
    LEAF,
    MOST_ARRAYS,
    MOST_KEYS,
    OURS,
    SECRETLY_HASHED,
    Kind,
    decoder,
    too_many_arrays,
)
from asyncloader.workers.ipc.leaves import DTYPES

_WINDOWS = {name_of(Window): Window}  # which `PackedLoader` checks before it packs them
_LIST, _TUPLE = Kind.LIST, Kind.TUPLE
_SAME_HASH = 16  # keys of a dictionary that may have the same hash
_MOST_DIGITS = 1 << 20  # of an integer, hexadecimal, which takes linear time to read; decimal digits would not
_MOST_NAME = 300
_Digits = Annotated[str, Meta(max_length=_MOST_DIGITS, pattern=r"^-?0x[0-9a-f]+\Z")]
# numpy's own parser also accepts structures such as "i4,i4", nested, and may take long.
_ArrayDtype = Annotated[
    str,
    Meta(
        max_length=40,
        pattern=r"^[<>|=]?(?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[a-zA-Zμ]{1,2}(?:/[0-9]{1,9})?\])?)\Z",
    ),
]
_Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=64)]
_Signed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_SCALARS = frozenset([type(None), bool, int, float, str])
# The dtypes of batches, and no others: a tensor of a quantized dtype that is made of bytes has no quantizer, and
# printing or comparing it is a segmentation fault.
_TENSOR_DTYPES = {DTYPE_NAMES[dtype]: dtype for dtype in DTYPES}


def unpack(data: bytes | memoryview) -> Any:
    """Return the value that was packed. The bytes are not trusted.

    Raises:
        ValueError: they are no packed value, or the value's type is not registered in this process.
    """
    try:
        return build(decode(data), ())
    except TypeError as error:
        raise ValueError(str(error)) from None


def decode(data: bytes | memoryview) -> Any:
    """Return the tree from which `build` makes the value: lists of lists, numbers, texts and extensions.

    Raises:
        ValueError: the bytes are not MessagePack, or have too many containers.
    """
    # Before decoding: afterwards the memory is already taken.
    if len(data) > MOST_ARRAYS and (most := too_many_arrays(bytes(data))):
        raise ValueError(f"broken stream: a value of more than {most:,} containers in {len(data):,} bytes")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"broken stream: not a packed value ({error!s:.200})") from None


class WireLeaf(NamedTuple):
    """Stands for a leaf when a batch's structure is checked without the leaves' bytes.

    Attributes:
        nbytes: size of the buffer; None: the leaf is a tensor.
    """

    nbytes: int | None


def build(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return the value of a decoded tree with these leaves.

    Raises:
        TypeError: a type in it is not registered in this process.
        ValueError: it is not a packed value.
    """
    try:
        return _Builder(leaves, dry=False).value(tree, DEPTH)
    except _Unregistered as error:
        raise TypeError(*error.args) from None


def check(tree: Any, leaves: Sequence[WireLeaf]) -> None:
    """Check that `build` will succeed with this tree. Constructors of registered types may still raise. Calls no code
    of the user.

    Raises:
        ValueError: `build` would fail.
    """
    _Builder(leaves, dry=True).value(tree, DEPTH)


class _Broken(ValueError):
    def __init__(self, what: str) -> None:
        super().__init__(f"broken stream: {what}")


class _Builder:
    """Makes one value.

    Args:
        leaves: of the batch; for a dry run `WireLeaf`s.
        dry: whether only to check: a `WireLeaf` then stands for values that need the leaves' bytes or the user's types.
    """

    __slots__ = ("_dry", "_keys", "_leaves")

    def __init__(self, leaves: Sequence[Any], *, dry: bool) -> None:
        self._leaves = leaves
        self._dry = dry
        self._keys = 0

    def value(self, tree: Any, depth: int) -> Any:
        """Make the value of this part of the tree."""
        if type(tree) is not list:
            if type(tree) is not Ext:
                return tree  # None, a number or a text: the decoder makes no others
            if tree.code != BYTES:
                raise _Broken(f"an extension of type {tree.code}")
            return bytes(tree.data)
        if not tree or not depth:
            raise _Broken("nested too deeply" if tree else "an empty packed value")
        tag = tree[0]
        # Here and below not `isinstance`: a bool is an int, too, and would be taken for a kind or a size.
        if type(tag) is not int or not 0 <= tag <= LEAF:
            raise _Broken("a packed value of no known kind")
        try:
            if tag == LEAF:
                return self._leaf(tree)
            values = tree[1:]
            # Numbers, such as a batch's indices, are taken without a call for each.
            if not _SCALARS.issuperset(map(type, values)):
                depth -= 1
                values = [each if type(each) in _SCALARS else self.value(each, depth) for each in values]
            if tag == _LIST:
                return values
            if tag == _TUPLE:
                return tuple(values)
            if tag in _FIELDS:
                fields, make = _FIELDS[tag]
                return make(*msgspec.convert(values, fields))
            return _BUILD[tag](self, values)
        except (_Broken, _Unregistered):
            raise
        except Exception as error:  # too few values, or a constructor raises: any type of error is possible
            text = f"{type(error).__name__}: {error}"
            raise _Broken(f"a packed value that cannot be read ({text:.200})") from None

    # ------------------------------------------------------------------------------------------ leaves

    def _leaf(self, tree: list[Any]) -> Any:
        number = tree[1] if len(tree) > 1 else None
        if type(number) is not int or not 0 <= number < len(self._leaves):
            raise _Broken(f"a leaf that is none of {len(self._leaves)}")
        leaf: Any = self._leaves[number]
        if len(tree) == 2:
            return leaf
        _, name, shape, order = msgspec.convert(tree[2:], _ARRAY_LEAF)
        nbytes = leaf.nbytes if self._dry else memoryview(leaf).nbytes
        if nbytes is None:
            raise _Broken("a tensor in an array's place")
        dtype = _checked_dtype(np.dtype(name), shape, nbytes)
        return WireLeaf(nbytes) if self._dry else np.ndarray(shape, dtype, leaf, order=order)

    # ------------------------------------------------------------------------------------------ containers

    def _check_keys(self, keys: list[Any]) -> None:
        """Raise ValueError unless these can be hashed and compared in bounded time."""
        # The sender does not know the hashes of texts and bytes, so it cannot choose keys that collide.
        if SECRETLY_HASHED.issuperset(map(type, keys)):
            return
        if not all(map(_is_key, keys)):
            raise _Broken("a key that is no plain value")
        self._keys += len(keys)
        if self._keys > MOST_KEYS:
            raise _Broken("too many keys that are not texts")
        if self._dry and not _SCALARS.issuperset(map(type, keys)):
            return  # some keys may be placeholders, whose hashes are equal
        # A set compares a new key with all keys of the same hash: a million equal hashes would take hours.
        hashes = sorted(map(hash, keys))
        if any(map(operator.eq, hashes, hashes[_SAME_HASH:])):
            raise _Broken("keys that share a hash")

    def dictionary(self, values: list[Any]) -> dict[Any, Any]:
        keys = values[::2]
        self._check_keys(keys)
        return dict(zip(keys, values[1::2], strict=True))

    def elements(self, values: list[Any]) -> list[Any]:
        self._check_keys(values)
        return values

    def named(self, values: list[Any]) -> Any:
        name, *fields = values
        if type(name) is not str or len(name) > _MOST_NAME:
            raise _Broken("a type without a name")
        kind: Any = OURS.get(name) or REGISTERED.get(name) or _WINDOWS.get(name)
        # A type that is not registered raises in `build` only, for the consumer: the node is not at fault.
        if self._dry and name not in OURS:  # a dry run calls no constructor of the user
            return WireLeaf(None)
        if kind is None:
            raise _Unregistered(name)
        return _restored(kind, fields) if dataclasses.is_dataclass(kind) else _named_tuple(kind, fields)


class _Unregistered(TypeError):
    def __init__(self, name: str) -> None:
        name = line_of(name)
        super().__init__(
            f"the batch has a {name}, and only types that were registered are made from a service's answers: call "
            f"asyncloader.register_batch_type({name.rpartition('.')[2]})"
        )


def _named_tuple(kind: Any, fields: list[Any]) -> Any:
    if len(fields) != len(kind._fields):
        raise _Broken(f"a {kind.__qualname__} of {len(fields)} fields")
    # The type's own `__new__` was called by the sender, and may change its arguments.
    return tuple.__new__(kind, fields)


def _restored(kind: Any, pairs: list[Any]) -> Any:
    """Make a dataclass object with these attributes; names and values alternate. Calls no code of the user."""
    made, found = object.__new__(kind), dict(zip(pairs[::2], pairs[1::2], strict=True))
    for name, value in found.items():
        # numpy and torch take the memory that an object's `__array_interface__` names.
        if type(name) is not str or name.startswith("__"):
            raise _Broken("an attribute of an object that is none")
        if isinstance(inspect.getattr_static(kind, name, None), types.MemberDescriptorType):
            object.__setattr__(made, name, value)  # in `__slots__`
        else:
            made.__dict__[name] = value
    missing = [each.name for each in dataclasses.fields(kind) if each.init and each.name not in found]
    if missing:
        raise _Broken(f"a {kind.__qualname__} without {', '.join(missing)}")
    return made


def _is_key(value: Any) -> bool:
    kind = type(value)
    if kind in _KEYS or isinstance(value, np.generic):
        return True
    if kind is frozenset or isinstance(value, tuple):
        return all(map(_is_key, value))
    return dataclasses.is_dataclass(value) and all(
        _is_key(getattr(value, each.name, None)) for each in dataclasses.fields(value)
    )


_KEYS = frozenset([*_SCALARS, bytes, complex, torch.dtype])


def _number_of(shape: tuple[int, ...]) -> int:
    """Return the number of a shape's elements. Raises ValueError if its strides may overflow."""
    # Without the zeros: the strides of an empty tensor are products of its other sizes, and must not overflow either.
    if math.prod(n for n in shape if n) >= 1 << 62:
        raise _Broken("a shape that is too large")
    return math.prod(shape)


def _checked_dtype(dtype: Any, shape: tuple[int, ...], nbytes: int) -> Any:
    """Return the dtype, if an array of this shape has this number of bytes."""
    # An element of dtype "U0" or "S0" has no bytes, so the bytes do not bound their number: at most one is accepted.
    number = _number_of(shape)
    if number * dtype.itemsize != nbytes or (not dtype.itemsize and number > 1):
        raise _Broken(f"an array of shape {shape[:8]} in {nbytes} bytes")
    return dtype


def _array(name: str, shape: tuple[int, ...], data: bytes) -> np.ndarray[Any, Any]:
    # A `bytearray`, because an array over bytes would be read-only.
    return np.ndarray(shape, _checked_dtype(np.dtype(name), shape, len(data)), bytearray(data))


def _tensor(name: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    dtype = _checked_dtype(_TENSOR_DTYPES[name], shape, len(data))
    if not data:  # `frombuffer` refuses an empty buffer
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


_ARRAY_LEAF = tuple[Literal["array"], _ArrayDtype, _Shape, Literal["C", "F"]]
_BUILD: dict[int, Callable[[_Builder, list[Any]], Any]] = {
    Kind.DICT: _Builder.dictionary,
    Kind.ORDERED: lambda builder, values: OrderedDict(builder.dictionary(values)),
    Kind.SET: lambda builder, values: set(builder.elements(values)),
    Kind.FROZENSET: lambda builder, values: frozenset(builder.elements(values)),
    Kind.NAMED: _Builder.named,
}
_FIELDS: dict[int, tuple[Any, Callable[..., Any]]] = {
    Kind.BIG: (tuple[_Digits], lambda digits: int(digits, 16)),
    Kind.COMPLEX: (tuple[float, float], complex),
    Kind.BYTEARRAY: (tuple[bytes], bytearray),
    Kind.SCALAR: (tuple[_ArrayDtype, _Shape, bytes], lambda *parts: _array(*parts)[()]),
    Kind.ARRAY: (tuple[_ArrayDtype, _Shape, bytes], _array),
    Kind.TENSOR: (tuple[str, _Shape, bytes], _tensor),
    Kind.SIZE: (tuple[_Signed, ...], lambda *sizes: torch.Size(sizes)),
    Kind.DTYPE: (tuple[str], ALL_DTYPES.__getitem__),
}
"""The types of the values of a kind, and the function that makes its object of them."""
