"""What the tests of deadlines need: a clock, and a list of who was late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.workers.clock import Clock
from tests.unit.workers.watching import Late


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A loop whose clock is set by hand."""
    loop = Clock()
    yield loop
    loop.close()


@pytest.fixture
def late() -> Late:
    """Nobody so far."""
    return Late()
