"""The comparison of loaders that choose their settings: it runs, for ours. No speed is asserted."""

from __future__ import annotations

import pytest

from . import autotune_peers
from .autotune_peers import LOADERS, ROWS


@pytest.mark.thorough
def test_ours_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has the choice, and the best of the fixed numbers."""
    monkeypatch.setattr(autotune_peers, "LENGTH", 4_000)
    (store,) = (row for row in ROWS if row.awaited is not None)
    found = autotune_peers.line(LOADERS[0]._replace(numbers=(4,)), store, 0.3, 0.2)
    assert found.startswith("| a store that waits | asyncloader | concurrency=")
    assert "| 4: " in found
