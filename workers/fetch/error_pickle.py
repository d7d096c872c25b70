"""Pickles the exception of a worker's task, so that the main process can raise it.

Data path: worker: fetch -> [error_pickle] -> answer -> consumer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import os
import pickle
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.utils.data
from torch._utils import ExceptionWrapper

from asyncloader.errors import LoaderError
from asyncloader.workers.fetch.error_notes import take_notes

_OURS = str(Path(__file__).parents[2]) + "/"
_BETWEEN = (
    _OURS,
    *(str(Path(package.__file__ or "").parent) + "/" for package in (torch.utils.data, asyncio, concurrent.futures)),
    contextlib.__file__,
    threading.__file__,
)
_MOST = 20  # exceptions of a chain

RELAY = "raise_worker_error"
"""The function that raises a worker's exception in the main process."""


def said_again(error: BaseException) -> BaseException:
    """Return a copy of an error to be raised later, without its traceback, which would keep the consumer's frames."""
    try:
        return copy.copy(error)
    except Exception:  # a class of the user's that cannot be copied
        return RuntimeError(f"{type(error).__name__}: {error}")


def hide_our_frames(error: BaseException) -> None:
    """Take the frames of asyncloader, asyncio and the like out of an exception, and out of those that caused it or
    are in its group.

    Kept are all frames of other code, and the innermost one, where it was raised. Kept whole is an exception that looks
    like a fault of the loader: of a type that is not asyncloader's, but raised by it. Where the exception is then
    raised again by a plain ``raise``, the function that does so is not in the traceback, either.
    """
    # A list, compared by identity: a class of exceptions that defines `__eq__` has no hash.
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo and len(seen) < _MOST:
        one = todo.pop()
        if one is not None and not any(one is other for other in seen):
            seen.append(one)
            todo += [one.__cause__, None if one.__suppress_context__ else one.__context__]
            todo += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    for one in seen:
        # Not assigned: an exception may refuse that, as a frozen dataclass does.
        BaseException.with_traceback(one, _without_ours(one))


def _without_ours(error: BaseException) -> TracebackType | None:
    steps = []
    step = error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    if not steps:
        return None
    last = steps[-1].tb_frame.f_code
    relayed = last.co_name == RELAY
    if last.co_filename.startswith(_OURS) and not relayed and not type(error).__module__.startswith("asyncloader."):
        return error.__traceback__
    found: TracebackType | None = None
    for step in reversed(steps):
        if (step is steps[-1] and not relayed) or not step.tb_frame.f_code.co_filename.startswith(_BETWEEN):
            found = TracebackType(found, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return found


def pickle_error(error: Exception, worker_id: int) -> bytes:
    """Pickle an error as the main process raises it: a `LoaderError` as it is, others in torch's wrapper."""
    sent = caught_in(error, worker_id, "process", f"pid {os.getpid()}")
    return pickle.dumps(sent) if isinstance(sent, LoaderError) else _pickled(sent)


def caught_in(error: Exception, worker_id: int, kind: str, place: str) -> Any:
    """Return the error of a worker that is this `kind` of thing, at this `place`, as the consumer gets it, without its
    frames: a `LoaderError` as it is, others in torch's wrapper.
    """
    where = f"in DataLoader worker {kind} {worker_id}"
    notes = [] if isinstance(error, LoaderError) else take_notes(error)
    # Without `__init__`, which would format the traceback with the frames of ours in it.
    wrapper: Any = ExceptionWrapper.__new__(ExceptionWrapper)
    wrapper.exc_type, wrapper.exc_msg, wrapper.where = type(error), describe(error), where
    if isinstance(error, LoaderError):
        # As a note, because pickle drops the traceback.
        error.add_note(f"Raised {where}.\nOriginal {wrapper.exc_msg}")
        return error.with_traceback(None)
    # Kept apart from torch's text, whose last line must be the exception's own; `raise_worker_error` adds them.
    wrapper.notes = [f"{note}, in worker {worker_id} ({place})" for note in notes]
    return wrapper


def describe(error: BaseException) -> str:
    """Return the exception with its traceback as text, without our frames. Whatever its class does, this succeeds."""
    for chain in (True, False):
        with contextlib.suppress(Exception):  # its own methods raise, or its causes are too many for the stack
            hide_our_frames(error)
            return "".join(traceback.format_exception(error, chain=chain))
    # By the method of the base: the class's own may raise.
    frames = "".join(traceback.format_tb(BaseException.__getattribute__(error, "__traceback__")))
    text = "its text cannot be made"
    with contextlib.suppress(Exception):
        text = str(error)
    return f"Traceback (most recent call last):\n{frames}{_name(type(error))}: {text}\n"


def caught(where: str) -> Any:
    """The exception that is being handled, in torch's wrapper, which can be pickled whatever the exception's type."""
    return pickle.loads(_pickled(ExceptionWrapper(where=where)))


def _pickled(wrapper: Any) -> bytes:
    try:
        data = pickle.dumps(wrapper)
        # Tried here: in the main process an error of unpickling would take the place of the user's.
        pickle.loads(data)
    except Exception:  # a local type, or one that does not unpickle: keep its name and text
        wrapper.exc_type = UnknownType(_name(wrapper.exc_type))
        data = pickle.dumps(wrapper)
    return data


def _name(kind: Any) -> str:
    try:
        return str(kind.__name__)
    except Exception:  # the metaclass's
        return "an exception"


def unwrapped(wrapper: Any) -> Exception:
    """Make the exception that stands for a worker's: of its type if that can be made of a text, as torch makes it, else
    a RuntimeError with the same text.

    torch calls a type that has a `message` with an argument of that name, and raises what that raises: a TypeError for
    an ExceptionGroup, and for a class with a constructor of its own.
    """
    kind = wrapper.exc_type
    try:
        wrapper.reraise()
    except Exception as error:
        with contextlib.suppress(Exception):  # its `__str__` may raise: there would be no text at all
            if (type(error) is RuntimeError or (isinstance(kind, type) and isinstance(error, kind))) and str(error):
                return error
    return RuntimeError(f"Caught {_name(kind)} {wrapper.where}.\nOriginal {wrapper.exc_msg}")


class UnknownType:
    """Stands for an exception type that cannot be pickled. Calling it raises, so torch makes a RuntimeError instead."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any) -> Any:
        """Refuse."""
        raise TypeError(f"{self.__name__} could not be pickled")


class PickledStartError(Exception):
    """Carries the pickled error of a worker's start-up to where its tasks are answered."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(payload)
        self.payload = payload
