"""Opens an answer as a batch: a view of the slot if the ring can spare it, else a private copy.

Data path: reorder -> [opener] -> stage -> consumer.

Threads: all answers of a pool are opened by one thread at a time (the consumer's or a stage's). The rule that decides
between view and copy, and why it cannot deadlock, is in `workers/ipc/ring.py`.
"""

from __future__ import annotations

import os
import weakref
from itertools import repeat
from typing import Any, NoReturn

from asyncloader.errors import warn_aside
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.error_notes import add_note
from asyncloader.workers.fetch.error_pickle import unwrapped
from asyncloader.workers.inbox import Answer
from asyncloader.workers.ipc.ring import Anchor, oneoff_anchor

_PICKLE_WARNING_BYTES = 1 << 20

_MOST_ONEOFFS = 16
"""Most batches in segments of their own that a consumer may hold as views. Each mapping costs a file descriptor
(`mmap` keeps a duplicate), so their number is bounded."""


class Opener:
    """Opens answers for one iterator.

    Args:
        statistics: counts the copies.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._warned = False
        self.warning: Warning | None = None
        """A warning that is an error, by the user's filters, to be raised between two batches."""
        self._oneoffs: list[weakref.ref[Anchor]] = []

    def will_copy(self, answer: Answer) -> bool:
        """Whether opening the answer now would copy its bytes."""
        if answer.fd is not None:
            return not self._room_for_oneoff()
        return answer.ring is not None and not answer.ring.may_lend()

    def open(self, answer: Answer) -> Any:
        """The batch. The answer must not be used afterwards."""
        return self.open_held(answer)[0]

    def open_held(self, answer: Answer) -> tuple[Any, Anchor | None]:
        """The batch, and the anchor that holds its slot; None if it has no slot, or was copied out of it."""
        try:
            return self.build(answer)
        finally:
            self.release(answer, [] if answer.fd is None else [answer.fd])

    def forget(self, answer: Answer) -> None:
        """Undo an interrupted `build` whose batch was not returned, so that it can be called again."""
        if answer.ring is not None:
            answer.ring.take_back(answer.result.slot)

    def release(self, answer: Answer, descriptors: list[int]) -> None:
        """Release the parts of an answer that its batch does not hold.

        Args:
            answer: the answer.
            descriptors: its descriptors, which are popped and closed.
        """
        if answer.ring is not None:
            answer.ring.reclaim()
        if descriptors:
            # One call into C pops and closes them, so Ctrl-C can neither leak nor double-close one.
            list(map(os.close, map(descriptors.pop, repeat(0, len(descriptors)))))

    def build(self, answer: Answer) -> tuple[Any, Anchor | None]:
        """Make the batch, as `open_held`; but the caller must call `release`."""
        result, template, ring, fd = answer[:4]
        if result.pickled > _PICKLE_WARNING_BYTES and not self._warned:
            self._warned = True
            self.warning = _warn_pickled(result.pickled)
        if ring is not None:
            may_lend = ring.may_lend()
            anchor = ring.lend(result.slot, result.nbytes)  # for a copy only until it is made
            if may_lend:
                return template.build(anchor), anchor
            self._statistics.ring_copies += 1
            return template.copy_out(anchor), None
        if fd is None:
            return template.build(None), None
        anchor = oneoff_anchor(fd, result.nbytes)
        if not self._room_for_oneoff():
            self._statistics.ring_copies += 1
            return template.copy_out(anchor), None
        self._oneoffs.append(weakref.ref(anchor))
        return template.build(anchor), None

    def _room_for_oneoff(self) -> bool:
        if len(self._oneoffs) >= _MOST_ONEOFFS:
            self._oneoffs = [held for held in self._oneoffs if held() is not None]
        return len(self._oneoffs) < _MOST_ONEOFFS


def raise_worker_error(error: Any) -> NoReturn:
    """Raise a worker's error: its own type, with the worker's number and traceback in the text.

    `error` is torch's `ExceptionWrapper` or an error of ours.
    """
    # torch's `reraise` leaves the exception in a local variable of its frame: a cycle through the traceback, that would
    # hold the frames that called us, and with them the iterator, until the garbage collector comes.
    if isinstance(error, BaseException):
        raised = error
    else:
        raised = BaseException.with_traceback(unwrapped(error), None)
        for note in getattr(error, "notes", ()):  # torch's own wrappers have no notes
            add_note(raised, note)
    try:
        raise raised
    finally:
        del raised, error


def _warn_pickled(nbytes: int) -> Warning | None:
    return warn_aside(
        f"A batch carries {nbytes:,} bytes of Python objects that are not tensors or arrays. They are unpickled in "
        "the main process, which holds the GIL meanwhile. Return tensors or numpy arrays from collate_fn (or encode "
        "strings as bytes in one tensor) to let them travel through shared memory.",
        stacklevel=4,
    )
