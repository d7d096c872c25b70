"""Computes sizes and offsets of slots in a ring and of leaves in a slot. Pure arithmetic.

Data path: worker -> [layout, of the ring and its slots] -> consumer.

    ring     | slot 0 | slot 1 | ... | slot n-1 |        every slot `slot_bytes` long, a multiple of the page
    slot     | leaf 0 | pad | leaf 1 | pad | ... |       every leaf on a 64-byte boundary (one cache line)

Of the slots, `credits` may be written or wait for the consumer at any time; the others (`HEADROOM`) may be lent out as
views. Slots take memory only once used, so unused headroom costs none.
"""

from __future__ import annotations

ALIGNMENT = 64
PAGE = 4096

HEADROOM = 6
"""Slots of a ring beyond its credits. A consumer that keeps up to this many batches of one worker gets views of all of
them; further batches are copied out. Six is enough to accumulate gradients over four batches with two workers."""

FIRST_SLOT_BYTES = 64 * 1024
"""Slot size of a new ring: enough for batches of small records, and little memory."""


def align(nbytes: int, boundary: int = ALIGNMENT) -> int:
    """Round up to a multiple of `boundary` (a power of two)."""
    return (nbytes + boundary - 1) & -boundary


def slot_count(credits: int) -> int:
    """Return the number of slots of a ring whose worker may have `credits` outstanding tasks."""
    return credits + HEADROOM


def grown_slot_bytes(nbytes: int) -> int:
    """Return the slot size after a batch of `nbytes` was seen: an eighth larger, in whole pages.

    Without the extra eighth, batches of variable length would outgrow the ring again and again.
    """
    return align(nbytes + nbytes // 8, PAGE)


def fit_slot_bytes(nbytes: int, slots: int, ring_bytes: int | None) -> int:
    """Return `grown_slot_bytes`, or less, so that all slots fit into `ring_bytes`.

    Without `ring_bytes` there is no bound. A slot has at least one page.
    """
    wanted = grown_slot_bytes(nbytes)
    if ring_bytes is None:
        return wanted
    largest = max(PAGE, ring_bytes // slots // PAGE * PAGE)
    if wanted > largest >= align(nbytes, PAGE):
        return largest  # no room for the extra eighth
    return min(wanted, largest)
