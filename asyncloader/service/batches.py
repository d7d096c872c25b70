"""Encodes batches for a service: the same leaves as in shared memory, in a typed structure instead of a pickle.

Data path: worker: collate -> [batches: encode] -> slot -> connection -> slot -> [batches: build] -> consumer.

A template is the length of a table (4 bytes, little-endian), the table, and the structure; all of it packed by
`values.py`. The table says where each leaf is and what it is, with dtypes by name, so that both sides may have torch
versions with different dtypes. A structure of more than 32 KB is at an offset among the leaves.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch

from asyncloader.service.values import LEAF, Unsendable, build, decode, pack
from asyncloader.workers.memory.codec import Encoder, Template
from asyncloader.workers.memory.leaves import DTYPES, LEAF_SPECS, Dense, LeafSpec, Strided

__all__ = ["BatchEncoder", "BatchTemplate"]

_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_CODES = {name: code for code, name in enumerate(_NAMES)}
_SIZES = ("shape", "stride")
_LEAF_DTYPES = frozenset("biufc")


class BatchEncoder(Encoder):
    """An `Encoder` whose templates contain no pickle."""

    def _structure(self, value: Any) -> bytes:
        try:
            return pack(value, self._special)
        except Unsendable as error:
            raise TypeError(f"a batch that cannot be sent: {error}") from None

    def _special(self, value: Any) -> list[Any] | None:
        if isinstance(value, pickle.PickleBuffer):  # a leaf announced by default collation
            return self._leaf(value)
        if type(value) is torch.Tensor:
            return self._tensor(value)
        if type(value) is np.ndarray and value.dtype.kind in _LEAF_DTYPES and value.dtype.isnative and value.nbytes:
            return self._array(value)
        if isinstance(value, torch.Tensor):
            raise Unsendable(f"is a {type(value).__name__}, a subclass of torch.Tensor, which a service does not send")
        return None

    def _leaf(self, buffer: pickle.PickleBuffer) -> list[Any]:
        number = len(self._leaves)
        self._on_buffer(buffer)
        return [LEAF, number]

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        reduced = self._reduce_tensor(tensor)
        if len(reduced) != 2 or len(reduced[1]) != 1 or not isinstance(reduced[1][0], pickle.PickleBuffer):
            raise Unsendable(
                f"is a tensor of {tensor.dtype}, layout {tensor.layout}, requires_grad={tensor.requires_grad}: a "
                "service sends dense ones in the CPU's memory that need no gradient"
            )
        return self._leaf(reduced[1][0])

    def _array(self, array: np.ndarray[Any, Any]) -> list[Any]:
        order = "C" if array.flags.c_contiguous or not array.flags.f_contiguous else "F"
        contiguous: Any = array if order == "F" else np.ascontiguousarray(array)
        buffer = pickle.PickleBuffer(contiguous)
        return [*self._leaf(buffer), "array", array.dtype.str, list(array.shape), order]

    def _table(self, specs: list[LeafSpec], inside: int, length: int) -> bytes:
        rows = []
        for spec in specs:
            values: list[Any] = list(spec)
            if isinstance(spec, Dense | Strided):
                values[2] = _NAMES[spec.dtype]
            rows.append((LEAF_SPECS.index(type(spec)), values))
        return msgspec.msgpack.encode((rows, inside, length))


class BatchTemplate(Template):
    """The decoding side. Neither its pickle-free structure nor its numbers are trusted."""

    __slots__ = ("_tree",)

    def __init__(self, template: bytes) -> None:
        super().__init__(template)
        self._tree = decode(self._structure) if self._inside < 0 else None

    def _read_table(self, table: bytes) -> tuple[Iterable[LeafSpec], int, int]:
        rows, inside, length = decode(table)
        return [_spec(kind, values) for kind, values in rows], inside, length

    def _assemble(self, structure: bytes, leaves: list[Any]) -> Any:
        return build(decode(structure) if self._inside >= 0 else self._tree, leaves)


def _spec(kind: int, values: list[Any]) -> LeafSpec:
    make: Any = LEAF_SPECS[kind]
    spec: Any = make(*[tuple(each) if type(each) is list else each for each in values])
    if make in (Dense, Strided):
        if spec.dtype not in _CODES:
            raise ValueError(f"a tensor of dtype {spec.dtype!r:.40}, which this version of torch does not have")
        spec = spec._replace(dtype=_CODES[spec.dtype])
    for name, value in spec._asdict().items():
        if not all(type(each) is int for each in (value if name in _SIZES and type(value) is tuple else (value,))):
            raise ValueError(f"no part of a batch can be {spec!r:.200}")
    found: LeafSpec = spec
    return found


assert sys.byteorder == "little", "a service sends numbers as little-endian machines have them in memory"
