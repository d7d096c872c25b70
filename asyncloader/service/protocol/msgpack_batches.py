"""Encodes batches for a service: the leaves are those of local workers, the structure is typed instead of a pickle.

Data path: collate -> [msgpack_batches: encode] -> slot -> connection -> slot -> [msgpack_batches: build] -> consumer.

A template is the length of a table (4 bytes, little-endian), the table, and the structure, both packed as MessagePack.
The table has the place and the kind of each leaf, with dtypes by name, so that both sides may have torch versions with
different dtypes. A structure of more than 32 KB is stored at an offset among the leaves.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np
import torch
from msgspec import Meta

from asyncloader.service.protocol.msgpack_values import LEAF, Unsendable, pack, why_unsendable
from asyncloader.service.protocol.unpacking import WireLeaf, build, check, decode
from asyncloader.workers.memory.codec import Encoder
from asyncloader.workers.memory.leaves import DTYPES, LEAF_SPECS, Dense, LeafSpec, Raw, Strided
from asyncloader.workers.memory.template import Memory, Template

_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_CODES = {name: code for code, name in enumerate(_NAMES)}
_MOST_LEAVES = 100_000
_Sizes = Annotated[list[int], Meta(max_length=64)]
_Row = tuple[Literal[0, 1, 2], Annotated[list[int | str | _Sizes], Meta(max_length=6)]]
_Table = tuple[Annotated[list[_Row], Meta(max_length=_MOST_LEAVES)], int, int]
_tables = msgspec.msgpack.Decoder(_Table)
_LEAF_DTYPES = frozenset("biufc")


class BatchEncoder(Encoder):
    """An `Encoder` whose templates contain no pickle."""

    def _structure(self, value: Any) -> Sequence[bytes]:
        try:
            return [pack(value, self._special)]
        except Unsendable as error:
            raise TypeError(f"a batch that cannot be sent: {error}") from None

    def _special(self, value: Any) -> list[Any] | None:
        if isinstance(value, pickle.PickleBuffer):  # a leaf announced by default collation
            return self._leaf(value)
        if type(value) is torch.Tensor:
            return self._tensor(value)
        # Arrays of other dtypes or byte orders, and empty arrays, are packed with their bytes in the structure.
        if type(value) is np.ndarray and value.dtype.kind in _LEAF_DTYPES and value.dtype.isnative and value.nbytes:
            return self._array(value)
        if isinstance(value, torch.Tensor):
            raise Unsendable(f"is a {type(value).__name__}, a subclass of torch.Tensor, which a service does not send")
        return None

    def _leaf(self, buffer: pickle.PickleBuffer) -> list[Any]:
        number = len(self._leaves)  # of the leaf that `_on_buffer` appends
        self._on_buffer(buffer)
        return [LEAF, number]

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        # The same reduction as for local workers. Any other form than a single buffer is a call, which is not sent.
        reduced = self._reduce_tensor(tensor)
        if len(reduced) != 2 or len(reduced[1]) != 1 or not isinstance(reduced[1][0], pickle.PickleBuffer):
            if why := why_unsendable(tensor):
                raise Unsendable(why)
            return self._tensor(tensor.resolve_conj().resolve_neg().clone())
        return self._leaf(reduced[1][0])

    def _array(self, array: np.ndarray[Any, Any]) -> list[Any]:
        # An array in Fortran's order is sent as it lies in memory. An array that is not contiguous is copied.
        order = "C" if array.flags.c_contiguous or not array.flags.f_contiguous else "F"
        contiguous: Any = array if order == "F" else np.ascontiguousarray(array)
        buffer = pickle.PickleBuffer(contiguous)
        return [*self._leaf(buffer), "array", array.dtype.str, list(array.shape), order]

    def _table(self, specs: list[LeafSpec], inside: int, length: int) -> bytes:
        if len(specs) > _MOST_LEAVES:
            raise TypeError(f"a batch that cannot be sent: it has {len(specs):,} tensors and arrays")
        rows = []
        for spec in specs:
            values: list[Any] = list(spec)
            if isinstance(spec, Dense | Strided):
                values[2] = _NAMES[spec.dtype]
            rows.append((LEAF_SPECS.index(type(spec)), values))
        return msgspec.msgpack.encode((rows, inside, length))


class BatchTemplate(Template):
    """A `Template` of a sender that is not trusted. Raises ValueError if its structure or its numbers are invalid."""

    __slots__ = ("_tree",)

    def __init__(self, template: bytes) -> None:
        super().__init__(template)
        self._tree: Any = None
        # Checked at once, before the task counts as answered: then another worker can do the task again. Later, when
        # the consumer takes the batch, it could only be an error.
        if self._inside < 0:
            self._read_tree(self._structure)

    def _read_tree(self, structure: bytes) -> None:
        self._tree = decode(structure)
        check(self._tree, [WireLeaf(spec.nbytes if isinstance(spec, Raw) else None) for spec in self._specs])

    def with_structure(self, memory: Callable[[], Memory]) -> Self:
        """Read and check a structure that is among the leaves. See `Template`."""
        if self._inside < 0:
            return self
        made = copy.copy(self)  # the template may serve later batches, whose structures differ
        # A copy: the memory may change after the check.
        made._read_tree(bytes(self._structure_in(memory())))
        return made

    def _read_table(self, table: bytes) -> tuple[Iterable[LeafSpec], int, int]:
        rows, inside, length = _tables.decode(table)
        return [_spec(kind, values) for kind, values in rows], inside, length

    def _with_leaves(self, anchor: Memory | None, leaves: list[Any]) -> Any:
        del anchor
        return build(self._tree, leaves)


def _spec(kind: int, values: list[Any]) -> LeafSpec:
    fields: list[Any] = [tuple(each) if type(each) is list else each for each in values]
    if LEAF_SPECS[kind] is not Raw:
        name = fields[2]
        if type(name) is not str or name not in _CODES:
            raise ValueError(f"a tensor of dtype {name!r:.40}, which this version of torch does not have")
        fields[2] = _CODES[name]
    make: Any = LEAF_SPECS[kind]
    spec: LeafSpec = make(*fields)
    # The table's type allows an integer, a text or sizes in every field. Which of them is right depends on the kind.
    for name, value in spec._asdict().items():
        if type(value) is not (tuple if name in ("shape", "stride") else int):
            raise ValueError(f"no part of a batch can be {spec!r:.200}")
    return spec


assert sys.byteorder == "little", "a service sends numbers as little-endian machines have them in memory"
