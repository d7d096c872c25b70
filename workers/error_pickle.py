"""Pickles what a worker's task raised, so that the main process can raise it.

Data path: worker: fetch -> [error_pickle] -> answer -> consumer.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from torch._utils import ExceptionWrapper

from asyncloader.errors import LoaderError
from asyncloader.workers.fetch.error_notes import take_notes
from asyncloader.workers.tracebacks import hide_our_frames

__all__ = ["UnknownType", "caught", "pickle_error"]


def pickle_error(error: Exception, worker_id: int) -> bytes:
    """Pickle an error as the main process raises it: a `LoaderError` as it is, others in torch's wrapper."""
    where = f"in DataLoader worker process {worker_id}"
    notes = [] if isinstance(error, LoaderError) else take_notes(error)
    hide_our_frames(error)
    wrapper: Any = ExceptionWrapper(exc_info=(type(error), error, error.__traceback__), where=where)
    if isinstance(error, LoaderError):
        error.add_note(f"Raised {where}.\nOriginal {wrapper.exc_msg}")
        return pickle.dumps(error.with_traceback(None))
    # Kept apart from torch's text, whose last line must be the exception's own; `raise_worker_error` adds them.
    wrapper.notes = [f"{note}, in worker {worker_id} (pid {os.getpid()})" for note in notes]
    return _pickled(wrapper)


def caught(where: str) -> Any:
    """The exception that is being handled, in torch's wrapper, which can be pickled whatever the exception's type."""
    return pickle.loads(_pickled(ExceptionWrapper(where=where)))


def _pickled(wrapper: Any) -> bytes:
    try:
        data = pickle.dumps(wrapper)
        pickle.loads(data)
    except Exception:  # a local type, or one that does not unpickle: keep its name and text
        wrapper.exc_type = UnknownType(wrapper.exc_type.__name__)
        data = pickle.dumps(wrapper)
    return data


class UnknownType:
    """Stands for an exception type that cannot be pickled. Calling it raises, so torch makes a RuntimeError instead."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        """Refuse."""
        raise TypeError(f"{self.__name__} could not be pickled")
