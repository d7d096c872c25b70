"""A stage between the pipeline and the consumer that works on each batch in a thread of its own.

Data path: reorder -> delivery -> [stage: pin_memory, device] -> consumer.

One thread, so that order is kept: every item that goes to the consumer passes through it, whether there is something
to be done or not. `put` and `taken` never block; what the stage does, however long, holds up neither the event loop nor
the consumer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncloader.events import Action, Deliver, Fail
from asyncloader.workers.listener import Answer

__all__ = ["Stage"]


class Stage(ABC):
    """Prepares batches, in order.

    Args:
        name: of the thread.
        forward: called in the stage's thread with each item, in order.
        ahead: batches that may be prepared and not taken by the consumer, which then calls `taken`; None: any number.
        initializer: called in the thread when it starts.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Action], None],
        ahead: int | None = None,
        initializer: Callable[[], None] | None = None,
    ) -> None:
        self._forward = forward
        self._ahead = ahead
        self._items: deque[Action] = deque()
        self._lock = threading.Lock()
        self._running = False  # a run of the thread will look at the items
        self._prepared = 0  # batches that the consumer has not taken
        self._closed = False
        self._thread = 0
        self._executor = ThreadPoolExecutor(1, name, initializer=initializer)

    @abstractmethod
    def prepare(self, answer: Answer) -> Any:
        """The outcome to be delivered in the answer's place. An error fails the epoch. In the stage's thread."""

    def rest(self) -> None:  # noqa: B027 - most stages have nothing to do then
        """Nothing can be prepared at the moment. In the stage's thread, also before `close` returns."""

    def put(self, item: Action) -> None:
        """Take an item; returns at once. Any thread."""
        self._items.append(item)
        self._wake()

    def taken(self) -> None:
        """The consumer took a batch that was prepared. Any thread."""
        with self._lock:
            self._prepared -= 1
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._running or self._closed or not self._may_go_on():
                return
            self._running = True
            self._executor.submit(self._run)

    def _may_go_on(self) -> bool:
        return bool(self._items) and (
            self._ahead is None or self._prepared < self._ahead or not _is_batch(self._items[0])
        )

    def _run(self) -> None:
        self._thread = threading.get_ident()
        while (item := self._next()) is not None:
            try:
                if isinstance(item, Deliver) and isinstance(item.outcome, Answer):
                    item = item._replace(outcome=self.prepare(item.outcome))
            except Exception as error:
                item = Fail(error)
            self._forward(item)
        # A wake that comes from here on submits another run, behind this one.
        del item
        self.rest()

    def _next(self) -> Action | None:
        with self._lock:
            if self._closed or not self._may_go_on():
                self._running = False
                return None
            item = self._items.popleft()
            self._prepared += _is_batch(item)
            return item

    def close(self) -> None:
        """Let the batch in hand be finished and discard the rest. Idempotent."""
        with self._lock:
            self._closed = True
        # The last reference to an iterator may go while the stage's own thread collects garbage.
        self._executor.shutdown(wait=threading.get_ident() != self._thread, cancel_futures=True)
        while self._items:
            item = self._items.popleft()
            if isinstance(item, Deliver) and isinstance(item.outcome, Answer):
                item.outcome.discard()


def _is_batch(item: Action) -> bool:
    return isinstance(item, Deliver) and isinstance(item.outcome, Answer)
