"""How values travel between a loader and its worker threads: as they are, by a number in their frame.

Data path: loader -> [object_codec] -> link -> worker thread, and back.

Only the states of a dataset are pickled: a state is a snapshot, and the dataset goes on to change what it returned.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from asyncloader.workers.error_pickle import caught_in
from asyncloader.workers.fetch.dataset_state import CursorPacker, CursorPickler, PackedCursor
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.memory.batch_bytes import batch_nbytes
from asyncloader.workers.memory.codec import Encoded, Encoder, Template
from asyncloader.workers.threads.link import Table

_MOST_LEFT = 64
"""Values in a table from which on it is looked through for those that will not be taken."""


class ObjectCodec:
    """One side's codec; see `MessageCodec`.

    Args:
        sent: the values that this side sends.
        received: those that it receives.
    """

    trusted = True

    def __init__(self, sent: Table, received: Table) -> None:
        self._received = received
        self.dumps, self.loads = sent.put, received.take

    def load_start(self, data: bytes) -> EpochStart:
        """Return the start of an epoch. Tasks that were sent before are void."""
        self._received.drop_before(data)
        return EpochStart(*self.loads(data))

    def dump_error(self, error: Exception, worker_id: int) -> bytes:
        """Send an error as the consumer raises it, without its frames: see `error_pickle.caught_in`."""
        return self.dumps(caught_in(error, worker_id, "thread", "a thread"))

    def dump_records(self, records: Sequence[SkippedSample]) -> bytes:
        """Send the records of samples that raised."""
        return self.dumps(records)

    def load_records(self, data: bytes) -> Sequence[SkippedSample]:
        """Return records."""
        records: Sequence[SkippedSample] = self.loads(data)
        return records

    def load_error(self, data: bytes) -> Any:
        """Return an error; the same may be sent several times."""
        self._received.drop_before(data)
        # A copy: an error that is raised refers to the frames that it passed.
        return copy.copy(self._received.peek(data))

    def template(self, data: bytes) -> ObjectTemplate:
        """Return the batch, in place of a template."""
        # The loop's side reads its frames in order. An error of an epoch that was abandoned is not read.
        if len(self._received) > _MOST_LEFT:
            self._received.drop_before(data)
        return ObjectTemplate(self.loads(data))

    def encoder(self) -> ObjectEncoder:
        """Make the encoder of a worker's batches."""
        return ObjectEncoder(self)

    def cursor_packer(self) -> CursorPacker:
        """Return a `CursorPickler`."""
        return CursorPickler()

    def load_cursor(self, data: bytes) -> PackedCursor:
        """Return the cursor."""
        return PackedCursor(data)


class ObjectEncoder(Encoder):
    """Encodes a batch as itself."""

    def __init__(self, codec: ObjectCodec) -> None:
        self._codec = codec  # nothing of the base's, which is for memory that others read

    def encode(self, value: Any) -> Encoded:
        """Return what stands for the batch. Its bytes are counted, and are nowhere else."""
        return Encoded(self._codec.dumps(value), batch_nbytes(value), [], 0)


class ObjectTemplate(Template):
    """A batch that is made already."""

    __slots__ = ("_batch",)

    lasting = False

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def build(self, anchor: Any) -> Any:
        """Return the batch. Every call returns the same."""
        del anchor
        return self._batch
