"""Packs values between a loader and a service's workers with their types. Reading them executes no code, unlike pickle.

Data path: loader -> [msgpack_codec] -> worker connection -> [msgpack_codec] -> worker, and back.

An error is sent as its type's name, its text and its traceback. The loader raises Python's and asyncloader's own types,
and for any other type a RuntimeError whose text names the type: no constructor of the user is called.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from torch._utils import ExceptionWrapper

from asyncloader import errors
from asyncloader.base.peer_text import block_of, line_of
from asyncloader.errors import LoaderError
from asyncloader.service.protocol.msgpack_batches import BatchEncoder, BatchTemplate
from asyncloader.service.protocol.msgpack_values import Unsendable, pack
from asyncloader.service.protocol.records import Name, pack_record, read_record
from asyncloader.service.protocol.unpacking import unpack
from asyncloader.transports import errors as transport_errors
from asyncloader.workers.error_pickle import UnknownType, describe
from asyncloader.workers.fetch.dataset_kinds import MOST_STREAMS
from asyncloader.workers.fetch.dataset_state import Cursor, CursorPacker, PackedCursor
from asyncloader.workers.fetch.error_notes import take_notes
from asyncloader.workers.fetch.sample_errors import ERROR_CHARACTERS, TRACEBACK_CHARACTERS, SkippedSample
from asyncloader.workers.fetch.setup import EpochStart

_TEXT = 1 << 16
"""Characters of a traceback that are sent and accepted, at most. Its end is kept."""
_NOTE, _MOST_NOTES = 4000, 32
_NAME = 300
_ACTIONS = ("skipped", "refilled", "replaced")


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
        if len(start.streams) > MOST_STREAMS:
            raise _BrokenRecord
        streams = tuple(_checked(each, EpochStart) for each in start.streams)
        for each in (start, *streams):
            numbers = each.shared_seed or 0, each.epoch, each.skip, each.errors, each.stream_key
            if not _are_counts(*numbers) or (each is not start and each.streams):
                raise _BrokenRecord
            if each.message:  # a loader's own workers would unpickle it
                raise _BrokenRecord
            if each.cursor is not None:
                _check_cursor(each.cursor)
        return start._replace(streams=streams)

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
