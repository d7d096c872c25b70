"""Behaviour of every stage: order, bounds, messages from any thread, errors, and its end."""

from __future__ import annotations

import gc
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from asyncloader.base.events import Action, Deliver, Fail, Finish
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.stage import Stage, _serve
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.inbox import Answer
from tests.delivery.answers import deliver, new_ring
from tests.delivery.fake import PATIENCE_S
from tests.delivery.stages import closing


class Opening(Stage):
    """A stage that opens batches, as slowly as the test likes.

    `begun` receives each task's number when its turn comes; the task then waits for `gate`, if that is set.
    """

    def __init__(self, ahead: int | None = None, initializer: Callable[[], None] | None = None) -> None:
        self.out: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.finished: list[int | None] = []
        self.gate: threading.Semaphore | None = None
        self.seen_by: set[int] = set()
        self.prepared = 0
        self.takes = 0
        self.most = 0  # batches that were prepared, or are being prepared, and not taken
        self.trouble: Exception | None = None
        self.last_trouble: Exception | None = None
        self._opener = Opener(Statistics())
        super().__init__("stage-under-test", self.out.put, ahead, initializer)

    def prepare(self, answer: Answer) -> Any:
        self.seen_by.add(threading.get_ident())
        self.begun.put(answer.result.seq)
        self.most = max(self.most, self.prepared + 1 - self.takes)
        batch = self._opener.open(answer)
        if self.gate is not None:
            assert self.gate.acquire(timeout=PATIENCE_S)
        if self.trouble is not None:
            raise self.trouble
        self.prepared += 1
        return batch.clone()

    def finish(self) -> None:
        self.finished.append(threading.get_ident())
        if self.last_trouble is not None:
            raise self.last_trouble

    def next(self) -> Any:
        return self.out.get(timeout=PATIENCE_S)

    def taken(self) -> None:
        self.takes += 1
        super().taken()


def seq_of(item: Any) -> int:
    assert isinstance(item, Deliver)
    return int(item.outcome[0])


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_more_are_prepared_than_asked_for(ahead: int) -> None:
    """The next batch's turn comes when the consumer has taken a batch."""
    ring, stage = new_ring(), Opening(ahead)
    for seq in range(6):
        stage.put(deliver(seq, ring))
    for seq in range(6):
        for begun in range(seq + ahead - 1 if seq else 0, min(seq + ahead, 6)):
            assert stage.begun.get(timeout=PATIENCE_S) == begun
        assert seq_of(stage.next()) == seq
        stage.taken()
    stage.close()
    assert (stage.prepared, stage.most) == (6, ahead)


def test_an_error_in_front_is_not_held_back() -> None:
    """Only batches wait for room, but no item overtakes them."""
    ring, stage = new_ring(), Opening(1)
    error = Deliver(1, 0, "a task's error")
    for item in (deliver(0, ring), error, deliver(2, ring), Finish()):
        stage.put(item)
    del item
    assert seq_of(stage.next()) == 0
    assert stage.next() is error
    stage.taken()
    assert seq_of(stage.next()) == 2
    assert stage.next() == Finish()
    stage.close()
    assert stage.most == 1


def test_finish_is_called_once_at_the_end() -> None:
    """It is called in the stage's thread, before `close` returns, whether the stage has batches or was never used."""
    ring, stage = new_ring(), Opening(2)
    for seq in range(3):
        stage.put(deliver(seq, ring))
    assert seq_of(stage.next()) == 0
    assert stage.finished == []
    stage.close()
    stage.close()
    assert stage.finished == [stage._thread.ident]
    idle = Opening()
    idle.close()
    assert idle.finished == [idle._thread.ident]


# ------------------------------------------------------------------------------------------------- errors


def failure(stage: Opening) -> str:
    item = stage.next()
    assert isinstance(item, Fail)
    error = item.error
    error.__traceback__ = None
    return str(error)


def test_an_error_replaces_the_batch() -> None:
    """The slot is free once the error has been dropped."""
    ring, stage = new_ring(), Opening()
    stage.trouble = RuntimeError("no memory on the device")
    stage.put(deliver(0, ring))
    assert failure(stage) == "no memory on the device"
    stage.close()
    stage.trouble = None
    gc.collect()
    assert ring.idle


def test_an_error_at_the_end_reaches_the_consumer() -> None:
    """A copy that failed after its batch was delivered is reported."""
    ring, stage = new_ring(), Opening()
    stage.last_trouble = RuntimeError("device-side assert")
    stage.put(deliver(0, ring))
    assert seq_of(stage.next()) == 0
    stage.put(deliver(1, ring))
    stage.close()
    while not isinstance(item := stage.next(), Fail):
        pass
    assert str(item.error) == "device-side assert"
    assert ring.idle


def test_a_thread_that_cannot_be_made_ready() -> None:
    """The initializer's error is delivered instead of the first batch, and the slot is free."""

    def refuse() -> None:
        raise RuntimeError("invalid device ordinal")

    ring = new_ring()
    stage = Opening(initializer=refuse)
    stage.put(deliver(0, ring))
    assert failure(stage) == "invalid device ordinal"
    stage.close()
    assert ring.idle


# ---------------------------------------------------------------------------------------- the stage's end


@pytest.mark.parametrize("oneoff", [False, True], ids=["slot", "segment"])
def test_closing_with_work_in_hand(oneoff: bool) -> None:
    """The batch in hand is finished, the rest is discarded: slots are released and descriptors closed."""
    ring, stage = new_ring(), Opening()
    stage.gate = threading.Semaphore(0)
    items = [deliver(seq, None if oneoff else ring) for seq in range(4)]
    fds = [item.outcome.fd for item in items if item.outcome.fd is not None]
    while items:
        stage.put(items.pop(0))
    assert stage.begun.get(timeout=PATIENCE_S) == 0
    closer = closing(stage)
    stage.gate.release()
    closer.join()
    assert seq_of(stage.next()) == 0
    assert stage.out.empty()
    assert stage.begun.empty()
    assert ring.idle
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_closing_in_the_stages_own_thread() -> None:
    """The garbage collector may drop an iterator in that thread: the thread does not wait for itself, and ends."""
    ring = new_ring()
    stage = Opening()

    def forward(item: Action) -> None:
        stage.out.put(item)
        stage.close()

    stage._forward = forward
    for seq in range(4):
        stage.put(deliver(seq, ring))
    assert seq_of(stage.next()) == 0
    stage._thread.join(PATIENCE_S)
    assert not stage._thread.is_alive()
    assert (stage.prepared, ring.idle) == (1, True)
    assert stage.finished == [stage._thread.ident]
    del stage._forward


def test_closing_in_the_middle_of_a_put() -> None:
    """The garbage collector may run in any thread's `put` or `taken`, and close that same stage."""
    ring, stage = new_ring(), Opening(1)

    class Closing:
        """Closes the stage while a thread appends to its messages."""

        def __init__(self, messages: Any) -> None:
            self.messages = messages

        def put(self, message: Any) -> None:
            if message is not None:
                stage.close()
            self.messages.put(message)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.messages, name)

    stage._messages = Closing(stage._messages)  # type: ignore[assignment]
    stage.put(deliver(0, ring))
    stage.taken()
    assert not stage._thread.is_alive()
    assert ring.idle


def test_a_stage_that_is_dropped_ends() -> None:
    """It ends without `close`: an iterator that is collected in the loop's own thread cannot wait for it."""
    stage = Opening()
    ring = new_ring()
    stage.put(deliver(0, ring))
    assert seq_of(stage.next()) == 0
    thread, gone = stage._thread, weakref.ref(stage)
    del stage
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert gone() is None
    assert ring.idle


def test_what_a_dropped_stage_had_is_discarded() -> None:
    """The descriptors of batches that waited for room are closed, their slots released."""
    ring, stage = new_ring(), Opening(1)
    items = [deliver(0, ring), deliver(1, None), deliver(2, ring)]
    fd = items[1].outcome.fd
    while items:
        stage.put(items.pop(0))
    assert seq_of(stage.next()) == 0
    thread = stage._thread
    del stage
    gc.collect()
    thread.join(PATIENCE_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert ring.idle


def test_a_message_that_was_just_taken_when_the_stage_is_dropped_is_discarded() -> None:
    """The thread discards it: it is no longer in the queue, which the stage's finalizer empties."""
    ring, stage, messages = new_ring(), Opening(), queue.SimpleQueue[Any]()
    messages.put(deliver(0, ring))
    stage.close()
    gone = weakref.ref(stage)
    del stage
    gc.collect()
    assert gone() is None
    thread = threading.Thread(target=_serve, args=(gone, messages))
    thread.start()
    thread.join(PATIENCE_S)
    assert ring.idle


def test_a_thread_that_waits_keeps_nothing() -> None:
    """It keeps neither the last item nor its ring: memory is freed as soon as the consumer drops it."""
    ring, stage = new_ring(), Opening()
    stage.put(deliver(0, ring))
    assert seq_of(stage.next()) == 0
    gone = threading.Event()
    weakref.finalize(ring, gone.set)
    del ring
    gc.collect()
    assert gone.wait(PATIENCE_S)
    stage.close()
