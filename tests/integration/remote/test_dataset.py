"""RemoteIterableDataset in both loaders: every sample once, full batches, the same order; lengths, refusals.

Workers are forked where shards are local files, which is fast; three tests have the other start methods.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.errors import NoEffectWarning
from asyncloader.formats import Located, ShardRange
from asyncloader.remote.dataset import RemoteIterableDataset
from tests.helpers.remote_folders import (
    ALL,
    dataset_of,
    epochs_of,
    flat,
    make_shards,
    number_of,
    resumed,
    with_method,
)
from tests.helpers.running import BOTH, run_async
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def whole(batches: list[list[int]], size: int, count: int = len(ALL)) -> None:
    """Check that each sample was delivered once, in full batches except the last."""
    assert sorted(flat(batches)) == list(range(count))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)


# ------------------------------------------------------------------------------------------- samples and batches


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", BOTH)
def test_every_sample_comes_once_in_full_batches(kind: str, workers: int, tars: str) -> None:
    """Also with more workers than shards, which cannot be cut; both loaders, and a second run, agree."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "seed": 1}
    (batches,) = epochs_of(kind, dataset_of(tars), **options)
    whole(batches, 4)
    assert [batches] == epochs_of("sync", dataset_of(tars), **options)
    if workers <= 1:
        assert flat(batches) == ALL
    assert epochs_of(kind, dataset_of(tars), **options) == [batches]


def test_without_batches_and_without_the_last(tars: str) -> None:
    """``batch_size=None`` gives samples; ``drop_last`` leaves out the short batch of the epoch, and no other."""
    (samples,) = epochs_of("sync", dataset_of(tars), batch_size=None, num_workers=2, seed=1)
    assert sorted(flat(samples)) == ALL
    (batches,) = epochs_of("sync", dataset_of(tars), batch_size=4, num_workers=2, seed=1, drop_last=True)
    assert [len(batch) for batch in batches] == [4] * (len(ALL) // 4)
    (batches,) = epochs_of("asyncio", dataset_of(tars), batch_size=4, drop_last=True)
    assert batches == [ALL[at : at + 4] for at in range(0, 20, 4)]


@pytest.mark.parametrize("kind", BOTH)
def test_out_of_order(kind: str, tars: str) -> None:
    """``in_order=False``: every sample once, and at most one short batch."""
    (batches,) = epochs_of(kind, dataset_of(tars), batch_size=4, num_workers=3, in_order=False)
    assert sorted(flat(batches)) == ALL
    assert sorted(map(len, batches))[1:] == [4] * (len(batches) - 1)


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BOTH)
def test_a_loader_that_shuffles(kind: str, workers: int, seed: int | None, tars: str) -> None:
    """`shuffle=True` shuffles, as for map datasets: with a buffer of 1,000 samples, or of the dataset's own size."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "seed": seed}
    for given, meant in ({}, 1000), ({"shuffle_buffer": 6}, 6), ({"shuffle_buffer": 6, "shuffle_shards": False}, 6):
        dataset = dataset_of(tars, **given)
        torch.manual_seed(5)
        expected = epochs_of(kind, dataset_of(tars, shuffle_buffer=meant), epochs=2, **options)
        torch.manual_seed(5)
        assert epochs_of(kind, dataset, epochs=2, shuffle=True, **options) == expected
        assert expected[0] != expected[1]
        assert dataset.shuffle_buffer == given.get("shuffle_buffer", 0)  # the user's dataset does not change


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_shuffled_anew(kind: str, workers: int, tars: str) -> None:
    """Persistent workers' epochs differ, and the third is that of a fresh loader after `set_epoch`."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "seed": 5}
    dataset = dataset_of(tars, shuffle_buffer=6)
    epochs = epochs_of(kind, dataset, 3, **options, persistent_workers=bool(workers))
    assert len({str(batches) for batches in epochs}) == 3
    for batches in epochs:
        whole(batches, 4)
    with Stepwise(kind, dataset, **with_method(options)) as run:
        run.loader.set_epoch(2)
        assert [batch.tolist() for batch in run.epoch()] == epochs[2]


def test_workers_are_not_forked_by_themselves(tars: str) -> None:
    """Where the user chooses none, the start method is not fork: a store's client would not survive a fork."""
    with DataLoader[Any](dataset_of(tars), num_workers=1, batch_size=4, decode=number_of) as loader:
        batches: Any = iter(loader)
        next(batches)
        assert batches._workers[0]._popen.method == "forkserver"


def test_alone(tars: str) -> None:
    """``async for`` over the dataset itself gives raw samples in order; a plain ``for`` names ``async for``."""

    async def run() -> list[int]:
        async with dataset_of(tars) as dataset:
            return [number_of(sample) async for sample in dataset]

    assert run_async(run()) == ALL
    with pytest.raises(TypeError, match="async for"):
        iter(dataset_of(tars))


def test_two_loaders_of_one_dataset(tars: str) -> None:
    """The loaders read at the same time, and each gets every sample."""
    dataset = dataset_of(tars, shuffle_buffer=6)
    options = with_method({"batch_size": 4, "num_workers": 2, "seed": 1, "decode": number_of})
    with DataLoader[Any](dataset, **options) as one, DataLoader[Any](dataset, **options) as other:
        pairs = list(zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    whole([batch.tolist() for batch, _ in pairs], 4)


class Tens:
    """A user's own reader, with the interface of `asyncloader.formats.base`: every ten bytes are a sample."""

    pending = False
    done = False

    def __init__(self, url: str, part: ShardRange) -> None:
        self.feed_from = self._at = part.start
        self._held = b""

    def feed(self, chunk: bytes) -> list[Any]:
        self._held += chunk
        found: list[Any] = []
        while len(self._held) >= 10:
            self._at += 10
            found.append(Located({"n": self._held[:10]}, self._at))
            self._held = self._held[10:]
        return found

    def end(self) -> list[Any]:
        return []


def test_a_reader_of_the_user_s_own(tmp_path: Path) -> None:
    """``format=`` may be a function that makes a reader, which resumes in the middle of a shard like the others."""
    (tmp_path / "a.tens").write_bytes(b"".join(b"%010d" % n for n in range(20)))
    (tmp_path / "b.tens").write_bytes(b"".join(b"%010d" % n for n in range(20, 33)))
    dataset = dataset_of([tmp_path / "a.tens", tmp_path / "b.tens"], format=Tens)
    for workers in (0, 2):
        options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "seed": 1}
        (batches,) = epochs_of("sync", dataset, **options)
        whole(batches, 4, 33)
        assert resumed("sync", dataset, 2, **options) == batches


# ------------------------------------------------------------------------------------------- lengths


def test_lengths(tmp_path: Path) -> None:
    """`len` works where indexes have the length; elsewhere it raises TypeError."""
    for ending in ("mds", "parquet"):
        folder = tmp_path / ending
        folder.mkdir()
        dataset = dataset_of(make_shards(folder, (30, 41), ending=ending))
        assert len(dataset) == 71
        assert len(DataLoader[Any](dataset, batch_size=10)) == 8
    (tmp_path / "tar").mkdir()
    dataset = dataset_of(make_shards(tmp_path / "tar", (30, 41)))
    with pytest.raises(TypeError, match="only MDS and Parquet say"):
        len(dataset)
    assert "2 shards" in repr(dataset)


# ------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("shards", [1, 15, 40])
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "mds"])
def test_a_plan_depends_on_nothing_that_was_done_before(
    ending: str, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has read a sample, or asked for a length, has the other ranks' plan; for many shards and few."""
    monkeypatch.setattr("asyncloader.remote.dataset.MAX_SIZE_REQUESTS", 20)
    url = make_shards(tmp_path, (600 // shards,) * shards, ending=ending)

    async def look(dataset: Any) -> None:
        async with aclosing(aiter(dataset)) as samples:
            await anext(samples)

    def plan(*before: Any) -> Any:
        dataset = dataset_of(url)
        for each in before:
            each(dataset)
        return asyncio.run(dataset.plan(3, 0, 1, 5)), asyncio.run(dataset.fingerprint(3, 1))

    def plan_more(dataset: Any) -> None:
        asyncio.run(dataset.plan(30, 0, 2, 5))

    def ask(dataset: Any) -> None:
        with suppress(TypeError):
            len(dataset)

    fresh = plan()
    for before in ((lambda dataset: asyncio.run(look(dataset)),), (ask,), (plan_more,), (ask, plan_more, ask)):
        assert plan(*before) == fresh


# ------------------------------------------------------------------------------------------- leaving early


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_early(kind: str, workers: int, tars: str) -> None:
    """An iterator is dropped, or a loader closed in the middle: nothing is left, and the next epoch is complete."""
    options = with_method({"batch_size": 2, "num_workers": workers, "seed": 5})
    with Stepwise(kind, dataset_of(tars), **options, persistent_workers=bool(workers)) as run:
        run.begin()
        run.take(2)
        run.iterator = None
        whole([batch.tolist() for batch in run.epoch()], 2)
        run.begin()
        run.take(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_cancelled_waits_lose_nothing(workers: int, tars: str) -> None:
    """`__anext__` is cancelled again and again, beginning with the first call: every sample is delivered once."""

    async def run() -> list[list[int]]:
        got: list[list[int]] = []
        async with AsyncDataLoader[Any](
            dataset_of(tars), **with_method({"batch_size": 2, "num_workers": workers, "seed": 5}), decode=number_of
        ) as loader:
            batches = aiter(loader)
            while True:
                waiting = asyncio.ensure_future(_next(batches))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                if not waiting.cancelled():
                    got.append(waiting.result())
                    continue
                try:
                    got.append((await anext(batches)).tolist())
                except StopAsyncIteration:
                    return got

    whole(run_async(run()), 2)


async def _next(batches: Any) -> list[int]:
    found: list[int] = (await anext(batches)).tolist()
    return found


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shuffle_buffer": -1}, "shuffle_buffer should be a number of samples"),
        ({"read_ahead": 0}, "read_ahead should be a number of bytes, at least 1"),
        ({"max_sample_bytes": 0}, "max_sample_bytes should be"),
        ({"cache_bytes": "a lot"}, "cache_bytes should be .* but got cache_bytes='a lot'"),
    ],
)
def test_arguments(arguments: dict[str, Any], words: str) -> None:
    """Values out of range are refused by the constructor."""
    with pytest.raises(ValueError, match=words):
        dataset_of("x.tar", **arguments)


@pytest.mark.parametrize(
    ("urls", "arguments", "words"),
    [
        ("/data/a.tar", {"cache_dir": "c"}, "cache_dir= does nothing for local files, which are not cached"),
        ([Path("a.tar"), "file:///b.tar"], {"cache_dir": "c"}, "cache_dir= does nothing for local files"),
        ("s3://b/a.tar", {"cache_bytes": "1GB"}, "cache_bytes= does nothing without cache_dir="),
        ("s3://b/a.tar", {"cache_revalidate": False}, "cache_revalidate= does nothing without cache_dir="),
        ("s3://b/a.parquet", {"cache_dir": "c", "cache_bytes": 9, "cache_revalidate": False}, None),
        (["a.tar", "https://host/{a,b}.mds"], {"cache_dir": "c"}, None),
    ],
)
def test_arguments_without_effect(urls: Any, arguments: dict[str, Any], words: str | None) -> None:
    """Arguments without effect cause one warning, at the line that makes the dataset."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        RemoteIterableDataset(urls, **arguments)
    found = [(str(each.message)[: len(words or "")], each.filename) for each in caught]
    assert found == [(words, __file__)] * bool(words)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_no_shards(kind: str, workers: int, tmp_path: Path) -> None:
    """A prefix without a shard, or an unknown extension, is an error that names it; no worker is left."""
    for url, words in ((f"{tmp_path}/", str(tmp_path)), (f"{tmp_path}/a.what", "a.what")):
        with (
            Stepwise(kind, dataset_of(url), **with_method({"num_workers": workers})) as run,
            pytest.raises(ValueError, match=words),
        ):
            run.epoch()


# --------------------------------------------------------------------------------------- the workers' environment


def environment_of(_: Any) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ASYNCLOADER_TEST_")}
