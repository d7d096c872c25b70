from __future__ import annotations

import threading
from typing import Any

import torch

from asyncloader.base.events import Action, Deliver, Fail, Finish
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.stage import Pinned, PinStage
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.statistics import Statistics
from tests.delivery.answers import deliver, new_ring


class Stage:
    """A stage with a list behind it, and an event that is set when the last item has arrived."""

    def __init__(self, pin: Any) -> None:
        self.out: list[Action] = []
        self.threads: set[threading.Thread] = set()
        self.ended = threading.Event()
        self.stage = PinStage(Opener(Statistics()), pin, Recorder(), self.forward)

    def forward(self, item: Action) -> None:
        self.out.append(item)
        self.threads.add(threading.current_thread())
        if isinstance(item, Finish):
            self.ended.set()


def clone(batch: torch.Tensor) -> torch.Tensor:
    """A copy elsewhere: this stage expects no more of pinning."""
    return batch.clone()


def test_items_keep_their_order_and_carry_the_pinned_batch() -> None:
    """Batches, failures of tasks and the end leave the stage in the order in which they entered it."""
    ring = new_ring()
    stage = Stage(clone)
    failure = Deliver(1, 0, "a task's error")
    items: list[Action] = [deliver(0, ring), failure, deliver(2, None), Finish()]
    while items:
        stage.stage.put(items.pop(0))
    assert stage.ended.wait(60)
    stage.stage.close()
    first, second, third, last = stage.out
    assert second is failure
    assert last == Finish()
    for seq, item in ((0, first), (2, third)):
        assert isinstance(item, Deliver)
        assert isinstance(item.outcome, Pinned)
        assert item.outcome.batch.tolist() == [seq] * 10
        assert (item.seq, item.outcome.result.seq, item.outcome.result.samples) == (seq, seq, 10)
    assert len(stage.threads) == 1
    assert threading.current_thread() not in stage.threads


def test_the_slot_is_free_once_the_batch_is_pinned() -> None:
    """The copy frees the slot, however long the consumer keeps the pinned batch."""
    ring = new_ring()
    stage = Stage(clone)
    for seq in range(8):
        stage.stage.put(deliver(seq, ring))
    stage.stage.put(Finish())
    assert stage.ended.wait(60)
    stage.stage.close()
    assert len(stage.out) == 9
    assert ring.idle


def test_an_error_becomes_a_failure() -> None:
    """An error of pinning is delivered instead of the batch, and the slot is released."""

    def refuse(batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no page-locked memory left")

    ring = new_ring()
    stage = Stage(refuse)
    stage.stage.put(deliver(0, ring))
    stage.stage.put(Finish())
    assert stage.ended.wait(60)
    stage.stage.close()
    failed = stage.out.pop(0)
    assert isinstance(failed, Fail)
    assert str(failed.error) == "no page-locked memory left"
    failed.error.__traceback__ = None
    del failed
    assert ring.idle
