"""The comparison of predictions with runs: both sides are measured on the same store. No speed is asserted."""

from __future__ import annotations

import pytest

from . import remote_forecast
from .harness import Results
from .remote_forecast import CASES, Case

pytestmark = [pytest.mark.network, pytest.mark.slow]


def test_both_sides_are_measured() -> None:
    """A case with a bandwidth, decoding and a step has a line in the table."""
    case = Case("large", 1, bandwidth=400, decode_s=1e-4, step_s=1e-3)
    results = remote_forecast.measure((case,), 1, 0.05)
    for side in ("predicted", "measured"):
        assert results.median(case.key, side) > 0
    assert "| samples of 64 KiB, 1 ms, 400 MB/s, decoding takes 0.1 ms, a step takes 1 ms |" in remote_forecast.table(
        results, (case,)
    )


def test_what_is_off_is_marked() -> None:
    """A prediction within the bound is ok, on either side; another is not."""
    results = Results()
    for case, factor in zip(CASES, (1.0, 1.14, 0.86, 1.16, 0.84), strict=False):
        results.add(case.key, "measured", 1000.0)
        results.add(case.key, "predicted", 1000.0 * factor)
    text = remote_forecast.section(results, ["2026-01-01"], "command")
    assert text.startswith(remote_forecast.TITLE)
    assert (text.count("| ok |"), text.count("| **off** |")) == (3, 2)
