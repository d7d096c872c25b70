"""Sizes and offsets: how a ring is cut into slots and a slot into leaves. Pure arithmetic.

Data path: worker -> [layout, of the ring and its slots] -> consumer.

    ring     | slot 0 | slot 1 | ... | slot n-1 |        every slot `slot_bytes` long, a multiple of the page
    slot     | leaf 0 | pad | leaf 1 | pad | ... |       every leaf on a 64-byte boundary (one cache line)

How many slots: `credits` of them may be written or wait for the consumer at any time; the others (`HEADROOM`) may be
lent out as views. Slots are virtual until first used, so headroom that is never needed costs no memory.
"""

from __future__ import annotations

__all__ = [
    "ALIGNMENT",
    "FIRST_SLOT_BYTES",
    "HEADROOM",
    "PAGE",
    "align",
    "fit_slot_bytes",
    "grown_slot_bytes",
    "slot_count",
]

ALIGNMENT = 64
PAGE = 4096

HEADROOM = 6
"""Slots a ring has beyond its credits. A consumer that keeps as many batches of one worker gets views of all of them;
more are copied out. Six covers gradient accumulation over four batches with two workers and two batches in hand."""

FIRST_SLOT_BYTES = 64 * 1024
"""A new ring's slot: enough for batches of small records, nothing to speak of in memory."""


def align(nbytes: int, boundary: int = ALIGNMENT) -> int:
    """Round up to a multiple of `boundary` (a power of two)."""
    return (nbytes + boundary - 1) & -boundary


def slot_count(credits: int) -> int:
    """Slots of a ring whose worker has `credits` tasks outstanding."""
    return credits + HEADROOM


def grown_slot_bytes(nbytes: int) -> int:
    """The slot for batches of which one of `nbytes` was seen: an eighth larger, in whole pages.

    Batches of variable length would otherwise outgrow the ring again and again by a little.
    """
    return align(nbytes + nbytes // 8, PAGE)


def fit_slot_bytes(nbytes: int, slots: int, ring_bytes: int | None) -> int:
    """`grown_slot_bytes`, bounded so that the ring stays within `ring_bytes` (None: no bound). At least one page."""
    wanted = grown_slot_bytes(nbytes)
    if ring_bytes is None:
        return wanted
    largest = max(PAGE, ring_bytes // slots // PAGE * PAGE)
    if wanted > largest >= align(nbytes, PAGE):
        return largest  # no room for the extra eighth
    return min(wanted, largest)
