"""Where each worker's copy of the dataset stands, by what it has answered; and where a replacement begins.

Data path: beside the pipeline. Pure.

What a worker answered is in the main process, and will be delivered whatever becomes of the worker: so its replacement
goes on behind its last *answer*. (A saved state goes on behind the last *delivery*; that is `progress.py`'s.)
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.setup import EpochStart

__all__ = ["ResumePoints"]


class ResumePoints:
    """The copies' places in one epoch.

    Args:
        starts: what each worker began the epoch with.
        iterable: whether the dataset is iterated; a place in it must be found again.
        replays: a stream without a state may be read again from its beginning.
    """

    def __init__(self, starts: Sequence[EpochStart], *, iterable: bool, replays: bool) -> None:
        self._starts = starts
        self._iterable = iterable
        self._replays = replays
        self._answered = [0] * len(starts)
        self._cursors = [b""] * len(starts)
        self._failures: list[list[int]] = [[] for _ in starts]  # how many batches had been made at each error

    def failed(self, worker: int) -> None:
        """A worker read a batch that raised."""
        self._failures[worker].append(self._made(worker))

    def _made(self, worker: int) -> int:
        began = self._starts[worker]
        return (0 if began.cursor is None else began.cursor.batches) + began.skip + self._answered[worker]

    def answered(self, worker: int, cursor: bytes) -> None:
        """A worker made a batch; `cursor` is its pickled cursor, if it took one then."""
        self._answered[worker] += 1
        if cursor:
            self._cursors[worker] = cursor

    def _cursor(self, worker: int) -> Cursor | None:
        data = self._cursors[worker]
        return Cursor(*pickle.loads(data)) if data else self._starts[worker].cursor

    def obstacle(self, worker: int) -> str:
        """Why a replacement cannot go on where the worker was; empty if it can."""
        if not self._iterable or self._replays or not (self._answered[worker] or self._failures[worker]):
            return ""
        cursor = self._cursor(worker)
        if cursor is not None and not cursor.problem:
            return ""
        problem = "it has no state_dict and load_state_dict" if cursor is None else f"its state_dict() {cursor.problem}"
        return (
            f"It was not replaced, because its stream cannot be read on from where it was ({problem}). Make the "
            "dataset or its iterator stateful (asyncloader.Stateful), or set resume='replay' to have the stream read "
            "again from its beginning, and what was answered dropped."
        )

    def start(self, worker: int) -> EpochStart:
        """What a replacement begins with; there must be no `obstacle`."""
        began = self._starts[worker]
        cursor = self._cursor(worker)
        if cursor is not None and cursor.problem:
            cursor = None
        if not self._iterable:
            return began._replace(cursor=cursor)
        made, saved = self._made(worker), 0 if cursor is None else cursor.batches
        failures = sum(at >= saved for at in self._failures[worker])
        return began._replace(cursor=cursor, skip=made - saved + failures, made=made)
