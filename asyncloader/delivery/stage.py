"""A stage between the pipeline and the consumer that works on each batch in a thread of its own.

Data path: reorder -> delivery -> [stage: pin_memory, device] -> consumer.

One thread, so that order is kept: every item that goes to the consumer passes through it, whether there is something
to be done or not. `put` and `taken` never block; what the stage does, however long, holds up neither the event loop nor
the consumer.

No locks: the thread alone knows what was prepared, and is told by messages. `put`, `taken` and `close` may therefore be
called by whatever the garbage collector runs, in the middle of each other, which an executor's `submit` and `shutdown`
may not. The thread refers to the stage only while it has a message in hand, so a stage that is dropped ends by itself.

Page-locked copies, made ahead of the consumer.

Data path: reorder -> delivery -> [pin_memory, a stage] -> consumer.

A batch is opened in the stage's thread, copied into CUDA's page-locked memory by torch's own `pin_memory` (which knows
all container types and custom types with a `pin_memory()` method), and its slot is free again at once.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from asyncloader.cpus import use_one_core
from asyncloader.delivery.opener import Opener
from asyncloader.events import Action, Deliver, Fail
from asyncloader.workers.ipc import wire
from asyncloader.workers.listener import Answer

__all__ = [
    "PinStage",
    "Pinned",
    "Stage",
    "torch_pin",
    "use_current_device",
]

_TAKEN: Final = object()
_END: Final = None

_Messages: TypeAlias = "queue.SimpleQueue[Any]"  # of actions, _TAKEN and _END


class Stage(ABC):
    """Prepares batches, in order.

    Args:
        name: of the thread.
        forward: called in the stage's thread with each item, in order.
        ahead: batches that may be prepared and not taken by the consumer, which then calls `taken`; None: any number.
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
        self._items: deque[Action] = deque()  # the thread's, as is the number below
        self._prepared = 0  # batches that the consumer has not taken
        self._closed = False
        self._ended = False
        messages: _Messages = queue.SimpleQueue()
        self._messages = messages
        reference = weakref.ref(self, lambda _: messages.put(_END))
        # A daemon: iterators that are left open are closed by a hook at exit, which comes after other threads are
        # waited for.
        self._thread = threading.Thread(target=_serve, args=(reference, messages), name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def prepare(self, answer: Answer) -> Any:
        """The outcome to be delivered in the answer's place. An error fails the epoch. In the stage's thread."""

    def finish(self) -> None:  # noqa: B027 - most stages have nothing to do then
        """Nothing more will be prepared. In the stage's thread, before `close` returns; not where it was dropped."""

    def threads(self) -> tuple[threading.Thread, ...]:
        """Those without which it does not go on."""
        return (self._thread,)

    def put(self, item: Action) -> None:
        """Take an item; returns at once. Any thread."""
        self._messages.put(item)
        if self._ended:
            self._discard()

    def taken(self) -> None:
        """The consumer took a batch that was prepared. Any thread."""
        self._messages.put(_TAKEN)

    def close(self) -> None:
        """Let the batch in hand be finished and discard the rest. Idempotent."""
        self.close_soon()
        # The last reference to an iterator may go while one of the stage's own threads collects garbage.
        if threading.current_thread() not in self.threads():
            self._thread.join()

    def close_soon(self) -> None:
        """`close` without waiting: the batch in hand may be forwarded yet. For finalizers."""
        self._closed = True
        self._messages.put(_END)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting() and hasattr(self, "_messages"):  # else it was never made
            self._discard()  # dropped without an end

    def _work(self, message: Any) -> bool:
        """Deal with messages, this one first, until there are none; whether there may be more. In the thread, which
        lets go of the stage when there are none.
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
        self._ended = True  # what is put from here on is discarded by whoever puts it
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
            return Deliver(item.seq, item.worker, self.prepare(answer))
        except Exception as error:
            return Fail(error)

    def _finish(self) -> None:
        try:
            self.finish()
        except Exception as error:
            self._forward(Fail(error))

    def _discard(self) -> None:
        """Nobody will take what is left. By any number of threads at a time."""
        with suppress(queue.Empty):
            while True:
                self._items.append(self._messages.get_nowait())
        with suppress(IndexError):
            while True:
                item = self._items.popleft()
                if _is_batch(item):
                    item.outcome.discard()  # type: ignore[union-attr]


def _serve(reference: weakref.ref[Stage], messages: _Messages) -> None:
    """The thread. Between two messages it refers to nothing of them, nor to the stage."""
    use_one_core()
    while True:
        message = messages.get()
        stage = reference()
        if stage is None or not stage._work(message):
            return
        del stage, message


def _is_batch(item: Action) -> bool:
    return isinstance(item, Deliver) and isinstance(item.outcome, Answer)


class Pinned(NamedTuple):
    """A batch that was opened and pinned already, with the descriptor that it came with."""

    batch: Any
    result: wire.Result
    cursor: bytes
    bad: bytes


def torch_pin(device: str | None) -> Callable[[Any], Any]:
    """torch's pinning for this accelerator (None: the current one)."""
    return lambda batch: torch_pin_memory(batch, device)


class PinStage(Stage):
    """Pins what passes.

    Args:
        opener: opens the answers; used by this stage's thread alone.
        pin: gives the pinned copy of a batch.
        forward: as `Stage`'s.
    """

    def __init__(self, opener: Opener, pin: Callable[[Any], Any], forward: Callable[[Action], None]) -> None:
        super().__init__("asyncloader-pin", forward, initializer=use_current_device())
        self._opener = opener
        self._pin = pin

    def prepare(self, answer: Answer) -> Pinned:
        """Its pinned copy."""
        return Pinned(self._pin(self._opener.open(answer)), answer.result, answer.cursor, answer.bad)


def use_current_device() -> Callable[[], None]:
    """What makes the current device of this thread that of another one, which calls it; threads begin on device 0."""
    if not torch.accelerator.is_available():
        return lambda: None
    device = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(device)
