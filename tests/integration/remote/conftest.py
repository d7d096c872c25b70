"""Shards of every format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.shards_of_formats import FORMATS, write


@pytest.fixture(scope="module", params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of a format."""
    made = tmp_path_factory.mktemp("shards")
    write(made, request.param)
    return made
