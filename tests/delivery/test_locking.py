"""A ring is page-locked once, and the lock lasts exactly as long as its memory."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from asyncloader.delivery.device_stage import RingLocker
from asyncloader.delivery.opener import Opener
from asyncloader.errors import PageLockError, RingMemoryError
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.ipc import ring as ring_module
from asyncloader.workers.ipc import segment
from asyncloader.workers.ipc.layout import PAGE
from asyncloader.workers.ipc.ring import Ring
from tests.delivery.answers import deliver, new_ring
from tests.delivery.fake import FakeMachine

LINUX_ONLY = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="madvise elsewhere has no MADV_POPULATE_WRITE: nothing is fetched"
)


def locker(machine: FakeMachine) -> tuple[RingLocker, Statistics]:
    statistics = Statistics()
    return RingLocker(machine.open(), statistics), statistics


def test_a_ring_is_locked_once() -> None:
    """One call locks all of it when the first batch arrives; bytes and seconds are counted."""
    machine = FakeMachine()
    rings, statistics = locker(machine)
    ring = new_ring()
    assert not ring.locked
    assert all(rings.lock(ring) for _ in range(3))
    assert ring.locked
    (lock,) = machine.locks
    assert lock.nbytes == ring.nbytes == 12 * PAGE
    assert statistics.page_locked_bytes == ring.nbytes
    assert statistics.page_lock_s > 0
    batch = Opener(statistics).open(deliver(3, ring).outcome)
    assert lock.holds(batch)


def test_nothing_to_lock() -> None:
    """A batch without a ring, or a device that cannot lock memory: the batch takes the pinned path."""
    rings, statistics = locker(FakeMachine())
    assert not rings.lock(None)
    without, _ = locker(FakeMachine(lockable=False))
    ring = new_ring()
    assert not without.lock(ring)
    assert not ring.locked
    assert statistics.page_locked_bytes == 0


def test_a_refusal_is_raised_and_nothing_is_locked() -> None:
    """This holds each time: the ring does not count as locked, and its end unlocks nothing."""
    machine = FakeMachine(refusal=PageLockError(12 * PAGE, 65536, "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"))
    rings, statistics = locker(machine)
    ring = new_ring()
    for _ in range(2):
        with pytest.raises(PageLockError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            rings.lock(ring)
    assert not ring.locked
    assert statistics.page_locked_bytes == 0
    del ring
    gc.collect()
    assert machine.locks == []


def test_the_error_tells_size_limit_and_reason() -> None:
    """It also says what to do; it is a MemoryError, and can be pickled."""
    error = PageLockError(3 << 30, 65536, "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(each, MemoryError)
        for words in ("3,221,225,472 bytes", "65,536 bytes", "ulimit -l", "memlock=-1", "CUDA_ERROR_OUT_OF_MEMORY (2)"):
            assert words in str(each)
    assert "ulimit" not in str(PageLockError(1, None, "x"))


def test_it_is_unlocked_when_the_last_view_has_gone() -> None:
    """The ring's end does not unlock it: batches may still refer to it. It is unlocked once, before it is unmapped."""
    machine = FakeMachine()
    rings, statistics = locker(machine)
    ring = new_ring()
    rings.lock(ring)
    batch = Opener(statistics).open(deliver(3, ring).outcome)
    part = batch[2:4]
    del ring, batch
    gc.collect()
    assert [lock.undone for lock in machine.locks] == [0]
    assert part.tolist() == [3, 3]
    del part
    gc.collect()
    assert [lock.undone for lock in machine.locks] == [1]
    assert machine.trouble == []


def test_the_garbage_collector_may_unlock_it_in_any_thread() -> None:
    """It is unlocked once, in the thread whose collection finds the ring unreachable."""
    machine = FakeMachine()
    rings, _ = locker(machine)
    ring = new_ring()
    rings.lock(ring)
    circle: list[Any] = [ring]
    circle.append(circle)
    gc.disable()
    try:
        del ring, circle
        assert machine.locks[0].undone == 0
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    finally:
        gc.enable()
    assert (machine.locks[0].undone, machine.locks[0].undone_in) == (1, thread)
    assert machine.trouble == []


# --------------------------------------------------------------------------------------------- mappings


def new_mapping(nbytes: int = 4 * PAGE) -> segment.Mapping:
    fd = segment.create(nbytes)
    try:
        return segment.map_segment(fd, nbytes)
    finally:
        os.close(fd)


# --------------------------------------------------------------------------------------------- pages


def resident(mapping: segment.Mapping, address: int) -> int:
    """Return the number of the mapping's pages that are resident."""
    pages = len(mapping) // PAGE
    vector = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), vector) == 0
    return sum(byte & 1 for byte in vector)


@LINUX_ONLY
def test_populating_gets_every_page_and_changes_none() -> None:
    """Pages that were never touched become resident, too."""
    mapping = new_mapping(64 * PAGE)
    mapping[5 * PAGE] = 7
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    assert resident(mapping, address) < 64
    segment.populate(mapping, address)
    assert resident(mapping, address) == 64
    assert mapping[5 * PAGE] == 7
    assert bytes(mapping).count(0) == 64 * PAGE - 1


def test_populating_what_can_never_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before a page is asked for: a control group over its limit has a process killed."""
    monkeypatch.setattr(segment, "memory_limit", lambda: (PAGE, "memory available on this machine"))
    ring = Ring(slots=12, slot_bytes=PAGE, credits=4)
    ring.close_fd()
    calls: list[tuple[int, int]] = []

    def lock(address: int, nbytes: int) -> Any:
        calls.append((address, nbytes))

    with pytest.raises(RingMemoryError, match="all pages of a ring"):
        ring.lock_pages(lock)
    assert calls == []
    assert not ring.locked


@LINUX_ONLY
def test_pages_that_cannot_be_had_are_an_error_of_memory() -> None:
    """The kernel's refusal names its reason: here the addresses are not mapped."""
    mapping = new_mapping()
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    with pytest.raises(RingMemoryError, match="madvise of the ring: Cannot allocate memory"):
        segment.populate(mapping, 1 << 46 | address & (PAGE - 1))


@pytest.mark.parametrize("refused", [None, 0, 1, 2])
def test_a_large_ring_is_locked_in_parts(refused: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of whole slots are locked in a row and unlocked together; a refusal undoes the parts before it at once."""
    monkeypatch.setattr(ring_module, "LOCK_BYTES", 2 * PAGE + 1)
    ring = new_ring(slots=5, credits=2)
    asked: list[tuple[int, int]] = []
    undone: list[int] = []

    def lock(address: int, nbytes: int) -> Callable[[], None]:
        if len(asked) == refused:
            raise PageLockError(nbytes, None, "no more")
        asked.append((address, nbytes))
        return partial(undone.append, address)

    if refused is None:
        ring.lock_pages(lock)
    else:
        with pytest.raises(PageLockError):
            ring.lock_pages(lock)
    assert ring.locked is (refused is None)
    first = asked[0][0] if asked else 0
    parts = [(first, 2 * PAGE), (first + 2 * PAGE, 2 * PAGE), (first + 4 * PAGE, PAGE)]
    assert asked == parts[:refused]
    assert len(undone) == (refused or 0)
    del ring
    assert sorted(undone) == [address for address, _ in asked]
