"""Works on each batch in a thread of its own, between the pipeline and the consumer: the base class, and pinning.

Data path: reorder -> opener -> [stage] -> consumer.

Every item for the consumer passes through the stage's one thread, whether there is work to do or not, so that order is
kept. `put` and `taken` never block: however long the work takes, it delays neither the event loop nor the consumer.

No locks: only the thread knows the prepared batches, and it receives messages. `put`, `taken` and `close` may
therefore be called by finalizers, in the middle of each other. The thread refers to the stage only while it handles a
message, so a stage that is dropped ends by itself.

`PinStage` copies batches to page-locked memory with torch's own `pin_memory`, which supports all container types, and
custom types with a `pin_memory()` method. A batch's slot is free again right after the copy.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from asyncloader.base.cpus import use_one_core
from asyncloader.base.events import Action, Deliver, Fail, PackedCursor, SkippedSample
from asyncloader.delivery.opener import Opener
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.profiler_ranges import in_range, recorded
from asyncloader.workers.inbox import Answer
from asyncloader.workers.ipc import wire

if TYPE_CHECKING:
    from asyncloader.delivery.transfer import Ready

_TAKEN: Final = object()
_END: Final = None

_Messages: TypeAlias = "queue.SimpleQueue[Any]"  # actions, _TAKEN and _END


class Stage(ABC):
    """Prepares batches in order, in a thread of its own.

    Args:
        name: the thread's name.
        forward: called in the stage's thread with each item, in order.
        ahead: batches that may be prepared and not taken; the consumer calls `taken` for each. None: any number.
        initializer: called in the thread before the first item.
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
        self._initializer = initializer
        self._items: deque[Action] = deque()  # used by the thread alone, as is `_prepared`
        self._prepared = 0  # batches that the consumer has not taken
        self._closed = False
        self._ended = False
        # Not an executor, whose `submit` and `shutdown` take a lock: a finalizer may interrupt them, and wait for
        # itself. `SimpleQueue.put` is reentrant.
        messages: _Messages = queue.SimpleQueue()
        self._messages = messages
        # Ends the thread of a stage that is dropped without `close`. The callback must not refer to the stage.
        reference = weakref.ref(self, lambda _: messages.put(_END))
        # A daemon: iterators that are left open are closed by a hook at exit, which runs after Python has joined all
        # other threads.
        self._thread = threading.Thread(target=_serve, args=(reference, messages), name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def prepare(self, answer: Answer) -> Any:
        """The outcome to deliver for this answer. An error fails the epoch. In the stage's thread."""

    def finish(self) -> None:  # noqa: B027 - most stages need not do anything
        """Called in the stage's thread after the last batch, before `close` returns; not if the stage was dropped."""

    def threads(self) -> tuple[threading.Thread, ...]:
        """The threads that the stage needs to make progress."""
        return (self._thread,)

    def put(self, item: Action) -> None:
        """Add an item. Returns at once. Any thread."""
        # In this order, as the thread sets `_ended` and then discards: an item that it misses is discarded here.
        self._messages.put(item)
        if self._ended:
            self._discard()

    def taken(self) -> None:
        """Report that the consumer took a prepared batch. Any thread."""
        self._messages.put(_TAKEN)

    def close(self) -> None:
        """Finish the current batch and discard the rest. Idempotent."""
        self.close_soon()
        # The iterator may be freed by the garbage collector in one of the stage's own threads, which cannot join
        # itself.
        if threading.current_thread() not in self.threads():
            self._thread.join()

    def close_soon(self) -> None:
        """`close` without waiting: the current batch may still be forwarded. For finalizers."""
        # Before the message, so that the thread also stops between two items that are queued.
        self._closed = True
        self._messages.put(_END)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting() and hasattr(self, "_messages"):  # else it was never made
            self._discard()  # dropped without `close`

    def _work(self, message: Any) -> bool:
        """Handle this message and all that are queued. Returns False at the end. In the thread, which drops its
        reference to the stage before it waits for the next message.
        """
        while message is not _END:
            if message is _TAKEN:
                self._prepared -= 1
            else:
                self._items.append(message)
            while not self._closed and self._may_go_on():
                self._pass_on(self._items.popleft())
            if self._closed:
                break
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return True
        self._finish()
        self._ended = True  # from here on `put` discards the items that it adds
        self._discard()
        return False

    def _may_go_on(self) -> bool:
        return bool(self._items) and (
            self._ahead is None or self._prepared < self._ahead or not _is_batch(self._items[0])
        )

    def _pass_on(self, item: Action) -> None:
        if _is_batch(item):
            self._prepared += 1
            item = self._with_outcome(item)
        self._forward(item)

    def _with_outcome(self, item: Any) -> Action:
        answer: Answer = item.outcome
        try:
            if self._initializer is not None:
                self._initializer()
                self._initializer = None
        except Exception as error:
            answer.discard()
            return Fail(error)
        try:
            return Deliver(item.seq, item.worker, self.prepare(answer), item.stream)
        except Exception as error:
            return Fail(error)

    def _finish(self) -> None:
        try:
            self.finish()
        except Exception as error:
            self._forward(Fail(error))

    def _discard(self) -> None:
        """Discard all items that are left. Several threads may do so at a time."""
        with suppress(queue.Empty):
            while True:
                self._items.append(self._messages.get_nowait())
        with suppress(IndexError):
            while True:
                item = self._items.popleft()
                if _is_batch(item):
                    item.outcome.discard()  # type: ignore[union-attr]


def _serve(reference: weakref.ref[Stage], messages: _Messages) -> None:
    """The thread's loop. Between two messages it refers neither to them nor to the stage."""
    use_one_core()
    while True:
        message = messages.get()
        stage = reference()
        if stage is None:
            # Freed since the message was taken out of the queue: `__del__` has discarded only the others.
            if _is_batch(message):
                message.outcome.discard()
            return
        if not stage._work(message):
            return
        del stage, message


def _is_batch(item: Action) -> bool:
    return isinstance(item, Deliver) and isinstance(item.outcome, Answer)


class OnDevice(NamedTuple):
    """A batch whose copy to the device was started, with its result descriptor."""

    ready: Ready
    result: wire.Result
    cursor: PackedCursor | None
    records: Sequence[SkippedSample]


class Pinned(NamedTuple):
    """A batch that was opened and pinned, with its result descriptor."""

    batch: Any
    result: wire.Result
    cursor: PackedCursor | None
    records: Sequence[SkippedSample]


def torch_pin(device: str | None) -> Callable[[Any], Any]:
    """A function that pins a batch with torch, for this accelerator (None: the current one)."""
    return lambda batch: torch_pin_memory(batch, device)


class PinStage(Stage):
    """The stage that pins each batch.

    Args:
        opener: opens the answers; used by this stage's thread alone.
        pin: gives the pinned copy of a batch.
        recorder: gets how long that takes.
        forward: see `Stage`.
    """

    def __init__(
        self, opener: Opener, pin: Callable[[Any], Any], recorder: Recorder, forward: Callable[[Action], None]
    ) -> None:
        super().__init__("asyncloader-pin", forward, initializer=use_current_device())
        self._opener = opener
        self._pin = pin
        self._recorder = recorder

    def prepare(self, answer: Answer) -> Pinned:
        """A pinned copy of the batch."""
        batch, began = self._opener.open(answer), perf_counter()
        with in_range("asyncloader::pin") if recorded() else nullcontext():
            pinned = self._pin(batch)
        self._recorder.time("pin", perf_counter() - began)
        return Pinned(pinned, answer.result, answer.cursor, answer.records)


def use_current_device() -> Callable[[], None]:
    """A function that gives the thread that calls it this thread's current device. Threads begin on device 0."""
    if not torch.accelerator.is_available():
        return lambda: None
    device = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(device)
