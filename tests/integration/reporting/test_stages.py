"""`stats()` and `metrics()`: where a batch's time is spent, with workers and without, and while no batch arrives."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader, DataLoader, RemoteIterableDataset
from tests.helpers.datasets import AsyncNumbers, DiesOnce, Numbers
from tests.helpers.http_store import serving, status
from tests.helpers.running import KINDS, run_async

PER_SAMPLE_S = 0.002
STEADY = {"sampler", "fetch", "collate", "wait", "consumer"}
WITH_WORKERS = {"queue", "write", "transfer", "order", "start_process", "start_import", "start_dataset", "first_read"}


class Slow(Dataset[Any]):
    """Each sample takes at least `PER_SAMPLE_S`."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        time.sleep(PER_SAMPLE_S)
        return torch.full((8,), index)


class SlowStream(IterableDataset[Any]):
    """The samples of `Slow` as a stream."""

    def __iter__(self) -> Any:
        for index in range(24):
            time.sleep(PER_SAMPLE_S)
            yield torch.full((8,), index)


def decode_slowly(sample: Any) -> Any:
    """Takes twice as long as a sample."""
    time.sleep(2 * PER_SAMPLE_S)
    return sample


def collate_slowly(samples: list[Any]) -> Any:
    """Takes three times as long as a sample."""
    time.sleep(3 * PER_SAMPLE_S)
    return torch.stack(samples)


def stages(stats: dict[str, float]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for key, value in stats.items():
        if key.startswith("stage/"):
            _, stage, figure = key.split("/")
            found.setdefault(stage, {})[figure] = value
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Slow, SlowStream, AsyncNumbers])
def test_each_batch_is_in_each_stage(kind: str, workers: int, dataset: Any) -> None:
    """Each batch is counted in each stage that it passes, and slow code shows in its own stage."""
    data = dataset(24) if dataset is AsyncNumbers else dataset()
    batches = 24 // 4 * (workers if dataset is SlowStream and workers else 1)
    options: dict[str, Any] = {"decode": decode_slowly, "collate_fn": collate_slowly}
    loader = (DataLoader if kind == "sync" else AsyncDataLoader)(data, batch_size=4, num_workers=workers, **options)
    collect_from(kind, loader)
    found = stages(loader.stats())
    timed = set(found)
    assert timed - {"sampler"} == (STEADY | {"decode"} | (WITH_WORKERS if workers else set())) - {"sampler"}
    assert ("sampler" in timed) == (dataset is not SlowStream)
    first = found["first_read"]["count"] if workers else 0
    assert 0 <= first <= workers
    for stage in timed - {"queue", "fetch"} - {each for each in timed if each.startswith(("start_", "first_"))}:
        assert found[stage]["count"] == batches, stage
    assert found["fetch"]["count"] + first == batches
    assert found["collate"]["p50_s"] >= 0.9 * 3 * PER_SAMPLE_S
    assert found["decode"]["sum_s"] >= 24 * 2 * PER_SAMPLE_S
    if dataset is not AsyncNumbers:
        assert found["fetch"]["p50_s"] >= 0.9 * 4 * PER_SAMPLE_S
        assert found["fetch"]["p50_s"] <= found["fetch"]["p95_s"] <= found["fetch"]["p99_s"]


def collect_from(kind: str, loader: Any) -> list[Any]:
    if kind == "sync":
        return list(loader)

    async def all_of_it() -> list[Any]:
        async with loader:
            return [batch async for batch in loader]

    return run_async(all_of_it(), kind)


def test_an_interval_counts_what_is_new() -> None:
    """Each call with `interval=True` begins the next interval, for sums, rates and quantiles; other calls do not."""
    loader = DataLoader(Numbers(12), batch_size=4)
    list(loader)
    assert loader.stats(interval=True)["data/batches"] == 3
    assert loader.stats(interval=True)["data/batches"] == 0
    list(loader)
    list(loader)
    assert loader.stats()["data/batches"] == 9
    newest = loader.stats("train/", interval=True)
    assert newest["train/data/batches"] == newest["train/stage/fetch/count"] == 6
    assert all(key.startswith("train/") for key in newest)
    assert not stages(loader.stats(interval=True))


def test_what_a_dead_worker_counted_is_kept(tmp_path: Path) -> None:
    """Its replacement, and the workers of the next epoch, add to its counts."""
    loader = DataLoader[Any](DiesOnce(24, tmp_path / "died"), batch_size=4, num_workers=1, seed=1)
    for epoch in (1, 2):
        list(loader)
        found = stages(loader.stats())
        assert found["fetch"]["count"] + found["first_read"]["count"] == 6 * epoch
        assert found["start_process"]["count"] == 1 + epoch
    assert loader.stats()["data/worker_restarts"] == 1


@pytest.mark.parametrize("workers", [0, 1])
async def test_counts_move_while_nothing_comes(workers: int) -> None:
    """Requests and retries of a failing store show while the consumer waits for its first batch; the waiting, too."""
    async with serving() as store:
        store.put("a.jsonl", b'{"n": 1}\n' * 8)
        dataset = RemoteIterableDataset(f"{store.url}/a.jsonl")
        await dataset.plan(workers or 1, 0, 1, None)  # asks for the size: the request that fails below is the read
        asked = len(store.asked)
        store.faults["a.jsonl"].extend([status(503)] * 3)
        context = "fork" if workers else None
        async with AsyncDataLoader(
            dataset, batch_size=8, num_workers=workers, multiprocessing_context=context
        ) as loader:
            other = AsyncDataLoader(Numbers(8), batch_size=8)
            waiting = asyncio.ensure_future(anext(aiter(loader)))
            while not waiting.done() and not loader.stats()["store/retries"]:  # noqa: ASYNC110 - counters have no event
                await asyncio.sleep(0)
            early = loader.stats()
            assert not waiting.done()
            assert early["data/batches"] == 0
            assert early["data/wait_s"] > 0
            assert len((await waiting)["n"]) == 8
            assert [len(batch) async for batch in other] == [8]
            stats = loader.stats()
    assert stats["store/retries"] == 3
    assert stats["store/requests"] == len(store.asked) - asked
    assert stats["store/bytes"] >= 8 * 9
    assert other.stats()["store/requests"] == 0


@pytest.mark.parametrize("workers", [0, 1])
async def test_every_request_is_counted(workers: int) -> None:
    """Requests for shards' sizes, by the main process, count, and those of reads; in a `for` loop, too."""
    async with serving() as store:
        for name in "abc":
            store.put(f"{name}.jsonl", b'{"n": 1}\n' * 8)
        dataset = RemoteIterableDataset(f"{store.url}/{{a,b,c}}.jsonl")
        context = "fork" if workers else None
        loader = DataLoader[Any](dataset, batch_size=8, num_workers=workers, multiprocessing_context=context)
        assert len(await asyncio.to_thread(list, loader)) == 3
        assert loader.stats()["store/requests"] == len(store.asked) >= 6


def test_stats_may_be_asked_for_in_any_thread() -> None:
    """Another thread may wait at that time for a batch that does not arrive."""
    gate = threading.Event()

    def held(samples: list[int]) -> list[int]:
        gate.wait(60)
        return samples

    loader = DataLoader(Numbers(4), batch_size=4, collate_fn=held)
    thread = threading.Thread(target=list, args=(loader,))
    thread.start()
    while not loader.stats()["data/wait_s"]:
        pass
    gate.set()
    thread.join()
    assert loader.stats()["data/batches"] == 1


def test_the_start_of_workers_counts_once_an_epoch_that_starts_them() -> None:
    """With persistent workers only the first epoch starts them."""
    for persistent, starts in ((False, 3), (True, 1)):
        loader = DataLoader(Numbers(8), batch_size=4, num_workers=1, persistent_workers=persistent)
        for _ in range(3):
            list(loader)
        stats = loader.stats()
        assert stats["stage/start_process/count"] == stats["stage/first_read/count"] == starts
        assert stats["data/startup_s"] > 0
        loader.close()
