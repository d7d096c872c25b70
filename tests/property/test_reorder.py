from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.epoch.reorder import ReorderBuffer


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_any_arrival_order_becomes_task_order(arrivals: list[int], skipped: set[int]) -> None:
    """Every pushed item is released once, in order, and no later than when the last item before it is known."""
    buffer: ReorderBuffer[int] = ReorderBuffer()
    out: list[int] = []
    known: set[int] = set()
    for seq in arrivals:
        known.add(seq)
        out += buffer.skip(seq) if seq in skipped else buffer.push(seq, seq)
        head = next(n for n in range(13) if n not in known)
        assert buffer.next_seq == head
        assert out == [n for n in range(head) if n not in skipped]
        assert len(buffer) == len(known - skipped) - len(out)
    assert len(buffer) == 0
