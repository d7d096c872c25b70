"""Calls the user's `worker_init_fn`.

Data path: worker start-up, before the first fetch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asyncloader.workers.fetch.error_notes import add_note


def call_worker_init(init: Callable[[int], Any] | None, number: int, *, awaits: bool) -> Any:
    """Call `worker_init_fn` with the number of a worker, or of a stream. Returns the awaitable that it returned; None:
    nothing is to be awaited.

    Args:
        init: the function; None: nothing is called.
        number: its argument.
        awaits: whether the worker has an event loop.

    Raises:
        TypeError: it returned an awaitable, and the worker has no event loop.
        Exception: what it raised.
    """
    if init is None:
        return None
    try:
        returned = init(number)
    except Exception as error:
        add_note(error, f"while calling worker_init_fn({number})")
        raise
    if returned is None or not inspect.isawaitable(returned):
        return None
    if awaits:
        return returned
    drop_awaitable(returned)
    raise TypeError(
        "worker_init_fn returned an awaitable, but the dataset is a blocking one, so its workers have no event "
        "loop to await it in: give a plain function, or a dataset with async methods"
    )


def drop_awaitable(returned: Any) -> None:
    """Do not await what `call_worker_init` returned."""
    if inspect.iscoroutine(returned):
        # Otherwise Python would warn that it was never awaited.
        returned.close()
