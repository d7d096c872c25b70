from __future__ import annotations

import ctypes
import gc
import os
import sys
import weakref

import pytest
import torch

from asyncloader.errors import RingMemoryError
from asyncloader.workers.memory import segment
from asyncloader.workers.memory.layout import PAGE
from asyncloader.workers.memory.ring import Ring, WorkerRing, install_fork_hook, oneoff_anchor


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
