"""Short texts that change when a batch changes, or a field of it.

Data path: batch -> [tokens] -> comparison.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

_MOST_FIELDS = 64
_DEEPEST = 5  # of containers whose parts are fields of their own


def token(value: Any) -> str:
    """Return a text that follows from a value alone, and from its type only where it cannot be pickled."""
    checksum = _Checksum()
    pickler = _Pickler(checksum, 5)
    pickler.fast = True  # equal values are equal, whether their parts are the same objects or not
    try:
        pickler.dump(value)
    except Exception:  # a lock, a file, a cycle
        return type(value).__qualname__
    return f"{checksum.value:08x}"


class _Checksum:
    """A file of which the checksum is kept."""

    def __init__(self) -> None:
        self.value = 0

    def write(self, data: Any) -> None:
        self.value = zlib.crc32(data, self.value)


class _Pickler(pickle.Pickler):
    """Has values of tensors and arrays in the place of their memory, which may be a part of a larger block."""

    def reducer_override(self, value: Any) -> Any:
        """Return the parts that stand for a value; `NotImplemented`: pickle's own."""
        if isinstance(value, torch.Tensor):
            return _same, (_parts_of_tensor(value.detach()),)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return _same, (str(value.dtype), value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes()))
        if hasattr(type(value), "__array_interface__"):  # as of an image, whose pixels may be no attribute
            return _same, (type(value).__qualname__, np.asarray(value))
        return NotImplemented


def _same(*parts: Any) -> Any:
    raise NotImplementedError  # nothing is unpickled


def _parts_of_tensor(value: torch.Tensor) -> list[Any]:
    if value.is_nested:
        return [_parts_of_tensor(each) for each in value.unbind()]
    head: list[Any] = [str(value.dtype), tuple(value.shape)]
    if value.device.type == "meta":
        return head
    if value.layout != torch.strided:
        whole = (value if value.layout == torch.sparse_coo else value.to_sparse_coo()).coalesce()
        return [*head, _parts_of_tensor(whole.indices()), _parts_of_tensor(whole.values())]
    plain = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [*head, zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0]


def fields(batch: Any) -> dict[str, str]:
    """Return the token of each field of a batch by its path, as ``[0]`` or ``['image']``: 64 fields, and the rest."""
    found: dict[str, str] = {}
    for number, (path, part) in enumerate(_fields(batch, "", _DEEPEST)):
        name = (path or "the batch") if number < _MOST_FIELDS else "the rest"
        found[name] = token([found.get(name), token(part)])
    return found


def _fields(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth and isinstance(value, Mapping):
        for key, inner in value.items():
            # The text of another object may have its place in memory, which differs between processes.
            name = repr(key) if isinstance(key, str | bytes | int | float) else f"{type(key).__name__} {token(key)}"
            yield from _fields(inner, f"{path}[{name}]", depth - 1)
    elif depth and isinstance(value, list | tuple) and len(value) <= _MOST_FIELDS:
        for number, inner in enumerate(value):
            yield from _fields(inner, f"{path}[{number}]", depth - 1)
    else:
        yield path, sorted(map(token, value)) if isinstance(value, set | frozenset) else value
