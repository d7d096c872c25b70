"""Makes the same calls on torch's loader and ours and compares the results: errors and warnings by type and text."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from asyncloader import AsyncDataLoader, DataLoader

MAKERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "sync": DataLoader, "asyncio": AsyncDataLoader}


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call, or the type and the text of its exception."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def messages(function: Callable[[], object]) -> list[tuple[type[Warning], str]]:
    """Return category and text of every warning of a call, in order, except Python 3.12's about a fork beside
    threads.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        function()
    return [(w.category, str(w.message)) for w in caught]


def steps(make: Any, dataset: Any, limit: int, **options: Any) -> list[Any]:
    """Return the outcomes of `iter` (if it fails) and up to `limit` calls of `next`, also after errors and ends."""
    torch.manual_seed(1)
    batches = outcome(iter, make(dataset, **options))
    if isinstance(batches, tuple):
        return [batches]
    found = [outcome(next, batches) for _ in range(limit)]
    shut_down(batches)
    return found


def shut_down(batches: Any) -> None:
    """End an iterator that has raised errors: torch's is in a cycle then, and takes 5 s when the collector finds it."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()
