"""Says whether a function of the user's has to be awaited, as far as that can be seen before it is called. Pure.

Data path: none; asked when a loader is made, or before the first fetch.

The one rule: a function is awaited if it is defined by ``async def``, wraps such a function (`functools.wraps`,
`functools.partial`), has an asynchronous ``__call__``, or is annotated to return an ``Awaitable`` or a ``Coroutine``.
Where a function is called and not awaited, a call of such a function would run none of its code, without an error: its
coroutine would be dropped, or become a batch.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

_AWAITABLES = ("Awaitable", "Coroutine")  # other names may be those of a sample's type


def is_awaited(function: Any) -> bool:
    """Whether a call gives something to await, as far as the definition shows. See the module."""
    if not callable(function):
        return False
    if type(function) is types.FunctionType and not vars(function):
        # It wraps no function and has no mark, so that its code says it: this is asked for each epoch.
        if function.__code__.co_flags & inspect.CO_COROUTINE:
            return True
    elif inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004
    ):
        return True
    returned = getattr(function, "__annotations__", {}).get("return")
    # A string with postponed annotations, else a type or a generic alias.
    text = returned if isinstance(returned, str) else getattr(returned, "__name__", None) or repr(returned)
    return text.partition("[")[0].rpartition(".")[2] in _AWAITABLES


def check_plain(name: str, function: Any) -> None:
    """Check that a function does not have to be awaited.

    Raises:
        TypeError: it does.
    """
    if is_awaited(function):
        raise TypeError(
            f"{name} is a coroutine function, but it is called, and not awaited: make it a plain function, without "
            "async"
        )
