"""How values travel between a loader and a service: typed and unexecutable, where a loader's own workers use pickle.

Data path: loader -> [dialect] -> lane -> [dialect] -> worker, and back.

An error is sent as its type's name, its text and its traceback. The loader raises Python's own types and asyncloader's
as what they are, and any other as a RuntimeError whose text names it: no constructor of the user's is called.
"""

from __future__ import annotations

import builtins
import os
import pickle
import traceback
from typing import Any

from torch._utils import ExceptionWrapper

from asyncloader import errors
from asyncloader.errors import LoaderError
from asyncloader.service.batches import BatchEncoder, BatchTemplate
from asyncloader.service.values import Unsendable, pack, unpack
from asyncloader.transports import errors as transport_errors
from asyncloader.workers.error_pickle import UnknownType
from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.error_notes import take_notes
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.tracebacks import hide_our_frames

__all__ = ["PLAIN", "PlainDialect"]

_TEXT = 1 << 16
"""Characters of a traceback that are sent, at most: its end."""


class PlainDialect:
    """The `Dialect` of a service."""

    def dumps(self, value: Any) -> bytes:
        """As `Dialect`. Raises `Unsendable`."""
        return pack(value)

    def loads(self, data: bytes) -> Any:
        """As `Dialect`."""
        return unpack(data)

    def dump_error(self, error: Exception, worker_id: int) -> bytes:
        """As `Dialect`."""
        ours = isinstance(error, LoaderError)
        notes = [] if ours else take_notes(error)
        notes = [f"{note}, in worker {worker_id} (pid {os.getpid()})" for note in notes]
        hide_our_frames(error)
        text = "".join(traceback.format_exception(error))[-_TEXT:]
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" or ours else f"{kind.__module__}.{kind.__qualname__}"
        return pack([ours, name, str(error)[-_TEXT:] if ours else "", text, worker_id, notes])

    def load_error(self, data: bytes) -> Any:
        """As `Dialect`."""
        try:
            ours, name, said, text, worker_id, notes = unpack(data)
            if type(worker_id) is not int:
                raise ValueError(f"a worker's number is {worker_id!r:.40}")
            where = f"in DataLoader worker process {worker_id}"
            kind = (_known(errors, name) or _known(transport_errors, name)) if ours else _known(builtins, name)
            notes = [str(note) for note in notes]
        except (TypeError, ValueError) as error:
            raise ValueError(f"broken stream: an error that cannot be read ({error})") from None
        if ours:
            raised = (RuntimeError if kind is None else kind)(str(said))
            raised.add_note(f"Raised {where}.\nOriginal {text}")
            return raised
        wrapper: Any = ExceptionWrapper.__new__(ExceptionWrapper)
        wrapper.exc_type = UnknownType(str(name)) if kind is None else kind
        wrapper.exc_msg, wrapper.where, wrapper.notes = str(text), where, notes
        return wrapper

    def template(self, data: bytes) -> BatchTemplate:
        """As `Dialect`."""
        return BatchTemplate(data)

    def encoder(self) -> BatchEncoder:
        """As `Dialect`."""
        return BatchEncoder()

    def from_pickle(self, data: bytes) -> bytes:
        """As `Dialect`. A cursor whose state cannot be sent says so, as one whose state cannot be pickled does."""
        value = pickle.loads(data)
        try:
            return pack(value)
        except Unsendable as error:
            if isinstance(value, tuple):
                cursor = Cursor(*value)
                return pack(tuple(cursor._replace(dataset=None, iterator=None, problem=f"its state {error}")))
            return pack(
                [record._replace(index=repr(record.index), substitute=repr(record.substitute)) for record in value]
            )

    def to_pickle(self, data: bytes) -> bytes:
        """As `Dialect`."""
        value = unpack(data)
        if isinstance(value, tuple):
            _check_cursor(value)
        elif not isinstance(value, list) or not all(isinstance(record, SkippedSample) for record in value):
            raise ValueError("broken stream: neither a cursor nor records of samples")
        return pickle.dumps(value, 5)


def _check_cursor(value: tuple[Any, ...]) -> None:
    kinds = (int, int, bool, object, object, str, str)
    if len(value) != len(kinds) or not all(isinstance(each, kind) for each, kind in zip(value, kinds, strict=True)):
        raise ValueError("broken stream: a cursor that cannot be read")


def _known(module: Any, name: Any) -> Any:
    kind = getattr(module, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


PLAIN = PlainDialect()
"""The dialect; it has no state."""
