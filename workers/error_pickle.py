"""An error on its way out of a worker. Data path: worker: fetch -> [error_pickle] -> answer -> consumer."""

from __future__ import annotations

import os
import pickle
from typing import Any

from torch._utils import ExceptionWrapper

from asyncloader.errors import LoaderError
from asyncloader.workers.error_notes import take_notes

__all__ = ["pickle_error"]


def pickle_error(error: Exception, worker_id: int) -> bytes:
    """The error as the main process will raise it: ours as they are, others as torch wraps them."""
    where = f"in DataLoader worker process {worker_id}"
    notes = [] if isinstance(error, LoaderError) else take_notes(error)
    wrapper: Any = ExceptionWrapper(exc_info=(type(error), error, error.__traceback__), where=where)
    if isinstance(error, LoaderError):
        error.add_note(f"Raised {where}.\nOriginal {wrapper.exc_msg}")
        return pickle.dumps(error.with_traceback(None))
    # Not in torch's text, whose last line is the exception's own: `raise_worker_error` adds them again.
    wrapper.notes = [f"{note}, in worker {worker_id} (pid {os.getpid()})" for note in notes]
    try:
        data = pickle.dumps(wrapper)
        pickle.loads(data)
    except Exception:  # the type is local to a function, or does not unpickle: keep its name and text
        wrapper.exc_type = _LostType(type(error).__name__)
        data = pickle.dumps(wrapper)
    return data


class _LostType:
    """Stands for an exception type that cannot travel. It makes no exceptions; torch then makes a RuntimeError."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        raise TypeError(f"{self.__name__} could not be pickled")
