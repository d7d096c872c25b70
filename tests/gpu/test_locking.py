"""Page-locking by the real driver."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import pytest
import torch

from asyncloader.delivery.cuda import Driver, open_driver
from asyncloader.delivery.opener import Opener
from asyncloader.errors import PageLockError
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.ipc import segment
from asyncloader.workers.ipc.layout import PAGE
from tests.delivery.answers import batch_of, deliver, new_ring
from tests.gpu.card import NEEDS_CARD

pytestmark = NEEDS_CARD


def driver() -> Driver:
    found = open_driver(torch.cuda.current_device())
    assert found is not None
    return found


def works() -> bool:
    """Whether the device still computes, without a pending error."""
    torch.cuda.synchronize()
    return bool((torch.ones(1000, device="cuda") * 2).sum().item() == 2000)


def test_a_locked_ring_counts_as_pinned_memory() -> None:
    """torch counts it as pinned, too: a batch in the ring is pinned after the lock, not before; it can be copied."""
    ring = new_ring()
    before = Opener(Statistics()).open(deliver(3, ring).outcome)
    assert not before.is_pinned()
    ring.lock_pages(driver().lock)
    batch = Opener(Statistics()).open(deliver(7, ring).outcome)
    assert before.is_pinned()
    assert batch.is_pinned()
    assert torch.from_numpy(batch.numpy()).is_pinned()
    copy = batch.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(copy.cpu(), batch_of(7))
    assert works()


def test_a_range_can_be_locked_again_when_it_was_unlocked() -> None:
    """Before that, the driver reports that it is locked, and continues to work."""
    fd = segment.create(64 * PAGE)
    mapping = segment.map_segment(fd, 64 * PAGE)
    os.close(fd)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    lock = driver().lock
    undo = lock(address, 64 * PAGE)
    with pytest.raises(PageLockError, match="ALREADY_REGISTERED"):
        lock(address, 64 * PAGE)
    assert works()
    undo()
    lock(address, 64 * PAGE)()
    assert works()


def test_rings_are_unlocked_before_they_are_unmapped() -> None:
    """A thousand rings, at addresses that are used again: a ring left locked would make the next lock fail."""
    lock = driver().lock
    for number in range(1000):
        ring = new_ring()
        ring.lock_pages(lock)
        batch = Opener(Statistics()).open(deliver(number, ring).outcome)
        del ring
        assert batch.is_pinned()
        del batch
    gc.collect()
    assert works()


@pytest.mark.parametrize("nbytes", [PAGE, 1 << 20])
def test_a_refusal_leaves_no_error_behind(nbytes: int) -> None:
    """Unmapped memory cannot be locked. An error left behind would be raised by the next call to the device."""
    with pytest.raises(PageLockError) as caught:
        driver().lock(1 << 46, nbytes)
    assert caught.value.reason.startswith("CUDA_ERROR_")
    assert torch.zeros(1, device="cuda").item() == 0
    assert works()


def test_any_thread_may_lock_and_another_unlock() -> None:
    """This includes threads that have never used CUDA; they have no context before and after."""
    ring = new_ring()
    lock = driver()
    contexts: list[int | None] = []

    def current() -> int | None:
        context = ctypes.c_void_p()
        assert lock._library.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value

    def begin() -> None:
        contexts.append(current())
        ring.lock_pages(lock.lock)
        contexts.append(current())

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert contexts == [None, None]
    assert ring.locked
    undo = ring._memory.before_unmapping
    assert undo is not None
    ring._memory.before_unmapping = None

    def end() -> None:
        undo()
        contexts.append(current())

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert contexts == [None, None, None]
    assert not Opener(Statistics()).open(deliver(0, ring).outcome).is_pinned()
    assert works()
