"""For the comparison with torchdata: its processes and threads may outlive a test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Replace the check around every other test: torchdata does not wait for the processes and threads that it ends."""
