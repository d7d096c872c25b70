"""Samples that raise StopAsyncIteration, which means the end of the iteration to an ``async for``."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.helpers.running import BOTH, outcomes

pytestmark = pytest.mark.loops

ENDED = "code raised StopAsyncIteration"


class Ending(Dataset[Any]):
    """Sample 1 raises the exception with which an asynchronous iterator inside it would end."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise StopAsyncIteration
        return index


class AsyncEnding(Ending):
    """The samples of `Ending`, awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


def shown(found: list[Any]) -> list[Any]:
    """Batches as numbers, errors unchanged."""
    return [each if isinstance(each, tuple) else int(each) for each in found]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "concurrency": 2}], ids=str)
def test_stop_async_iteration_of_a_map_dataset(options: dict[str, Any]) -> None:
    """The exception fails its batch; ``async for`` would otherwise take it for the end of the epoch."""
    first, (error, text), last = shown(outcomes("asyncio", Ending(), **options))
    assert (first, last) == (0, 2)
    assert error is RuntimeError
    assert ENDED in text


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_stop_async_iteration_of_an_async_map_dataset(kind: str, workers: int) -> None:
    """Awaited samples fail their batch, too, for both loaders; the note names the sample."""
    first, (error, text), last = shown(outcomes(kind, AsyncEnding(), num_workers=workers))
    assert (first, last) == (0, 2)
    assert error is RuntimeError
    assert ENDED in text
    assert "while fetching sample index 1 (item 0 of the batch)" in text
