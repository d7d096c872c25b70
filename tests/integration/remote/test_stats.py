"""`stats()` counts retries and cache hits of transports, in workers and in the main process."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncloader import AsyncDataLoader, RemoteIterableDataset
from tests.helpers.http_store import serving, status

LINES = b"".join(b'{"n": %d}\n' % n for n in range(40))


@pytest.mark.parametrize("workers", [0, 1])
async def test_retries(workers: int) -> None:
    """A shard that is refused twice is read at the third attempt, and both refusals are counted."""
    async with serving() as store:
        store.put("a.jsonl", LINES)
        dataset = RemoteIterableDataset(f"{store.url}/a.jsonl")
        await dataset.plan(workers or 1, 0, 1, None)  # asks for the size: the request that fails below is the read
        store.faults["a.jsonl"].extend([status(503), status(503)])
        context = "fork" if workers else None
        async with AsyncDataLoader(
            dataset, batch_size=8, num_workers=workers, multiprocessing_context=context, decode=number
        ) as loader:
            assert [n async for batch in loader for n in batch.tolist()] == list(range(40))
            stats = loader.stats()
    assert stats["store/retries"] == 2
    assert stats["store/retry_wait_s"] > 0
    assert stats["store/given_up"] == stats["store/resumed"] == 0


async def test_cache(tmp_path: Path) -> None:
    """The second epoch is read from the cache: hits and bytes are counted, and the first epoch's misses.

    Each shard is read in two ranges, and is one block: the second range finds it.
    """
    async with serving() as store:
        store.put("a.jsonl", LINES, etag='"v1"')
        store.put("b.jsonl", LINES, etag='"v1"')
        dataset = RemoteIterableDataset(f"{store.url}/{{a,b}}.jsonl", cache_dir=tmp_path)
        async with AsyncDataLoader(dataset, batch_size=8, decode=number) as loader:
            for epoch in range(2):
                assert sorted([n async for batch in loader for n in batch.tolist()]) == sorted([*range(40)] * 2)
                stats = loader.stats()
                assert stats["store/cache_misses"] == 2
                assert stats["store/cache_hits"] == 2 + 4 * epoch
                assert 2 * epoch * len(LINES) < stats["store/cache_bytes"] < (2 + 4 * epoch) * len(LINES)


def number(sample: dict[str, int]) -> int:
    """The field of a line."""
    return sample["n"]
