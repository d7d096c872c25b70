"""The stage before a device, driven at random: batches arrive, the device advances, the consumer takes, workers write.

The model computes how far the stage must be by now, so that every wait here is for something that will happen: batch
`b` is begun when the consumer has room for it (`b < taken + ahead`) and no more than two copies before it are under
way, and passed on when no more than one is. Everything comes out in order.
"""

from __future__ import annotations

import gc
import queue
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncloader.base.events import Action, Deliver
from asyncloader.delivery.device_stage import DeviceStage
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.stage import OnDevice
from asyncloader.delivery.transfer import DeviceTransfer
from asyncloader.telemetry.statistics import Statistics
from tests.delivery.answers import batch_of, deliver, new_ring, overwrite_free_slots
from tests.delivery.fake import PATIENCE_S, FakeMachine
from tests.drawn import scaled

UNDER_WAY = 2  # copies that may be under way when a batch is passed on, its own included


class DeviceStageMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = FakeMachine(manual=True)
        self.device = self.machine.open()
        self.statistics = Statistics()
        self.out: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self.rings = [new_ring(number=number) for number in range(2)]
        self.items: list[bool] = []  # of each item that was put: whether it is a batch
        self.got = 0  # items that came out
        self.taken = 0  # batches among them
        self.reached = 0
        self.held: list[tuple[int, torch.Tensor]] = []
        self.ahead = 1
        self.stage: Any = None

    @initialize(ahead=st.integers(1, 4))
    def begin(self, ahead: int) -> None:
        self.ahead = ahead
        transfer = DeviceTransfer(self.device, None, static=False)
        self.stage = DeviceStage(Opener(self.statistics), transfer, self.statistics, self.out.put, ahead)

    # ----------------------------------------------------------------------------------------------- the model

    def begun(self) -> int:
        """Return the number of batches whose copies the device must have been asked for."""
        return min(sum(self.items), self.taken + self.ahead, self.reached + UNDER_WAY + 1)

    def passed_on(self) -> int:
        """Return the number of items that must have come out."""
        batches = min(self.begun(), self.reached + UNDER_WAY)
        count = 0
        for is_batch in self.items:
            if is_batch and not batches:
                break
            batches -= is_batch
            count += 1
        return count

    # ----------------------------------------------------------------------------------------------- the rules

    @precondition(lambda self: len(self.items) - self.got < 8)
    @rule(kind=st.sampled_from(["first ring", "second ring", "segment", "error"]))
    def put(self, kind: str) -> None:
        seq = len(self.items)
        self.items.append(kind != "error")
        if kind == "error":
            self.stage.put(Deliver(seq, 0, "a task's error"))
            return
        ring = {"first ring": self.rings[0], "second ring": self.rings[1]}.get(kind)
        if ring is not None:
            ring.reclaim()
        self.stage.put(deliver(seq, ring))

    @precondition(lambda self: self.reached < self.begun())
    @rule()
    def advance(self) -> None:
        self.device.advance()
        self.reached += 1

    @precondition(lambda self: self.got < self.passed_on())
    @rule()
    def take(self) -> None:
        item = self.out.get(timeout=PATIENCE_S)
        assert isinstance(item, Deliver), item
        assert item.seq == self.got
        self.got += 1
        if self.items[item.seq]:
            assert isinstance(item.outcome, OnDevice)
            batch = self.stage.take(item.outcome)
            self.held.append((self.taken, batch))
            self.taken += 1
            assert self.device.handed[-1].addresses == [batch.data_ptr()]
        else:
            assert item.outcome == "a task's error"

    @rule(which=st.integers(0, 1))
    def workers_write(self, which: int) -> None:
        """Overwrite all slots that are free now, as workers may at any time."""
        overwrite_free_slots(self.rings[which])

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 50))
    def drop(self, index: int) -> None:
        del self.held[index % len(self.held)]

    # ------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def no_more_than_asked_for(self) -> None:
        assert self.device.events <= self.taken + self.ahead
        assert self.device.events - self.reached <= UNDER_WAY + 1

    @invariant()
    def what_has_been_reached_is_right(self) -> None:
        batches = [seq for seq, is_batch in enumerate(self.items) if is_batch]
        for number, batch in self.held:
            if number < self.reached:
                assert torch.equal(batch, batch_of(batches[number]))

    @invariant()
    def no_rule_of_the_device_is_broken(self) -> None:
        assert self.machine.trouble == []

    def teardown(self) -> None:
        if self.stage is None:
            return
        assert sum(map(overwrite_free_slots, self.rings)) > 0
        self.device.go()
        self.stage.close()
        self.reached = len(self.items)
        self.what_has_been_reached_is_right()
        while not self.out.empty():
            self.out.get()
        assert all(ring.idle for ring in self.rings)
        assert not any(thread.is_alive() for thread in self.stage.threads())
        self.rings.clear()
        self.stage = None
        gc.collect()
        assert self.machine.locked == []
        assert self.machine.trouble == []


TestDeviceStageMachine = DeviceStageMachine.TestCase
TestDeviceStageMachine.settings = settings(max_examples=scaled(60), stateful_step_count=30, deadline=None)
TestDeviceStageMachine.__doc__ = """Any course of events keeps order, bounds, content, and leaves nothing behind."""
