"""Defines how values travel between a loader and its workers: as pickle on one machine, typed for a service's workers.

Data path: loader -> [codec] -> frame -> [codec] -> worker, and back.

A `MessageCodec` is one object for both sides, so that both agree. `PickleCodec` is that of a loader's own processes,
which trust each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

from asyncloader.base.events import PackedCursor, SkippedSample
from asyncloader.workers.fetch.dataset_state import CursorPacker, pickle_cursor
from asyncloader.workers.fetch.error_pickle import pickle_error
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.template import Template


class MessageCodec(Protocol):
    """How values become bytes. Functions that read raise ValueError for bytes that cannot be read."""

    trusted: bool
    """Whether the worker is a process of ours: it may send pickles, and its own log."""

    def dumps(self, value: Any) -> bytes:
        """Pack an index, the start of an epoch, an assignment: whatever is sent as a plain value."""
        ...

    def loads(self, data: bytes) -> Any:
        """Unpack a value."""
        ...

    def load_start(self, data: bytes) -> EpochStart:
        """Unpack the start of an epoch."""
        ...

    def dump_error(self, error: Exception, worker_id: int) -> bytes:
        """Pack the exception that a worker's task raised."""
        ...

    def load_error(self, data: bytes) -> Any:
        """Return the exception that was raised, or torch's wrapper of it."""
        ...

    def template(self, data: bytes) -> Template:
        """Read the template of a batch."""
        ...

    def encoder(self) -> Encoder:
        """Make the encoder of a worker's batches."""
        ...

    def cursor_packer(self) -> CursorPacker:
        """Make the function that packs the cursors of a worker's dataset."""
        ...

    def load_cursor(self, data: bytes) -> PackedCursor:
        """Return a cursor that was received. It is checked here, and unpacked when its value is asked for."""
        ...

    def dump_records(self, records: Sequence[SkippedSample]) -> bytes:
        """Pack the records of samples that raised. An index that cannot be packed is replaced by its `repr`."""
        ...

    def load_records(self, data: bytes) -> Sequence[SkippedSample]:
        """Unpack records of samples."""
        ...


class PickleCodec:
    """Values as pickle, errors as torch pickles them."""

    trusted = True

    def dumps(self, value: Any) -> bytes:
        """Pickle the value."""
        return pickle.dumps(value, 5)

    def loads(self, data: bytes) -> Any:
        """Unpickle a value."""
        return pickle.loads(data)

    def load_start(self, data: bytes) -> EpochStart:
        """Unpickle the start of an epoch."""
        return EpochStart(*pickle.loads(data))

    def dump_error(self, error: Exception, worker_id: int) -> bytes:
        """Pickle the error as `pickle_error` does."""
        return pickle_error(error, worker_id)

    load_error = loads

    def template(self, data: bytes) -> Template:
        """Return a `Template`."""
        return Template(data)

    def encoder(self) -> Encoder:
        """Return an `Encoder`."""
        return Encoder()

    def cursor_packer(self) -> CursorPacker:
        """Return `pickle_cursor`."""
        return pickle_cursor

    def load_cursor(self, data: bytes) -> PackedCursor:
        """Return the cursor, unchecked: a worker of ours is trusted."""
        return PackedCursor(data)

    def dump_records(self, records: Sequence[SkippedSample]) -> bytes:
        """Pickle the records."""
        try:
            return pickle.dumps(records, 5)
        except Exception:  # an index that cannot be pickled (inherited by fork)
            return pickle.dumps([each._replace(index=repr(each.index)) for each in records], 5)

    load_records = loads


PICKLE: MessageCodec = PickleCodec()
"""The codec of a loader's own worker processes."""
