"""Waiting for a coroutine where nothing may be awaited. Data path: none; before the first batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_in_thread"]

T = TypeVar("T")


def run_in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop of its own, in a thread that has ended when this returns. Works under a running loop, too."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(coroutine))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="asyncloader-measure")
    thread.start()
    thread.join()
    if failure:
        try:
            raise failure[0]
        finally:
            del failure
    return result[0]
