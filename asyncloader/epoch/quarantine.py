"""Turns a task that killed its workers into an error, or into what `on_error` says.

Data path: consumer -> [quarantine] -> the user. Runs in the iterating thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from asyncloader.epoch.reassignment import quarantined
from asyncloader.errors import TaskQuarantined
from asyncloader.events import Poisoned, PositionedIndex, bare_index
from asyncloader.options.declaration import OnError
from asyncloader.workers.fetch.sample_errors import ERROR_CHARACTERS, TRACEBACK_CHARACTERS, SkippedSample


class Quarantine:
    """Resolves the poisoned tasks of one loader.

    Args:
        on_error: the loader's option.
        collate_fn: the loader's; collates the substitutes.
        batched: whether a task's index is a list of indices.
        replicas: distance between the positions of neighbouring samples.
    """

    def __init__(self, on_error: OnError, collate_fn: Any, *, batched: bool, replicas: int) -> None:
        self._on_error = on_error
        self._collate_fn = collate_fn
        self._batched = batched
        self._replicas = replicas

    def settle(self, poisoned: Poisoned) -> tuple[Any, list[SkippedSample]]:
        """The batch of substitutes (None without substitutes), and a record per sample.

        Raises:
            TaskQuarantined: `on_error` is "raise".
            Exception: any error of the `on_error` function or of `collate_fn`.
        """
        error = quarantined(poisoned)
        index = poisoned.task.index
        first = index.position if isinstance(index, PositionedIndex) else None
        index = bare_index(index)
        if self._on_error == "raise":
            raise error
        indices: Sequence[Any] = index if self._batched else [index]
        positions: Sequence[int | None] = (
            first
            if isinstance(first, tuple)
            else [None if first is None else first + offset * self._replicas for offset in range(len(indices))]
        )
        # Without the standard error, for which the record has a field of its own.
        brief = TaskQuarantined(error.indices, error.deaths, advice=error.advice)
        text = f"{type(brief).__name__}: {brief}"[:ERROR_CHARACTERS]
        substitutes: list[Any] = []
        records: list[SkippedSample] = []
        for one, position in zip(indices, positions, strict=True):
            if callable(self._on_error):
                substitute: Any = self._on_error(one, error)
                if inspect.iscoroutine(substitute):
                    substitute.close()
                    raise error  # there is no worker left whose loop could await it
                substitutes.append(substitute)
            action = "replaced" if callable(self._on_error) else "skipped"
            worker, pid, _ = error.deaths[-1]
            records.append(
                SkippedSample(one, position, worker, pid, text, error.stderr[-TRACEBACK_CHARACTERS:], action, None)
            )
        if not callable(self._on_error):
            return None, records
        return self._collate_fn(substitutes if self._batched else substitutes[0]), records
