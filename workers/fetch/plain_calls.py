"""Finds functions of the user's that would have to be awaited, where they are called and not awaited.

Data path: none; checked when a loader is made, or before the call. A call of such a function would run none of its
code, without an error: its coroutine would be dropped, or become a batch.
"""

from __future__ import annotations

import inspect
from typing import Any


def is_coroutine_function(function: Any) -> bool:
    """Whether a call gives a coroutine, as far as the definition shows, also that of an object's `__call__`."""
    call = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def check_plain(name: str, function: Any) -> None:
    """Check that a function does not have to be awaited.

    Raises:
        TypeError: it does.
    """
    if is_coroutine_function(function):
        raise TypeError(
            f"{name} is a coroutine function, but it is called, and not awaited: make it a plain function, without "
            "async"
        )
