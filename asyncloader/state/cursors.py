"""Computes positions, and converts the cursors of a dataset's copies, for `Progress`.

Data path: dataset_state -> [cursors] -> progress.
"""

from __future__ import annotations

from asyncloader.workers.fetch.dataset_state import Cursor, PackedCursor


def value_cursor(cursor: PackedCursor | None) -> Cursor | None:
    """Return the cursor of its packed form."""
    return None if cursor is None else cursor.value


def marked(step: int, beyond: set[int], number: int) -> tuple[int, set[int]]:
    """The position `step`, `beyond` with one more step, as a new position."""
    beyond = {*beyond, number}
    while step in beyond:
        beyond.remove(step)
        step += 1
    return step, beyond
