from __future__ import annotations

import pytest

from asyncloader.epoch.reorder import ReorderBuffer


def test_in_order_items_pass_through() -> None:
    """Items that arrive in order are returned at once."""
    buffer: ReorderBuffer[str] = ReorderBuffer()
    assert [buffer.push(0, "a"), buffer.push(1, "b")] == [["a"], ["b"]]
    assert len(buffer) == 0


def test_early_items_wait() -> None:
    """An item waits for all items before it, and is released by the missing item."""
    buffer: ReorderBuffer[str] = ReorderBuffer()
    assert buffer.push(2, "c") == []
    assert buffer.push(1, "b") == []
    assert len(buffer) == 2
    assert buffer.push(0, "a") == ["a", "b", "c"]
    assert (len(buffer), buffer.next_seq) == (0, 3)


def test_skip_sets_later_items_free() -> None:
    """A skipped number does not hold up the items after it."""
    buffer: ReorderBuffer[str] = ReorderBuffer()
    assert buffer.push(1, "b") == []
    assert buffer.skip(0) == ["b"]
    assert buffer.skip(3) == []
    assert buffer.push(2, "c") == ["c"]
    assert buffer.next_seq == 4


@pytest.mark.parametrize("first", ["push", "skip"])
@pytest.mark.parametrize("second", ["push", "skip"])
@pytest.mark.parametrize("seq", [0, 3])
def test_a_number_comes_once(first: str, second: str, seq: int) -> None:
    """A repeated number is an error that names it, whether its item was passed on already or still waits."""
    buffer: ReorderBuffer[str] = ReorderBuffer()

    def take(way: str) -> list[str]:
        return buffer.push(seq, "x") if way == "push" else buffer.skip(seq)

    take(first)
    with pytest.raises(ValueError, match=f"sequence number {seq} came twice"):
        take(second)
