from __future__ import annotations

import pytest

from asyncloader.workers.memory.layout import (
    ALIGNMENT,
    FIRST_SLOT_BYTES,
    HEADROOM,
    PAGE,
    align,
    fit_slot_bytes,
    grown_slot_bytes,
    slot_count,
)


@pytest.mark.parametrize(
    ("nbytes", "boundary", "aligned"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (4097, 4096, 8192)]
)
def test_align_rounds_up(nbytes: int, boundary: int, aligned: int) -> None:
    """Sizes are rounded up to the next multiple; multiples stay."""
    assert align(nbytes, boundary) == aligned


def test_leaves_lie_on_cache_lines() -> None:
    """The default boundary is the cache line."""
    assert [align(1), align(ALIGNMENT)] == [ALIGNMENT, ALIGNMENT]


def test_ring_has_headroom_beyond_its_credits() -> None:
    """Views can be lent out while every credit is in use."""
    assert slot_count(2) == 2 + HEADROOM
    assert HEADROOM > 0


def test_first_slot_is_whole_pages() -> None:
    """Slots begin on pages, also in the first ring."""
    assert FIRST_SLOT_BYTES % PAGE == 0


def test_grown_slot_has_an_eighth_to_spare() -> None:
    """A slot grows to the size of the batch and an eighth more, in whole pages."""
    assert grown_slot_bytes(80 * PAGE) == 90 * PAGE
    assert grown_slot_bytes(1) == PAGE


def test_unbounded_ring_grows_as_it_likes() -> None:
    """Without ring_bytes the slot has the grown size."""
    assert fit_slot_bytes(80 * PAGE, 8, None) == grown_slot_bytes(80 * PAGE)


def test_bound_takes_the_spare_eighth_first() -> None:
    """A batch that just fits the bound gets a slot, without room to spare."""
    assert fit_slot_bytes(80 * PAGE, 8, 8 * 82 * PAGE) == 82 * PAGE


def test_bound_holds_although_the_batch_does_not_fit() -> None:
    """A batch larger than the bound allows does not make the ring exceed it."""
    assert fit_slot_bytes(80 * PAGE, 8, 8 * 10 * PAGE) == 10 * PAGE


def test_slot_is_at_least_a_page() -> None:
    """Even a tiny ring_bytes gives slots of a page."""
    assert fit_slot_bytes(1 << 20, 8, 1) == PAGE
