"""Page-locked rings outlive the workers of an epoch: locked once per loader, and reused only where that is safe."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from asyncloader import DataLoader
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.layout import PAGE
from asyncloader.workers.ipc.ring_manager import RingManager
from tests.delivery.fake import FakeMachine, installed
from tests.delivery.test_loading_lifetime import some, unlocked
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers, Sized
from tests.helpers.running import KINDS, collect

SOME_KIND = pytest.mark.parametrize("kind", KINDS)


def with_array(samples: list[Any]) -> Any:
    """The array is not copied to the device: a consumer that holds it holds the slot."""
    batch = default_collate(samples)
    return batch, batch.numpy() + 1


@SOME_KIND
def test_the_next_workers_get_the_rings_of_those_before(kind: str) -> None:
    """Each ring is locked once, whether epochs are read to their ends or left before, and unlocked with the loader."""
    expected = collect("sync", Numbers(20), batch_size=4)
    with installed() as machine:
        epochs = some(kind, [-1, 2, -1, -1], Numbers(20), batch_size=4, num_workers=2, device="cpu")
        assert len(machine.locks) == 2
        assert unlocked(machine)
    for epoch, count in zip(epochs, (5, 2, 5, 5), strict=True):
        assert_same(epoch, expected[:count])


@pytest.mark.parametrize("every", [False, True], ids=["last", "every"])
def test_batches_that_are_held_when_the_epoch_ends(every: bool) -> None:
    """A slot that is held keeps its content, whatever the next workers write. One held batch per epoch, as a loop's
    variable holds, is no reason for new rings.
    """
    expected = collect("sync", Numbers(24), batch_size=2, collate_fn=with_array)
    held: list[Any] = []
    with installed() as machine:
        with DataLoader[Any](Numbers(24), batch_size=2, num_workers=2, device="cpu", collate_fn=with_array) as loader:
            for _ in range(3):
                for number, batch in enumerate(loader):
                    held += [batch] if every or number == 11 else []
                    del batch
        assert every or len(machine.locks) == 2
        assert_same(held, expected * 3 if every else expected[-1:] * 3)
        held.clear()
        assert unlocked(machine)


def test_a_ring_that_has_grown() -> None:
    """The next epoch begins with the grown ring: every batch fits it, and nothing is locked again."""
    dataset = Sized([1 << 10] * 6 + [1 << 20] * 10)
    expected = collect("sync", dataset, collate_fn=torch.stack)
    with (
        installed() as machine,
        DataLoader[Any](dataset, num_workers=1, device="cpu", collate_fn=torch.stack) as loader,
    ):
        assert_same(list(loader), expected)
        staged = loader.stats()["device/staged_batches"]
        assert staged > 0
        assert [lock.undone for lock in machine.locks] == [1, 0]
        assert_same([*loader, *loader], expected * 2)
        assert loader.stats()["device/staged_batches"] == staged
        assert len(machine.locks) == 2


@pytest.mark.thorough
def test_a_worker_that_had_to_be_killed() -> None:
    """Its ring is never used again: a process that the worker forked may still write there."""
    with installed() as machine, DataLoader[Any](Numbers(20), batch_size=4, num_workers=2, device="cpu") as loader:
        batches: Any = iter(loader)
        for _ in range(5):
            next(batches)
        os.kill(batches._pool.processes[0].pid, signal.SIGSTOP)
        assert list(batches) == []
        del batches
        gc.collect()
        assert sorted(lock.undone for lock in machine.locks) == [0, 1]
        assert_same(list(loader), collect("sync", Numbers(20), batch_size=4))
        assert len(machine.locks) == 3


def test_closing_and_dropping_a_loader() -> None:
    """`close` unlocks the rings although an exhausted iterator is kept. Without `close`, the loader and the iterator
    must be dropped.
    """
    for close in (True, False):
        with installed() as machine:
            loader = DataLoader[Any](Numbers(20), num_workers=2, device="cpu")
            batches: Any = iter(loader)
            assert len(list(batches)) == 20
            assert len(machine.locked) == 2
            if close:
                loader.close()
            else:
                del loader
                assert len(machine.locked) == 2
                del batches
            assert unlocked(machine)


def test_a_fork_between_epochs() -> None:
    """The child's loader uses no ring of its parent's, and unlocks none of them."""
    expected = collect("sync", Numbers(20), batch_size=4)
    with installed() as machine, DataLoader[Any](Numbers(20), batch_size=4, num_workers=2, device="cpu") as loader:
        assert_same(list(loader), expected)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if _is_right_in_child(machine, loader, expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert_same(list(loader), expected)
        assert [lock.undone for lock in machine.locks] == [0, 0]


def _is_right_in_child(machine: FakeMachine, loader: Any, expected: list[Any]) -> bool:
    try:
        assert_same(list(loader), expected)
        loader.close()
        gc.collect()
        return [lock.undone for lock in machine.locks] == [0, 0, 1, 1]
    except BaseException:
        return False


# ------------------------------------------------------------------------------------------------- one manager


@pytest.mark.parametrize("delivered", [False, True])
def test_a_slot_that_somebody_still_has(delivered: bool) -> None:
    """A ring with an answer that was neither delivered nor discarded when the epoch ended is not handed on: two
    epochs would write to it. A task without an answer is no reason.
    """
    manager = RingManager(credits=3, ring_bytes=12 * PAGE)
    ring = manager.replacement()
    assert ring is not None
    ring.lock_pages(lambda *_: lambda: None)
    _, slot = manager.assign(0, 1)
    manager.assign(0, 2)
    assert manager.answered(0, 1, slot, 10) is ring
    heir = manager.successor()
    assert manager.ring is None
    if delivered:
        ring.give_back(slot)
    inherited = heir.replacement()
    assert inherited is not None
    assert (inherited is ring) is delivered
    assert heir.replacement() is None
    assert heir.assign(0, 0)[1] != wire.NO_SLOT
    heir.close()


def test_only_what_is_locked_is_handed_on() -> None:
    """Of a ring that is not locked, the successor keeps the learned size: its ring has slots that the batches fit."""
    manager = RingManager(credits=3, ring_bytes=None)
    small = manager.replacement()
    assert small is not None
    manager.assign(0, 0)
    manager.answered(0, 0, wire.ONEOFF, 1 << 20)
    first = manager.successor().replacement()
    assert first is not None
    assert first is not small
    assert first.slot_bytes >= 1 << 20
    for ring in (small, first):
        ring.close_fd()
