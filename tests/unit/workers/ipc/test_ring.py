from __future__ import annotations

import ctypes
import gc
import os
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.errors import RingMemoryError
from asyncloader.workers.ipc import segment, wire
from asyncloader.workers.ipc.layout import HEADROOM, PAGE, grown_slot_bytes, slot_count
from asyncloader.workers.ipc.ring import Ring, WorkerRing, install_fork_hook, oneoff_anchor
from asyncloader.workers.ipc.ring_manager import CREDIT_BYTES, RUN_AHEAD_BYTES, RingManager
from tests.drawn import scaled


def new_ring() -> Ring:
    """Five slots of a page, two of them for tasks. (No fixture: pytest would hold it beyond the leak check.)"""
    ring = Ring(slots=5, slot_bytes=PAGE, credits=2)
    ring.close_fd()
    return ring


def lend(ring: Ring, nbytes: int = 64) -> torch.Tensor:
    """A batch of one tensor over a fresh slot."""
    slot = ring.take()
    assert slot is not None
    return torch.frombuffer(ring.lend(slot, nbytes), dtype=torch.uint8)


def free(ring: Ring) -> int:
    ring.reclaim()
    return len(ring._free)


@pytest.mark.parametrize("oneoff", [False, True])
def test_the_last_view_goes_without_python_code(oneoff: bool) -> None:
    """This holds also when the memory is freed with it: inside of torch at the interpreter's end, it could be fatal."""
    ring = new_ring()
    batch = lend(ring)
    if oneoff:
        fd = segment.create(PAGE)
        batch = torch.frombuffer(oneoff_anchor(fd, PAGE), dtype=torch.uint8)
        os.close(fd)
    memory = weakref.ref(batch.untyped_storage())
    del ring
    gc.collect()
    ran: list[str] = []
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        del batch
    finally:
        sys.setprofile(None)
    assert ran == []
    assert memory() is None


@pytest.mark.parametrize(
    "derive",
    [
        lambda t: t[1:3],
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: t.view(8, 8)[0],
        lambda t: t.numpy()[::2],
        lambda t: t.untyped_storage(),
        lambda t: memoryview(t.numpy()),
        lambda t: torch.from_numpy(t.numpy()),
        lambda t: t.view(torch.float32),
        lambda t: {"a": [t]},
    ],
    ids=["slice", "detach", "numpy", "row", "strided", "storage", "memoryview", "and back", "dtype", "nested"],
)
def test_whatever_shares_the_memory_keeps_the_slot(derive: object) -> None:
    """The slot is not free while any object refers to its memory, and is free afterwards."""
    ring = new_ring()
    assert callable(derive)
    view = derive(lend(ring))
    gc.collect()
    assert free(ring) == 4
    del view
    assert free(ring) == 5


def test_lending_stops_before_the_tasks_run_out_of_slots() -> None:
    """Views are lent while fewer than slots - credits are lent out; a view that dies allows the next."""
    ring = new_ring()
    held = []
    while ring.may_lend():
        held.append(lend(ring))
    assert len(held) == ring.slots - ring.credits
    assert free(ring) == ring.credits
    held.pop()
    assert ring.may_lend()


def test_lease_covers_what_the_batch_needs_and_no_more() -> None:
    """The anchor is exactly as long as the batch, at the slot's offset in the ring."""
    ring = new_ring()
    ring.take()
    slot = ring.take()
    assert slot is not None
    anchor = ring.lend(slot, 100)
    ctypes.memset(anchor, 9, 100)
    assert ctypes.sizeof(anchor) == 100
    assert ring.look(slot, PAGE).raw[:101] == b"\x09" * 100 + b"\x00"
    assert not any(ring.look(0, PAGE).raw)


def test_stale_release_is_ignored() -> None:
    """A view that outlives the retirement of its slot frees nothing when it dies."""
    ring = new_ring()
    batch = lend(ring)
    ring.retire()
    assert ring.leased == 0
    del batch
    assert free(ring) == 4
    assert not ring.idle


def test_release_of_an_older_generation_is_ignored() -> None:
    """A stale release, after its slot was lent again, does not free the slot."""
    ring = new_ring()
    batch = lend(ring)
    (old,) = ring._leases.values()
    del batch
    assert free(ring) == 5
    batch = lend(ring)
    assert list(ring._leases) == [old.slot]
    ring._released.append(old)
    assert (free(ring), ring.leased) == (4, 1)
    del batch
    assert free(ring) == 5


def test_retired_slots_count_as_lent() -> None:
    """Retired slots reduce the number that may be lent, so tasks still get slots; at the limit the ring is worn."""
    ring = new_ring()
    held = [lend(ring), lend(ring)]
    ring.retire()
    assert ring.may_lend()
    assert not ring.worn
    held.append(lend(ring))
    assert not ring.may_lend()
    ring.retire()
    assert ring.worn
    assert [ring.take() is not None for _ in range(3)] == [True, True, False]
    held.clear()
    assert ring.worn


def test_a_view_that_died_before_the_fork_is_not_retired() -> None:
    """A slot without views at the time of a fork stays in use."""
    ring = new_ring()
    batch = lend(ring)
    del batch
    ring.retire()
    assert free(ring) == 5


def test_fork_retires_leased_slots_and_no_others() -> None:
    """After a real fork the child's batch never changes: its slot is not used again."""
    ring = new_ring()
    install_fork_hook()
    batch, dropped = lend(ring), lend(ring)
    batch.fill_(7)
    go, told = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # the child reads the batch after the parent went on
        os.read(go[0], 1)
        seen = bytes(batch.tolist()) == bytes([7]) * 64
        os.write(told[1], b"y" if seen else b"n")
        os._exit(0)
    try:
        del batch, dropped
        for slot in iter(ring.take, None):
            ctypes.memset(ring.look(slot, 64), 1, 64)
        assert len(ring._free) == 0
        assert ring.slots - len(ring.retired) == 3
        os.write(go[1], b"g")
        assert os.read(told[0], 1) == b"y"
    finally:
        os.waitpid(pid, 0)
        for fd in (*go, *told):
            os.close(fd)


@pytest.mark.parametrize(("slots", "credits"), [(2, 2), (2, 3), (2, 0)])
def test_ring_needs_more_slots_than_credits(slots: int, credits: int) -> None:
    """Otherwise no view could ever be lent; the error has both numbers."""
    with pytest.raises(ValueError, match=f"slots={slots}, credits={credits}"):
        Ring(slots, PAGE, credits)


def test_impossible_size_is_a_memory_error_without_leaks() -> None:
    """The error for a ring beyond all address space has its size (and no descriptor is left: the leak check looks)."""
    with pytest.raises(RingMemoryError) as caught:
        Ring(4, 1 << 60, 1)
    assert caught.value.wanted == 4 << 60


def test_worker_side_sees_the_same_memory() -> None:
    """The consumer's view reads the bytes that the worker writes at a slot's offset."""
    ring = Ring(slots=5, slot_bytes=PAGE, credits=2)
    assert ring.fd is not None
    worker = WorkerRing(os.dup(ring.fd), ring.slots, ring.slot_bytes)
    ring.take()
    slot = ring.take()
    assert slot is not None
    start = worker.offset(slot, 5)
    assert start == slot * ring.slot_bytes
    worker.memory[start : start + 5] = b"hello"
    assert ring.lend(slot, 5).raw == b"hello"


def test_worker_reserves_pages_on_first_use() -> None:
    """Pages are allocated before they are written, no more than needed, and only once."""
    ring = Ring(slots=5, slot_bytes=PAGE, credits=2)
    assert ring.fd is not None
    worker = WorkerRing(os.dup(ring.fd), ring.slots, ring.slot_bytes)

    def allocated() -> int:
        return os.fstat(worker.fd).st_blocks * 512

    assert allocated() == 0
    worker.offset(3, 10)
    assert allocated() == PAGE
    worker.offset(3, PAGE)
    assert allocated() == PAGE
    worker.offset(0, PAGE)
    assert allocated() == 2 * PAGE


def test_oneoff_segment_lives_as_long_as_its_view() -> None:
    """When a one-off segment's descriptor is closed, its bytes stay with the view."""
    fd = segment.create(PAGE)
    segment.map_segment(fd, PAGE)[:3] = b"abc"
    anchor = oneoff_anchor(fd, 3)
    os.close(fd)
    assert anchor.raw == b"abc"


# -------------------------------------------------------------------------------------------------------------- credits


MIB = 1 << 20


def sent(manager: RingManager) -> Ring:
    """The ring that the worker is due, as if sent to it."""
    ring = manager.replacement()
    assert ring is not None
    ring.close_fd()
    return ring


def seen(manager: RingManager, seq: int, nbytes: int) -> None:
    """A batch of this size arrived that did not fit into its slot."""
    manager.assign(0, seq)
    manager.answered(0, seq, wire.ONEOFF, nbytes)


@pytest.fixture
def manager() -> Iterator[RingManager]:
    manager = RingManager(credits=257, ring_bytes=None, least_credits=2)
    yield manager
    manager.close()


def test_credits_are_given_up_for_large_batches(manager: RingManager) -> None:
    """Large batches keep the credits that fit into `CREDIT_BYTES`, at least the least; all slots stay within that."""
    sent(manager)
    for seq, (nbytes, credits) in enumerate({MIB // 2: 257, MIB: 227, 10 * MIB: 22, 100 * MIB: 2}.items()):
        seen(manager, seq, nbytes)
        assert manager.credits == credits  # before the new ring exists
        ring = sent(manager)
        assert (ring.slots, ring.slot_bytes) == (credits + HEADROOM, grown_slot_bytes(nbytes))
        assert credits == 2 or credits * ring.slot_bytes <= CREDIT_BYTES


def test_what_runs_ahead_has_memory_of_its_own() -> None:
    """Memory for running ahead is limited separately from that of the credits."""
    manager = RingManager(credits=40, ring_bytes=None, reorder_window=16, least_credits=2)
    sent(manager)
    seen(manager, 0, 20 * MIB)
    assert (manager.credits, manager.reorder_window) == (11, 2)
    ring = sent(manager)
    assert 2 * ring.slot_bytes <= RUN_AHEAD_BYTES
    manager.close()


@settings(deadline=None, max_examples=scaled(80))
@given(
    pages=st.integers(8, 2000),
    least=st.integers(1, 2),
    extra=st.integers(0, 300),
    reorder_window=st.sampled_from([0, 3, 16]),
    sizes=st.lists(st.integers(1, 40 * PAGE), max_size=8),
)
def test_ring_bytes_is_a_bound_whatever_the_credits(
    pages: int, least: int, extra: int, reorder_window: int, sizes: list[int]
) -> None:
    """No ring is larger than `ring_bytes`, however batches grow.

    Credits only decrease, never below the least; they are kept until nothing runs ahead any more.
    """
    manager = RingManager(least + extra, pages * PAGE, reorder_window, least_credits=least)
    before = manager.credits
    for seq, nbytes in enumerate([1, *sizes]):
        ring = manager.replacement()
        if ring is not None:
            ring.close_fd()
            assert ring.nbytes <= pages * PAGE
            assert ring.slots == slot_count(manager.credits) + manager.reorder_window
        assert least <= manager.credits <= before
        assert manager.credits == least + extra or not manager.reorder_window
        before = manager.credits
        _, slot = manager.assign(0, seq)
        assert manager.ring is not None
        fits = slot >= 0 and nbytes <= manager.ring.slot_bytes
        manager.answered(0, seq, slot if fits else wire.ONEOFF, nbytes)
        if fits:
            manager.ring.give_back(slot)
    manager.close()


def test_too_little_memory_takes_the_extra_credits_first(manager: RingManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine cannot hold the rings, rings of the least credits are tried; only if these fail is it an error."""
    sent(manager)
    seen(manager, 0, 10 * MIB)
    monkeypatch.setattr(segment, "memory_limit", lambda: (100 * MIB, "a test says so"))
    assert sent(manager).slots == slot_count(2)
    assert manager.credits == 2
    seen(manager, 1, 60 * MIB)
    with pytest.raises(RingMemoryError):
        manager.replacement()
