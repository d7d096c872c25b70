from __future__ import annotations

import pytest

from asyncloader.epoch.reorder import ReorderBuffer


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
