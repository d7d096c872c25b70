"""Tracks how far each worker has read its copy of the dataset, to decide where a replacement begins. Pure.

Data path: beside the pipeline.

An answer that has arrived in the main process is delivered even if its worker dies, so a replacement resumes behind the
worker's last *answer*. (A saved state resumes behind the last *delivery*; see `state/progress.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncloader.base.events import Cursor, PackedCursor
from asyncloader.workers.fetch.setup import EpochStart, by_stream, for_worker


class ResumePoints:
    """The workers' resume points in one epoch. A copy of the dataset is a worker's, or a stream's, of which each worker
    serves some; `failed` and `answered` take the number of a copy, the others that of a worker.

    Args:
        starts: where each worker began the epoch.
        iterable: whether the dataset is a stream, in which the position must be found again.
        replays: whether a stream without a state may be read again from its beginning.
        stateful: whether the dataset has a state of its own.
        assigns: whether shards are assigned to the workers: such a stream counts no errors.
    """

    def __init__(
        self,
        starts: Sequence[EpochStart],
        *,
        iterable: bool,
        replays: bool,
        stateful: bool = False,
        assigns: bool = False,
    ) -> None:
        self._workers = len(starts)
        self._streams = bool(starts[0].streams)
        starts = self._starts = by_stream(starts) if self._streams else list(starts)
        self._iterable = iterable
        self._replays = replays
        self._stateful = stateful
        self._assigns = assigns
        self._answered = [0] * len(starts)
        self._errors = [0] * len(starts)  # behind the last batch, of assigned shards
        self._made = [False] * len(starts)  # whether a batch came
        self._cursors: list[PackedCursor | None] = [None] * len(starts)

    def began(self, worker: int, cursors: Sequence[PackedCursor | None]) -> list[tuple[int, PackedCursor]]:
        """Record the cursors with which a worker's copies of the dataset began. Returns those that there are, with the
        copies' numbers.

        Raises:
            ValueError: it has another number of copies.
        """
        copies = self._copies(worker)
        if len(copies) != len(cursors):
            raise ValueError(f"broken stream: {len(cursors)} cursors of {len(copies)} copies from worker {worker}")
        found = [(copy, cursor) for copy, cursor in zip(copies, cursors, strict=True) if cursor is not None]
        for copy, cursor in found:
            # A late cursor of the beginning must not replace the cursor of an answer.
            if not self._answered[copy]:
                self._cursors[copy] = cursor
        return found

    def _copies(self, worker: int) -> Sequence[int]:
        return range(worker, len(self._starts), self._workers)

    def failed(self, copy: int) -> None:
        """Record that a batch of a copy raised: that is its answer, as a batch would be."""
        self._answered[copy] += not self._assigns
        self._errors[copy] += self._assigns

    def answered(self, copy: int, cursor: PackedCursor | None) -> None:
        """Record that a copy gave a batch, and its cursor if the worker took one."""
        self._answered[copy] += 1
        # Errors before a batch lie before the cursor that came with it, or will be read past with it.
        self._errors[copy] = 0
        self._made[copy] = True
        if cursor is not None:
            self._cursors[copy] = cursor

    def _cursor(self, copy: int) -> Cursor | None:
        cursor = self._cursors[copy]
        return self._starts[copy].cursor if cursor is None else cursor.value

    def obstacle(self, worker: int) -> str:
        """Why a replacement cannot resume one of the worker's copies where it was; empty if it can."""
        return next(filter(None, map(self._obstacle, self._copies(worker))), "")

    def _obstacle(self, copy: int) -> str:
        if not self._iterable or self._replays or not self._answered[copy]:
            return ""
        cursor = self._cursor(copy)
        if cursor is not None and not cursor.problem:
            return ""
        if cursor is None and self._stateful and not self._made[copy]:
            return ""  # a state comes with the first batch: so far only errors came, and they are met again
        problem = "it has no state_dict and load_state_dict" if cursor is None else f"its state_dict() {cursor.problem}"
        return (
            f"It was not replaced, because its stream cannot be read on from where it was ({problem}). Make the "
            "dataset or its iterator stateful (asyncloader.Stateful), or set recovery=Recovery(allow_replay=True) "
            "to have the stream read again from its beginning, and what was answered dropped."
        )

    def start(self, worker: int) -> EpochStart:
        """Where a replacement begins. Only valid without an `obstacle`."""
        starts = [self._start(copy) for copy in self._copies(worker)]
        return for_worker(starts) if self._streams else starts[0]

    def _start(self, copy: int) -> EpochStart:
        began = self._starts[copy]
        cursor = self._cursor(copy)
        # `obstacle` lets this pass for a map dataset, for a stream that may be read again, and before the first answer.
        if cursor is not None and cursor.problem:
            cursor = None
        if not self._iterable:
            return began._replace(cursor=cursor)
        before = 0 if began.cursor is None else began.cursor.batches
        saved = 0 if cursor is None else cursor.batches
        # In batches since the beginning of the stream: those that the predecessor had passed, less those that the
        # cursor has.
        skip = before + began.skip + self._answered[copy] - saved
        return began._replace(cursor=cursor, skip=skip, errors=self._errors[copy])
