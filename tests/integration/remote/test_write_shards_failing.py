"""`write_shards` whose samples fail: the shards that were made before are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
from typing_extensions import Buffer

from asyncloader import write_shards
from asyncloader.transports import MemoryTransport, ObjectInfo
from tests.integration.remote.test_write_shards import NUMBER, Numbered, sample_of


class Failing(Numbered):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == FAILS_AT:
            raise KeyError("mine")
        return super().__getitem__(index)


class FailingLater(Failing):
    async def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return super().__getitem__(index)


class Counting(MemoryTransport):
    """Says when it has a number of shards."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.complete = asyncio.Event()

    async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:
        info = await super().write(path, pieces)
        if len(self.shards) >= self.number:
            self.complete.set()
        return info

    @property
    def shards(self) -> list[str]:
        return [path for path in self._objects if path.startswith("train")]


FAILS_AT = 27


@pytest.mark.parametrize("limit", [{"max_samples": 5}, {"max_bytes": 15_000}])
@pytest.mark.parametrize("kind", ["generator", "asynchronous", "map", "asynchronous map", "worker"])
async def test_shards_before_an_error_of_the_samples_are_written(kind: str, limit: dict[str, Any]) -> None:
    """The error is raised as it is; the shards whose samples were made are in the store, those of an iterable even
    before it goes on: making a sample may take minutes.
    """
    whole = await write_shards(Numbered("tar"), "train-{shard}.tar", transport=MemoryTransport(), **limit)
    expected = sum(end < FAILS_AT for end in np.cumsum([shard.samples for shard in whole]))
    assert expected > 1
    store = Counting(expected)

    async def slow() -> AsyncGenerator[dict[str, Any], None]:
        for number in range(FAILS_AT):
            yield sample_of("tar", number)
        async with asyncio.timeout(20):
            await store.complete.wait()
        raise KeyError("mine")

    samples: dict[str, Any] = {
        "generator": map(Failing("tar").__getitem__, range(NUMBER)),
        "asynchronous": slow(),
        "asynchronous map": FailingLater("tar"),
    }
    with pytest.raises(KeyError, match="mine"):
        await write_shards(
            samples.get(kind, Failing("tar")),
            "train-{shard}.tar",
            transport=store,
            workers=int(kind == "worker"),
            **limit,
        )
    assert len(store.shards) == expected
