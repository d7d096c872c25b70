from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.helpers.remote_folders import SIZES, make_shards
from tests.helpers.running import PATIENCE_S


@pytest.fixture
def tars(tmp_path: Path) -> str:
    """The URL of a folder of three small tar shards, of `SIZES` samples that count from 0 on."""
    return make_shards(tmp_path, SIZES)


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds no accelerator: tests of the behaviour without an accelerator run the same on every machine."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def constructors() -> Iterator[None]:
    """Check that after a test of `install` the constructors of torch's loader and iterator are torch's own again."""
    kinds: list[Any] = [torch.utils.data.DataLoader, _BaseDataLoaderIter]
    before = [kind.__init__ for kind in kinds]
    yield
    assert [kind.__init__ for kind in kinds] == before


def pytest_itemcollected(item: pytest.Item) -> None:
    """End an async test that hangs from inside: uvloop swallows what pytest-timeout raises in it."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _bounded(item.obj)


def _bounded(test: Any) -> Any:
    @functools.wraps(test)
    async def inner(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test(*args, **kwargs)

    return inner
