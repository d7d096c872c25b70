"""Defines how values travel between a loader and its workers: as pickle on one machine, typed for a service's workers.

Data path: loader -> [dialect] -> frame -> [dialect] -> worker, and back.

A `Dialect` is one object for both sides, so that both agree. `PickleDialect` is that of a loader's own processes, which
trust each other.
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol

from asyncloader.workers.error_pickle import pickle_error
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.memory.codec import Encoder, Template


class Dialect(Protocol):
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
        """Pack what a worker's task raised."""
        ...

    def load_error(self, data: bytes) -> Any:
        """Return what was raised, as an exception or in torch's wrapper of one."""
        ...

    def template(self, data: bytes) -> Template:
        """Read the template of a batch."""
        ...

    def encoder(self) -> Encoder:
        """Make what encodes a worker's batches."""
        ...

    def from_pickle(self, data: bytes) -> bytes:
        """Turn the worker's own pickle of a cursor, or of records of samples that raised, into what is sent."""
        ...

    def to_pickle(self, data: bytes, *, records: bool = False) -> bytes:
        """Turn a cursor that was received, or records of samples, into a pickle of this process's own."""
        ...


class PickleDialect:
    """Values as pickle, errors as torch pickles them."""

    trusted = True

    def dumps(self, value: Any) -> bytes:
        """As `Dialect`."""
        return pickle.dumps(value, 5)

    def loads(self, data: bytes) -> Any:
        """As `Dialect`."""
        return pickle.loads(data)

    def load_start(self, data: bytes) -> EpochStart:
        """As `Dialect`."""
        return EpochStart(*pickle.loads(data))

    def dump_error(self, error: Exception, worker_id: int) -> bytes:
        """As `Dialect`."""
        return pickle_error(error, worker_id)

    load_error = loads

    def template(self, data: bytes) -> Template:
        """As `Dialect`."""
        return Template(data)

    def encoder(self) -> Encoder:
        """As `Dialect`."""
        return Encoder()

    def from_pickle(self, data: bytes) -> bytes:
        """The same."""
        return data

    def to_pickle(self, data: bytes, *, records: bool = False) -> bytes:
        """The same."""
        del records
        return data


PICKLE: Dialect = PickleDialect()
"""The dialect of a loader's own worker processes."""
