"""Fixtures of the tests that fetch samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncloader.workers.fetch.seeding import global_generators_kept


@pytest.fixture(autouse=True)
def generators_kept() -> Iterator[None]:
    """These tests seed the process's generators: restore them afterwards."""
    with global_generators_kept():
        yield
