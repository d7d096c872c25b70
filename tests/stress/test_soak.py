"""How the soak (`python -m tests.stress.soak`) judges growth."""

from __future__ import annotations

from tests.stress.soak import growth


def test_growth_is_told_from_noise() -> None:
    """A slope is growth; a level, a peak, and growth at the beginning only are not."""
    assert growth("descriptors", [10 + number for number in range(30)]) == "descriptors: 17 -> 32 -> 37"
    assert growth("descriptors", [10 + number % 7 for number in range(30)]) == ""
    assert growth("descriptors", [10] * 27 + [90] * 3) == ""
    assert growth("descriptors", [1, 5, 9, 40, 60] + [90] * 25) == ""
    assert growth("MiB", [100 + 2 * number for number in range(60)]) != ""
    assert growth("zombies", [0] * 10 + [2] * 20) != ""
    assert growth("threads", [3.0]) == ""
