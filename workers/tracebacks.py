"""Cuts out of a traceback what stands between the user's loop and the user's dataset.

Data path: none; where an exception leaves the loader, or a worker.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from pathlib import Path
from types import TracebackType

import torch.utils.data

_OURS = str(Path(__file__).parents[1]) + "/"
_BETWEEN = (
    _OURS,
    *(str(Path(package.__file__ or "").parent) + "/" for package in (torch.utils.data, asyncio, concurrent.futures)),
    contextlib.__file__,
    threading.__file__,
)
_MOST = 20  # exceptions of a chain

RELAY = "raise_worker_error"
"""The function that raises a worker's exception in the main process."""


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
