from __future__ import annotations

import gc
import queue
import threading
from typing import Any

import torch

from asyncloader.base.events import Action, Deliver, Fail, Finish
from asyncloader.delivery.device_stage import DeviceStage
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.stage import OnDevice
from asyncloader.delivery.transfer import DeviceTransfer
from asyncloader.telemetry.statistics import Statistics
from tests.delivery.answers import batch_of, deliver, new_ring, overwrite_free_slots
from tests.delivery.fake import PATIENCE_S, FakeMachine
from tests.delivery.stages import closing


class World:
    """A device stage whose device's stream the test advances."""

    def __init__(
        self, ahead: int = 1, *, manual: bool = True, transform: Any = None, static: bool = False, **settings: Any
    ) -> None:
        self.machine = FakeMachine(manual=manual, **settings)
        self.device = self.machine.open()
        self.statistics = Statistics()
        self.out: queue.SimpleQueue[Action] = queue.SimpleQueue()
        transfer = DeviceTransfer(self.device, transform, static=static)
        self.stage = DeviceStage(Opener(self.statistics), transfer, self.statistics, self.out.put, ahead)

    def put(self, *items: Action) -> None:
        for item in items:
            self.stage.put(item)

    def next(self) -> Any:
        return self.out.get(timeout=PATIENCE_S)

    def take(self) -> Any:
        """Take the next batch, as the consumer does: its copy may not be done yet."""
        item = self.next()
        assert isinstance(item, Deliver), item
        assert isinstance(item.outcome, OnDevice)
        return self.stage.take(item.outcome)

    def close(self) -> None:
        """Let the stream run to its end, and close the stage."""
        self.device.go()
        self.stage.close()
        assert self.machine.trouble == []


def test_a_batch_comes_with_its_descriptor() -> None:
    """An `OnDevice` with the descriptor replaces the answer; the batch is copied straight from the locked ring."""
    world, ring = World(), new_ring()
    world.put(deliver(7, ring))
    item = world.next()
    assert (item.seq, item.outcome.result.seq, item.outcome.result.samples) == (7, 7, 10)
    batch = world.stage.take(item.outcome)
    world.device.advance()
    assert torch.equal(batch, batch_of(7))
    assert world.device.sources == ["ring"]
    assert world.statistics.staged_batches == 0
    world.close()


def test_the_slot_is_free_after_the_event_and_not_before() -> None:
    """However long the consumer keeps the batch, and although it took the batch before the copy was done."""
    world, ring = World(), new_ring(slots=12)
    world.put(deliver(3, ring))
    batch = world.take()
    assert world.device.waits.get(timeout=PATIENCE_S) is not None
    ring.reclaim()
    assert ring.leased == 1
    assert overwrite_free_slots(ring) == 11
    world.device.advance()
    world.stage.close()
    assert ring.idle
    assert overwrite_free_slots(ring) == 12
    assert torch.equal(batch, batch_of(3))
    world.close()


def test_the_device_is_not_asked_for_copies_without_end() -> None:
    """Two copies are under way or next; a third batch is passed on when the first copy is done."""
    world, ring = World(ahead=9), new_ring()
    world.put(*[deliver(seq, ring) for seq in range(4)])
    batches = [world.take(), world.take()]
    assert world.device.waits.get(timeout=PATIENCE_S) is not None
    assert world.out.empty()
    for _ in range(4):
        world.device.advance()
    batches += [world.take(), world.take()]
    assert all(torch.equal(batch, batch_of(seq)) for seq, batch in enumerate(batches))
    world.close()


def test_the_last_batches_slot_needs_no_successor() -> None:
    """A consumer that takes its time over the last batches of an epoch holds none of their slots."""
    world, ring = World(manual=False), new_ring()
    freed = threading.Event()
    append = ring._append_released

    def released(lease: Any) -> None:
        append(lease)
        freed.set()

    ring._append_released = released
    world.put(deliver(0, ring), Finish())
    batch = world.take()
    assert world.next() == Finish()
    assert freed.wait(PATIENCE_S)
    assert ring.idle
    assert torch.equal(batch, batch_of(0))
    world.close()


def test_a_ring_that_can_spare_no_slot_waits_for_a_copy() -> None:
    """The batch is not copied out of the ring: the slot that it needs is free in a moment."""
    world, ring = World(ahead=9), new_ring(slots=5, credits=4)  # one slot may be lent
    world.put(deliver(0, ring))
    batches = [world.take()]
    world.put(deliver(1, ring))
    assert world.device.waits.get(timeout=PATIENCE_S) is not None
    assert world.out.empty()
    world.device.advance()
    batches.append(world.take())
    world.device.advance()
    assert all(torch.equal(batch, batch_of(seq)) for seq, batch in enumerate(batches))
    assert world.device.sources == ["ring", "ring"]
    assert (world.statistics.ring_copies, world.statistics.staged_batches) == (0, 0)
    world.close()


def test_a_batch_that_others_hold_is_copied_out_and_staged() -> None:
    """The stage cannot wait for slots of which the user keeps views: they may never be free."""
    world, ring = World(ahead=9), new_ring(slots=5, credits=4)
    held = Opener(Statistics()).open(deliver(9, ring).outcome)
    world.put(deliver(0, ring))
    batch = world.take()
    assert ring.leased == 1
    overwrite_free_slots(ring)
    world.device.advance()
    assert torch.equal(batch, batch_of(0))
    assert torch.equal(held, batch_of(9))
    assert world.device.sources == ["pinned"]
    assert (world.statistics.ring_copies, world.statistics.staged_batches) == (1, 1)
    world.close()


# ------------------------------------------------------------------------------------------------- errors


def failure(world: World) -> BaseException:
    item = world.next()
    assert isinstance(item, Fail)
    error = item.error
    error.__traceback__ = None
    return error


def test_a_transform_that_raises() -> None:
    """Its error is delivered instead of the batch; copies that were begun are waited for, and the slot is released."""

    def refuse(batch: Any) -> Any:
        raise KeyError("no label")

    world, ring = World(transform=refuse), new_ring()
    world.put(deliver(0, ring))
    assert world.device.waits.get(timeout=PATIENCE_S) is not None
    assert world.out.empty()
    assert not ring.idle
    world.device.advance()  # the copy
    world.device.advance()  # and the work that the transform began
    assert isinstance(failure(world), KeyError)
    world.close()
    gc.collect()
    assert ring.idle


# ---------------------------------------------------------------------------------------- the stage's end


def test_closing_with_copies_in_flight() -> None:
    """Closing waits for the device; then the slots of all batches, prepared or not, are free, and the threads have
    ended.
    """
    world, ring = World(ahead=2), new_ring()
    world.put(*[deliver(seq, ring) for seq in range(5)])
    world.next()
    world.next()
    closer = closing(world.stage)
    assert world.device.waits.get(timeout=PATIENCE_S) is not None
    assert closer.is_alive()
    ring.reclaim()
    assert ring.leased == 2
    world.device.advance()
    world.device.advance()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert ring.idle
    assert not any(thread.is_alive() for thread in world.stage.threads())
    world.close()


def test_closing_in_the_releasers_own_thread() -> None:
    """The garbage collector may drop an iterator in that thread, too: the thread does not wait for itself."""
    world, ring = World(ahead=2), new_ring()

    class Closing:
        """Closes the stage when it is dropped."""

        def __init__(self, stage: DeviceStage) -> None:
            self.stage = stage
            self.thread: list[threading.Thread] = []

        def __del__(self) -> None:
            self.thread.append(threading.current_thread())
            self.stage.close()

    world.put(deliver(0, ring))
    world.next()
    trap = Closing(world.stage)
    where = trap.thread
    with world.device.work():
        world.stage._releaser.hold(world.device.event(), trap, 0.0)
    del trap
    world.put(deliver(1, ring))
    world.device.go()
    for thread in world.stage.threads():
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert where == [world.stage._releaser.thread]
    while not world.out.empty():
        world.out.get()
    world.close()
    assert ring.idle


def test_dropped_without_an_end() -> None:
    """The stage's threads end by themselves, once the device has done the copies it was asked for."""
    world, ring = World(), new_ring()
    world.put(deliver(0, ring))
    world.next()
    threads, device = world.stage.threads(), world.device
    del world
    gc.collect()
    ring.reclaim()
    assert ring.leased == 1
    device.advance()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert ring.idle
