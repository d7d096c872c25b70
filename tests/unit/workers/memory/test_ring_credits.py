"""How many batches a worker may have in hand, given the memory of its ring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.errors import RingMemoryError
from asyncloader.workers.ipc import wire
from asyncloader.workers.memory import segment
from asyncloader.workers.memory.layout import HEADROOM, PAGE, grown_slot_bytes, slot_count
from asyncloader.workers.memory.ring import Ring
from asyncloader.workers.memory.ring_manager import CREDIT_BYTES, RUN_AHEAD_BYTES, RingManager
from tests.drawn import scaled

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
