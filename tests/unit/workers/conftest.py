"""Fixtures for the watchdog tests: a loop with a clock set by hand, and a list of the reported timeouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.workers.clock import Clock
from tests.unit.workers.watching import Timeouts


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A loop whose clock is set by hand."""
    loop = Clock()
    yield loop
    loop.close()


@pytest.fixture
def on_timeout() -> Timeouts:
    """An empty list of timeouts."""
    return Timeouts()
