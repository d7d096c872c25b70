"""The benchmark of sequence packing: it runs, and counts the tokens. No speed is asserted."""

from __future__ import annotations

import pytest

from . import sequence_packing


@pytest.mark.thorough
def test_packing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Both distributions, all strategies, and the three ways to make rows."""
    sequence_packing.main(["--rounds", "1", "--number", "300"])
    found = capsys.readouterr().out
    assert found.count("best_fit_wrap") == 4
    assert found.count("million tokens/s") == 6


def test_lost_tokens_are_found() -> None:
    """A loader that gives another number of tokens fails."""
    ways = sequence_packing.loaders(sequence_packing.lengths_of(50)["texts"])
    with pytest.raises(AssertionError, match="tokens came of 1"):
        sequence_packing.seconds(ways["PackingSampler"], 1)
