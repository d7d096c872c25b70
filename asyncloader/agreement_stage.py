"""The stage of the pipeline in which the ranks agree on each batch, ahead of its delivery.

Data path: reorder -> pin_memory -> [agreement_stage] -> consumer. See `agreement.py` for what is agreed, and why.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from asyncloader.agreement import Agreement, close_at_exit, start_thread
from asyncloader.errors import LoaderError
from asyncloader.events import Action, Deliver, Fail, Finish
from asyncloader.pipeline import LeftOut, WorkerFailure

__all__ = ["AgreementStage"]


class AgreementStage:
    """Passes items on once the ranks have agreed on them.

    Args:
        agreement: of this epoch.
        forward: called in the stage's thread with each item, in order.
        discard: called with an item that nobody will take.
    """

    def __init__(
        self, agreement: Agreement, forward: Callable[[Action], None], discard: Callable[[Action], None]
    ) -> None:
        self._agreement = agreement
        self._forward = forward
        self._discard = discard
        self._items: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # nothing is forwarded once `close` has returned
        close_at_exit(self)
        start_thread(self._run)

    def put(self, item: Action) -> None:
        """Take an item; returns at once. Any thread."""
        self._items.put(item)

    def _run(self) -> None:
        ended = False
        while (item := self._items.get()) is not None:
            if ended or self._closed:
                self._discard(item)
                continue
            for agreed in self._agreed(item):
                self._give(agreed)
                ended = not isinstance(agreed, Deliver)
        self._agreement.leave()

    def _give(self, item: Action) -> None:
        with self._lock:
            if not self._closed:
                self._forward(item)
                return
        self._discard(item)

    def _agreed(self, item: Action) -> list[Action]:
        """What is to be forwarded for this item."""
        try:
            if isinstance(item, Deliver) and isinstance(item.outcome, LeftOut):
                return [item]  # no batch: nothing to agree on
            if isinstance(item, Deliver) and not isinstance(item.outcome, WorkerFailure):
                if self._agreement.batch():
                    return [item]
                self._discard(item)
                return [Finish()]
            if isinstance(item, Finish):
                self._agreement.end()
            elif not self._agreement.fail() and isinstance(item, Deliver):
                return [item, Finish()]
        except LoaderError as error:
            self._discard(item)
            return [Fail(error)]
        return [item]

    def close(self) -> None:
        """Nothing will come any more. Does not wait: the thread ends once the other ranks know."""
        with self._lock:
            self.close_soon()

    def close_soon(self) -> None:
        """`close` without its lock, for finalizers and at exit: an item may be forwarded yet."""
        self._closed = True
        self._items.put(None)
