from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from asyncloader.errors import RingMemoryError
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.layout import PAGE, grown_slot_bytes, slot_count
from asyncloader.workers.ipc.ring import Ring
from asyncloader.workers.ipc.ring_manager import RingManager
from asyncloader.workers.ipc.segment import memory_limit


@pytest.fixture
def manager() -> Iterator[RingManager]:
    manager = RingManager(credits=2, ring_bytes=None)
    yield manager
    manager.close()


def sent(manager: RingManager) -> Ring:
    """The ring that the worker is due, as if sent to it."""
    ring = manager.replacement()
    assert ring is not None
    ring.close_fd()
    return ring


def test_answer_in_a_slot_leaves_it_to_the_reader(manager: RingManager) -> None:
    """The ring is returned with the answer; its slot is taken until the batch is opened or discarded."""
    ring = sent(manager)
    number, slot = manager.assign(0, 0)
    assert (number, slot) == (0, 0)
    assert manager.answered(0, 0, slot, 100) is ring
    assert not ring.idle
    ring.give_back(slot)
    assert ring.idle


@pytest.mark.parametrize(("slot", "nbytes"), [(wire.NO_SLOT, 0), (wire.ONEOFF, 10)])
def test_an_unused_slot_comes_back_with_the_answer(manager: RingManager, slot: int, nbytes: int) -> None:
    """A batch without bytes, an error, or a one-off segment did not use the slot."""
    ring = sent(manager)
    manager.assign(0, 0)
    assert manager.answered(0, 0, slot, nbytes) is None
    assert ring.idle


def test_ring_grows_to_the_batch_that_did_not_fit(manager: RingManager) -> None:
    """After a batch too large for its slot, the next ring has slots for it, and another number."""
    sent(manager)
    manager.assign(0, 0)
    manager.answered(0, 0, wire.ONEOFF, 1 << 20)
    ring = sent(manager)
    assert (ring.number, ring.slot_bytes) == (1, grown_slot_bytes(1 << 20))
    assert manager.replacement() is None


@pytest.mark.parametrize(("room", "slots"), [(0, 2), (2, 2), (3, 3), (5, 5), (100, slot_count(2))])
def test_a_bound_leaves_out_slots(manager: RingManager, room: int, slots: int) -> None:
    """A ring has as many slots as the bound allows, but two, and not less room for a batch; each can be used."""
    sent(manager)
    manager.assign(0, 0)
    manager.answered(0, 0, wire.ONEOFF, 1 << 20)
    size = grown_slot_bytes(1 << 20)
    ring = manager.replacement(room * size)
    assert ring is not None
    assert (ring.slots, ring.slot_bytes) == (slots, size)
    got = [manager.assign(1, task)[1] for task in range(slots + 1)]
    assert sorted(got) == [wire.NO_SLOT, *range(slots)]
    assert manager.replacement(size) is None  # a ring that was sent stays


def test_old_ring_takes_back_its_own_slots(manager: RingManager) -> None:
    """A task given before the growth is answered in the old ring, whose slot is released to it."""
    old = sent(manager)
    manager.assign(0, 0)
    _, slot = manager.assign(0, 1)
    manager.answered(0, 0, wire.ONEOFF, 1 << 20)
    new = sent(manager)
    assert manager.answered(0, 1, slot, 50) is old
    old.give_back(slot)
    assert old.idle
    assert new.idle


def test_ring_bytes_bounds_every_ring() -> None:
    """With ring_bytes the ring has that size from the start and never grows beyond it."""
    manager = RingManager(credits=2, ring_bytes=100 * PAGE)
    ring = sent(manager)
    assert ring.slot_bytes == 100 // slot_count(2) * PAGE
    assert ring.nbytes <= 100 * PAGE
    manager.assign(0, 0)
    manager.answered(0, 0, wire.ONEOFF, 1 << 30)
    assert manager.replacement() is None
    manager.close()


def test_ring_bytes_that_can_never_fit_is_refused_at_once() -> None:
    """The error is raised before anything is made, and names the option and its value."""
    with pytest.raises(RingMemoryError, match=r"ring_bytes=1152921504606846976") as caught:
        RingManager(credits=2, ring_bytes=1 << 60)
    assert caught.value.wanted == 1 << 60


def test_rings_of_all_workers_are_counted() -> None:
    """Memory for the ring of one worker may not suffice for two: the rings are refused together, with the numbers."""
    room, _ = memory_limit()
    assert room is not None
    RingManager(credits=2, ring_bytes=room * 6 // 10).close()
    with pytest.raises(RingMemoryError, match=rf"2 rings of ring_bytes={room * 6 // 10}") as caught:
        RingManager(credits=2, ring_bytes=room * 6 // 10, workers=2)
    assert caught.value.wanted == 2 * (room * 6 // 10)
    assert caught.value.limit is not None
    assert caught.value.limit < caught.value.wanted


def test_ring_that_could_not_be_filled_is_not_made() -> None:
    """A ring that follows its batches is refused if the credits' worth of them, for all workers, has no room."""
    manager = RingManager(credits=2, ring_bytes=None, workers=4)
    sent(manager)
    room, _ = memory_limit()
    assert room is not None
    manager.assign(0, 0)
    manager.answered(0, 0, wire.ONEOFF, room // 4)
    with pytest.raises(RingMemoryError, match="4 rings for 2 batches of"):
        manager.replacement()
    manager.close()


def test_worn_ring_is_replaced(manager: RingManager) -> None:
    """A ring that could never lend again is replaced by a fresh ring of the same size."""
    ring = sent(manager)
    held: list[object] = []
    while ring.may_lend():
        _, slot = manager.assign(0, len(held))
        manager.answered(0, len(held), slot, 10)
        held.append(ring.lend(slot, 10))
    assert manager.replacement() is None
    ring.retire()
    fresh = sent(manager)
    assert (fresh.number, fresh.slot_bytes) == (1, ring.slot_bytes)
    assert manager.replacement() is None


def test_void_returns_the_slots_of_every_task(manager: RingManager) -> None:
    """A worker whose dataset ended answers none of its tasks: all their slots are free."""
    ring = sent(manager)
    for seq in range(3):
        manager.assign(0, seq)
    assert len(manager.tasks) == 3
    manager.void()
    assert ring.idle
    assert not len(manager.tasks)
    manager.void()
    assert len(ring._free) == ring.slots


def test_reset_done_returns_the_slots_of_older_epochs_only(manager: RingManager) -> None:
    """Tasks of the new epoch may have been given before the worker reported that it dropped the old ones."""
    ring = sent(manager)
    manager.assign(0, 0)
    manager.assign(0, 1)
    _, slot = manager.assign(1, 0)
    manager.reset_done(1)
    assert len(ring._free) == ring.slots - 1
    assert len(manager.tasks) == 1
    assert manager.answered(1, 0, slot, 10) is ring


def test_late_answer_after_reset_frees_nothing_twice(manager: RingManager) -> None:
    """A slot that was freed by the reset is not freed again by a late answer."""
    ring = sent(manager)
    _, slot = manager.assign(0, 0)
    manager.reset_done(1)
    assert manager.answered(0, 0, slot, 10) is None
    assert len(ring._free) == ring.slots


def test_close_closes_the_descriptor() -> None:
    """`close` releases a ring that was never sent, and its descriptor; views stay valid, and its size is kept."""
    manager = RingManager(credits=1, ring_bytes=None)
    ring = manager.replacement()
    assert ring is not None
    fd = ring.fd
    assert fd is not None
    view = ring.lend(manager.assign(0, 0)[1], 4)
    manager.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert manager.ring is None
    assert manager.nbytes == ring.nbytes
    assert view.raw == bytes(4)


# ----------------------------------------------------------------------------------------------- reorder_window
