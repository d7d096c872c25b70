"""Several calls at once, which succeed or fail as one. Data path: transport -> [together] -> calls of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["together"]

_R = TypeVar("_R")


async def together(calls: Iterable[Coroutine[Any, Any, _R]]) -> list[_R]:
    """Await all at once, and give what they return, in order.

    Raises:
        The error of the first that fails, as it is. The others were cancelled by it, and have ended.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]
