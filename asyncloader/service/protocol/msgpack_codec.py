"""Packs batches and other values between a loader and a service's workers. Reading executes no code, unlike pickle.

Data path: loader -> [msgpack_codec] -> worker connection -> [msgpack_codec] -> worker, and back.

The leaves of a batch are those of local workers; the structure is typed instead of a pickle. A template is the length
of a table (4 bytes, little-endian), the table, and the structure, both packed as MessagePack. The table has the place
and the kind of each leaf, with dtypes by name, so that both sides may have torch versions with different dtypes. A
structure of more than 32 KB is stored at an offset among the leaves.

An error is sent as its type's name, its text and its traceback. The loader raises Python's and asyncloader's own types,
and for any other type a RuntimeError whose text names the type: no constructor of the user is called.
"""

from __future__ import annotations

import builtins
import copy
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch._utils import ExceptionWrapper

from asyncloader import errors
from asyncloader.base.events import Cursor, PackedCursor, SkippedSample
from asyncloader.base.peer_text import block_of, line_of
from asyncloader.errors import LoaderError
from asyncloader.service.protocol.msgpack_values import LEAF, Unsendable, pack, why_unsendable
from asyncloader.service.protocol.records import Name, pack_record, read_record
from asyncloader.service.protocol.unpacking import WireLeaf, build, check, decode, unpack
from asyncloader.transports import errors as transport_errors
from asyncloader.workers.fetch.dataset_state import CursorPacker
from asyncloader.workers.fetch.error_notes import take_notes
from asyncloader.workers.fetch.error_pickle import UnknownType, describe
from asyncloader.workers.fetch.sample_errors import ERROR_CHARACTERS, TRACEBACK_CHARACTERS
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.leaves import DTYPES, LEAF_SPECS, Dense, LeafSpec, Raw, Strided
from asyncloader.workers.ipc.template import Memory, Template

assert sys.byteorder == "little", "a service sends numbers as little-endian machines have them in memory"

_TEXT = 1 << 16
"""Characters of a traceback that are sent and accepted, at most. Its end is kept."""
_NOTE, _MOST_NOTES = 4000, 32
_NAME = 300
_ACTIONS = ("skipped", "refilled", "replaced")


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


class _BrokenRecord(ValueError):
    def __init__(self) -> None:
        super().__init__("broken stream: a start of an epoch, a cursor or records of samples that cannot be read")


class _Raised(NamedTuple):
    """The error of a task.

    Attributes:
        ours: whether its type belongs to asyncloader.
        name: its type's name.
        said: its text, if its type belongs to asyncloader.
        text: its traceback.
        worker: the number of the worker.
        notes: asyncloader's notes for the user.
    """

    ours: bool
    name: Name
    said: str
    text: str
    worker: int
    notes: Annotated[list[str], Meta(max_length=1000)]


class MsgpackCodec:
    """The `MessageCodec` of a service."""

    trusted = False

    dumps, loads = staticmethod(pack), staticmethod(unpack)

    def dump_error(self, error: Exception, worker_id: int) -> bytes:
        """Pack an error as its type's name, text and traceback."""
        ours = isinstance(error, LoaderError)
        notes = [] if ours else take_notes(error)
        notes = [f"{note}, in worker {worker_id} (pid {os.getpid()})" for note in notes]
        text = describe(error)[-_TEXT:]
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" or ours else f"{kind.__module__}.{kind.__qualname__}"
        said = str(error)[-_TEXT:] if ours else ""
        return pack_record(_Raised(ours, name[:_NAME], said, text, worker_id, notes))

    def load_error(self, data: bytes) -> Any:
        """Return the error as an exception, or in torch's wrapper of an exception."""
        ours, name, said, text, worker_id, notes = read_record(_Raised, data)
        where = f"in DataLoader worker process {worker_id}"
        kind = (_known(errors, name) or _known(transport_errors, name)) if ours else _known(builtins, name)
        name, said, text = line_of(name), block_of(said, _TEXT), block_of(text, _TEXT)
        notes = [line_of(note, _NOTE) for note in notes[:_MOST_NOTES]]
        if ours:
            raised = (RuntimeError if kind is None else kind)(said)
            raised.add_note(f"Raised {where}.\nOriginal {text}")
            return raised
        # Without its constructor, which would format an exception of this process.
        wrapper: Any = ExceptionWrapper.__new__(ExceptionWrapper)
        wrapper.exc_type = UnknownType(name) if kind is None else kind
        wrapper.exc_msg, wrapper.where, wrapper.notes = text, where, notes
        return wrapper

    def load_start(self, data: bytes) -> EpochStart:
        """Unpack and check the start of an epoch. Raises ValueError."""
        start: EpochStart = _checked(unpack(data), EpochStart)
        # `message`: a loader's own workers would unpickle it. `streams`: no service reads a dataset that has them.
        numbers = start.shared_seed or 0, start.epoch, start.skip, start.errors, start.stream_key
        if not _are_counts(*numbers) or start.message or start.streams:
            raise _BrokenRecord
        if start.cursor is not None:
            _check_cursor(start.cursor)
        return start

    def template(self, data: bytes) -> BatchTemplate:
        """Read and check the template of a batch. Raises ValueError."""
        return BatchTemplate(data)

    def encoder(self) -> BatchEncoder:
        """Make the encoder of a worker's batches."""
        return BatchEncoder()

    def cursor_packer(self) -> CursorPacker:
        """Return a function that packs cursors. A state that cannot be sent is replaced by a text that says so."""
        return _pack_cursor

    def load_cursor(self, data: bytes) -> PackedCursor:
        """Check a packed cursor. Raises ValueError."""
        # Unpacked here only to be checked: an answer that cannot be read must not count as one. The bytes are kept,
        # because the cursor of the next batch most often replaces this cursor before its value is asked for.
        _check_cursor(unpack(data))
        return PackedCursor(data, unpack)

    def dump_records(self, records: Sequence[SkippedSample]) -> bytes:
        """Pack the records of samples that raised; indices that cannot be sent as their text."""
        try:
            return pack(records)
        except Unsendable:
            return pack([each._replace(index=repr(each.index), substitute=repr(each.substitute)) for each in records])

    def load_records(self, data: bytes) -> Sequence[SkippedSample]:
        """Unpack and check records of samples that raised. Raises ValueError."""
        values = unpack(data)
        if type(values) is not list or not values:
            raise _BrokenRecord
        records: list[SkippedSample] = [_checked(each, SkippedSample) for each in values]
        for each in records:
            if not _are_counts(each.position or 0, each.worker, each.pid) or each.action not in _ACTIONS:
                raise _BrokenRecord
        return [
            each._replace(  # texts that are safe to log
                error=line_of(each.error, ERROR_CHARACTERS), traceback=block_of(each.traceback, TRACEBACK_CHARACTERS)
            )
            for each in records
        ]


def _pack_cursor(cursor: Cursor) -> PackedCursor:
    try:
        data = pack(tuple(cursor))
    except Unsendable as error:
        data = pack(tuple(cursor._replace(dataset=None, iterator=None, problem=f"its state {error}")))
    return PackedCursor(data, unpack)


def _checked(value: Any, kind: Any) -> Any:
    """Check the fields of a named tuple by the annotations of this type, and return one. Raises ValueError."""
    try:
        # As a plain tuple: msgspec takes an object of the type as it is.
        # `builtin_types`: no text is taken for the bytes that it may encode.
        return msgspec.convert(tuple(value) if isinstance(value, tuple) else None, kind, builtin_types=(bytes,))
    except msgspec.ValidationError:
        raise _BrokenRecord from None


def _check_cursor(value: Any) -> None:
    cursor: Cursor = _checked(value, Cursor)
    if not _are_counts(cursor.batches, cursor.samples) or cursor.itself not in ("", "within", "before", "ended"):
        raise _BrokenRecord


def _are_counts(*numbers: int) -> bool:
    return all(0 <= number < 1 << 64 for number in numbers)


def _known(module: Any, name: Any) -> Any:
    # Of the builtins only `Exception`s: a node must not be able to end the trainer with SystemExit.
    kind = getattr(module, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


MSGPACK = MsgpackCodec()
"""The codec; it has no state."""
