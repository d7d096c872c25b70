"""Shards of every format, and a Hugging Face Hub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.helpers.hub import TOKEN, Hub, serving_hub
from tests.helpers.shards_of_formats import FORMATS, write


@pytest.fixture(scope="module", params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of a format."""
    made = tmp_path_factory.mktemp("shards")
    write(made, request.param)
    return made


@pytest_asyncio.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    """A Hub that hf:// addresses, and the token for it."""
    async with serving_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served
