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

from msgspec import Meta
from torch._utils import ExceptionWrapper

from asyncloader import errors
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
from asyncloader.workers.ipc.peer_text import block_of, line_of

_TEXT = 1 << 16
"""Characters of a traceback that are sent and accepted, at most. Its end is kept."""
_NOTE, _MOST_NOTES = 4000, 32
_NAME = 300


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
        values = unpack(data)
        if type(values) is not tuple or len(values) != len(EpochStart._fields):
            raise ValueError("broken stream: the start of an epoch that cannot be read")
        start = EpochStart(*values)
        if type(start.streams) is not tuple or len(start.streams) > MOST_STREAMS:
            raise ValueError("broken stream: the start of an epoch that cannot be read")
        _check_start(start)
        for each in start.streams:
            if type(each) is not EpochStart or type(each.streams) is not tuple or each.streams:
                raise ValueError("broken stream: the start of a stream that cannot be read")
            _check_start(each)
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
        records = unpack(data)
        if type(records) is not list or not records or not all(map(_is_record, records)):
            raise ValueError("broken stream: records of samples that cannot be read")
        return list(map(_readable, records))


def _pack_cursor(cursor: Cursor) -> PackedCursor:
    try:
        data = pack(tuple(cursor))
    except Unsendable as error:
        data = pack(tuple(cursor._replace(dataset=None, iterator=None, problem=f"its state {error}")))
    return PackedCursor(data, unpack)


def _readable(record: SkippedSample) -> SkippedSample:
    """Return the record with texts that are safe to log."""
    return record._replace(
        error=line_of(record.error, ERROR_CHARACTERS), traceback=block_of(record.traceback, TRACEBACK_CHARACTERS)
    )


def _check_start(start: EpochStart) -> None:
    right = (
        _is_count(start.shared_seed, None)
        and _is_count(start.epoch)
        and type(start.epoch_set) is bool
        and _is_count(start.skip)
        and _is_count(start.errors)
        and _is_count(start.stream_key)
        and type(start.message) is bytes
        and not start.message  # a loader's own workers would unpickle it
    )
    if not right:
        raise ValueError("broken stream: the start of an epoch that cannot be read")
    if start.cursor is not None:
        if type(start.cursor) is not Cursor:
            raise ValueError("broken stream: a cursor that cannot be read")
        _check_cursor(start.cursor)


def _check_cursor(value: Any) -> None:
    if type(value) not in (tuple, Cursor) or len(value) != len(Cursor._fields):
        raise ValueError("broken stream: a cursor that cannot be read")
    batches, samples, ended, _, _, problem, itself = value
    texts = type(problem) is str and type(itself) is str and itself in ("", "within", "before", "ended")
    if not (_is_count(batches) and _is_count(samples) and type(ended) is bool and texts):
        raise ValueError("broken stream: a cursor that cannot be read")


def _is_record(value: Any) -> bool:
    return (
        type(value) is SkippedSample
        and _is_count(value.position, None)
        and _is_count(value.worker)
        and _is_count(value.pid)
        and all(type(text) is str for text in (value.error, value.traceback, value.action))
        and value.action in ("skipped", "refilled", "replaced")
        and len(value.error) <= ERROR_CHARACTERS
        and len(value.traceback) <= TRACEBACK_CHARACTERS
    )


def _is_count(value: Any, *others: Any) -> bool:
    return (type(value) is int and 0 <= value < 1 << 64) or (value is None and None in others)


def _known(module: Any, name: Any) -> Any:
    # Of the builtins only `Exception`s: a node must not be able to end the trainer with SystemExit.
    kind = getattr(module, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


MSGPACK = MsgpackCodec()
"""The codec; it has no state."""
