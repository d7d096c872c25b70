"""Short texts that change when a batch changes, or a part of it, or a sample in it.

Data path: batch -> [tokens] -> comparison.
"""

from __future__ import annotations

import itertools
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

_MOST_BYTES = 16 << 20  # of an array; an array of at least twice that number is sampled down to about it
_MOST_ITEMS = 1000
_MOST_LEAVES = 64


def token(value: Any, depth: int = 4) -> str:
    """Return a text that follows from a value alone: the order of a set, or the place of an object, is not in it."""
    return format(zlib.crc32(_text(value, depth).encode("utf-8", "surrogatepass")), "08x")


def _text(value: Any, depth: int) -> str:
    match value:
        case None | bool() | int() | float() | complex():
            return repr(value)
        case str():
            return (
                f"str:{value!r}"
                if len(value) < 200
                else f"str:{len(value)}:{zlib.crc32(value.encode('utf8', 'replace'))}"
            )
        case bytes() | bytearray():
            return f"bytes:{len(value)}:{zlib.crc32(value)}"
        case torch.Tensor():
            return _tensor(value)
        case np.ndarray() | np.generic():
            return _array(np.asarray(value), depth)
        case _:
            pass
    if depth <= 0:
        return type(value).__name__
    inner = depth - 1
    match value:
        case Mapping():
            items = itertools.islice(value.items(), _MOST_ITEMS)
            return f"{len(value)}{{{','.join(f'{_text(k, inner)}={_text(v, inner)}' for k, v in items)}}}"
        case list() | tuple():
            return f"{type(value).__name__}:{len(value)}[{','.join(_text(v, inner) for v in value[:_MOST_ITEMS])}]"
        case set() | frozenset():
            return f"set:{len(value)}:{sorted(_text(v, inner) for v in itertools.islice(value, _MOST_ITEMS))}"
        case type() | types.FunctionType() | types.BuiltinFunctionType():
            return value.__qualname__
        case _:
            pass
    if hasattr(type(value), "__array_interface__"):  # as of an image, whose pixels are no attribute
        with suppress(Exception):
            return f"{type(value).__qualname__}:{_array(np.asarray(value), depth)}"
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        return f"{type(value).__qualname__}({_text(own, inner)})"
    return f"{type(value).__qualname__}{_text_without_dictionary(value, depth)}"


def _text_without_dictionary(value: Any, depth: int) -> str:
    """Return a text of an object without a dictionary: the values of slots; of a class of Python's own what would be
    pickled; empty for another object, which may be large.
    """
    kinds = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    slots = [name for each in kinds for name in ((each,) if isinstance(each, str) else each)]
    if names := [name for name in slots if not name.startswith("__") and hasattr(value, name)]:
        return _text({name: getattr(value, name) for name in names}, depth)
    if type(value).__module__.partition(".")[0] not in sys.stdlib_module_names or hasattr(value, "__next__"):
        return ""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # a lock, a file
        return ""
    # The arguments, the state; then the items of a list and of a dictionary, as iterators.
    found = [list(itertools.islice(each, _MOST_ITEMS)) if hasattr(each, "__next__") else each for each in reduced[1:5]]
    return _text(found, depth)


def _tensor(value: torch.Tensor) -> str:
    if value.is_nested:
        return f"nested[{','.join(map(_tensor, value.unbind()))}]"
    head = f"{value.dtype}{tuple(value.shape)}"
    if value.device.type == "meta":
        return head
    with torch.no_grad():
        value = value.detach()
        if value.layout not in (torch.strided, torch.sparse_coo):
            value = value.to_sparse_coo() if value.is_sparse_csr else value.to_dense()
        if value.layout == torch.sparse_coo:
            whole = value.coalesce()
            return f"{head}sparse:{_tensor(whole.indices())}:{_tensor(whole.values())}"
        plain = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return f"{head}:{_crc(plain.view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8))}"


def _array(value: Any, depth: int) -> str:
    head = f"{value.dtype}{value.shape}"
    if value.dtype.hasobject:
        return f"{head}{_text(value.reshape(-1)[:_MOST_ITEMS].tolist(), depth - 1)}" if depth > 0 else head
    return f"{head}:{_crc(np.ascontiguousarray(value).reshape(-1).view(np.uint8))}"


def _crc(data: Any) -> int:
    if data.nbytes < 2 * _MOST_BYTES:
        return zlib.crc32(data)
    # An odd step: all bytes of each type's numbers are among those that are looked at.
    sampled: Any = np.ascontiguousarray(data[:: data.nbytes // _MOST_BYTES | 1])
    return zlib.crc32(sampled, zlib.crc32(data[:65536]))


def leaves(batch: Any) -> dict[str, str]:
    """Return the token of each part of a batch by its path, as ``[0]`` or ``['image']``: 64 parts, and the rest."""
    found: dict[str, str] = {}
    for number, (path, part) in enumerate(_parts(batch, "")):
        name = (path or "the batch") if number < _MOST_LEAVES else "the rest"
        found[name] = token([found[name], _whole(part)]) if name in found else _whole(part)
    return found


def _whole(part: Any) -> str:
    """Return the token of a part, with all elements of a long list."""
    if not isinstance(part, list | tuple) or len(part) <= _MOST_ITEMS:
        return token(part)
    return token([token(part[first : first + _MOST_ITEMS]) for first in range(0, len(part), _MOST_ITEMS)])


def _parts(value: Any, path: str, depth: int = 5) -> Iterator[tuple[str, Any]]:
    if depth and isinstance(value, Mapping):
        for key, inner in value.items():
            # The text of another object may have its place in memory, which differs between processes.
            name = repr(key) if isinstance(key, str | bytes | int | float) else f"{type(key).__name__} {token(key)}"
            yield from _parts(inner, f"{path}[{name}]", depth - 1)
    elif depth and isinstance(value, list | tuple) and len(value) <= _MOST_LEAVES:
        for number, inner in enumerate(value):
            yield from _parts(inner, f"{path}[{number}]", depth - 1)
    else:
        yield path, value


def rows(batch: Any) -> list[str] | None:
    """Return a token of each sample of a batch that torch's `default_collate` made; None if it cannot be cut."""
    columns: list[Any] = []

    def collect(value: Any) -> bool:
        if isinstance(value, torch.Tensor) and value.dim():
            columns.append(value)
            return True
        if isinstance(value, Mapping):
            return all(map(collect, value.values()))
        if isinstance(value, list | tuple) and value and all(isinstance(each, str | bytes) for each in value):
            columns.append(value)
            return True
        return isinstance(value, list | tuple) and all(map(collect, value))

    if not collect(batch) or not columns or len({len(column) for column in columns}) != 1:
        return None
    return [token([column[number] for column in columns]) for number in range(len(columns[0]))]
