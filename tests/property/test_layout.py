from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.workers.ipc.layout import PAGE, align, fit_slot_bytes, grown_slot_bytes

sizes = st.integers(0, 1 << 45)


@given(sizes, st.integers(0, 16).map(lambda n: 1 << n))
def test_align_is_the_next_multiple(nbytes: int, boundary: int) -> None:
    """The result is a multiple, not below the size, and less than one boundary above it."""
    assert align(nbytes, boundary) % boundary == 0
    assert 0 <= align(nbytes, boundary) - nbytes < boundary


@given(sizes)
def test_grown_slot_holds_the_batch(nbytes: int) -> None:
    """A grown slot fits the batch that it grew for, in whole pages, with no more than an eighth and a page to spare."""
    grown = grown_slot_bytes(nbytes)
    assert grown % PAGE == 0
    assert nbytes <= grown < nbytes + nbytes // 8 + PAGE


@given(st.integers(1, 1 << 40), st.integers(2, 40), st.none() | st.integers(1, 1 << 40))
def test_fit_respects_bound_and_batch(nbytes: int, slots: int, ring_bytes: int | None) -> None:
    """The slot is whole pages; the ring stays within its bound; a batch that can fit within it does."""
    slot = fit_slot_bytes(nbytes, slots, ring_bytes)
    assert slot % PAGE == 0
    assert slot >= PAGE
    if ring_bytes is None:
        assert slot >= nbytes
        return
    assert slot * slots <= max(ring_bytes, slots * PAGE)
    if align(nbytes, PAGE) * slots <= ring_bytes:
        assert slot >= nbytes
