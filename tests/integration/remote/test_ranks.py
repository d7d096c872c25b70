"""Shards that ranks share: disjoint parts, equal numbers of batches, in seeded mode and in torch mode."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest

from asyncloader import ShardError
from asyncloader.remote.assignment import AssignmentLog, ShardAssigner, StreamStart
from asyncloader.remote.dataset import RemoteIterableDataset
from asyncloader.remote.shard_splitting import EpochPlan
from asyncloader.remote.worker_stream import LocalAssignments
from tests.helpers.rank_group import RankGroup
from tests.helpers.remote_folders import dataset_of, make_shards, number_of
from tests.helpers.running import BOTH
from tests.unit.formats.mds_writer import shard_entry, write_index
from tests.unit.remote.shards import COLUMNS, mds, zstd_compress

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZES = (9, 12, 4, 8, 15)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(two: RankGroup) -> Iterator[None]:
    """Check that the ranks keep no thread, no worker and no connection of a loader."""
    yield
    if two.alive:
        assert two("left") == two.held


def check(ranks: list[list[Any]], count: int, least: int) -> None:
    """Check each epoch: `least` or more batches, equally many on each rank; no sample twice, none beyond `count`."""
    for epoch in zip(*ranks, strict=True):
        assert [end for _, end in epoch] == ["end"] * len(ranks)
        assert len({len(batches) for batches, _ in epoch}) == 1
        samples = [int(n) for batches, _ in epoch for batch in batches for n in batch]
        assert len(samples) == len(set(samples))
        assert set(samples) <= set(range(count))
        assert len(epoch[0][0]) >= least


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BOTH)
def test_ranks_share_shards(two: RankGroup, kind: str, workers: int, seed: int | None, tmp_path: Path) -> None:
    """Uneven shards: the ranks end together in each of two epochs, and the epochs differ."""
    url = make_shards(tmp_path, SIZES)
    options: dict[str, Any] = {"kind": kind, "num_workers": workers, "seed": seed, "buffer": 4}
    ranks = two("shards", url, epochs=2, **options, persistent_workers=bool(workers))
    check(ranks, sum(SIZES), 6)  # a rank may have only the two smallest shards, 12 samples, all of which it reads
    for epochs in ranks:
        assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("ending", "seed"), [("tar", 3), ("jsonl", None)])
def test_ranks_with_other_numbers_of_workers(two: RankGroup, ending: str, seed: int | None, tmp_path: Path) -> None:
    """They would cut the shards in another way, or give samples of two ranks the same random numbers."""
    url = make_shards(tmp_path, (6,) * 4, ending=ending)
    for [(batches, end)] in two("shards", url, workers=[1, 2], seed=seed):
        assert not batches
        assert re.search(
            "RanksDisagree: rank 1 reads 4 shards from .* by 2 workers, but rank 0 .* by 1 worker: ", end
        ), end


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_resume(two: RankGroup, workers: int, seed: int | None, tmp_path: Path) -> None:
    """Each rank resumes from its own state, and the epoch equals an uninterrupted one."""
    url = make_shards(tmp_path, SIZES)
    options: dict[str, Any] = {"num_workers": workers, "seed": seed, "buffer": 4}
    assert two("shards", url, steps=3, **options) == two("shards", url, **options)


@pytest.mark.parametrize("seed", [3, None])
def test_uneven_shards_are_an_error_on_request(two: RankGroup, seed: int | None, tmp_path: Path) -> None:
    """``on_uneven="error"`` raises on both ranks, at the same step."""
    url = make_shards(tmp_path, (3, 30))
    ranks = two("shards", url, seed=seed, on_uneven="error")
    assert [end.partition(":")[0] for ((_, end),) in ranks] == ["RanksDisagree"] * 2
    assert len({len(batches) for ((batches, _),) in ranks}) == 1


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_out_differs_from_epoch_to_epoch(
    two: RankGroup, workers: int, seed: int | None, tmp_path: Path
) -> None:
    """Five tar shards, without shuffling: a fifth is left out of each epoch, and each sample is read in some epoch."""
    url = make_shards(tmp_path, (10,) * 5)
    ranks = two("shards", url, epochs=12, num_workers=workers, seed=seed, persistent_workers=bool(workers))
    check(ranks, 50, 10)
    every = [{int(n) for rank in ranks for batch in rank[epoch][0] for n in batch} for epoch in range(12)]
    assert {len(epoch) for epoch in every} == {40}
    assert set().union(*every) == {*range(50)}


@pytest.mark.parametrize(("ending", "dropped"), [("tar", 10), ("parquet", 1), ("mds", 1)])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_out_is_counted(two: RankGroup, workers: int, ending: str, dropped: int, tmp_path: Path) -> None:
    """Less than one sample per rank where an index or a footer counts them; one of five tar shards otherwise."""
    url = make_shards(tmp_path, (10,) * 5 if ending == "tar" else (7, 21, 3, 0, 20), ending=ending)
    for seed, buffer in ((3, 0), (3, 4), (None, 4)):
        options: dict[str, Any] = {"num_workers": workers, "seed": seed, "buffer": buffer, "batch_size": 5}
        for epochs, counted in two("shards_and_dropped", url, epochs=2, **options):
            assert [sum(map(len, batches)) for batches, _ in epochs] == [20 if ending == "tar" else 25] * 2
            assert counted == 2 * dropped


def compressed_mds(folder: Path, sizes: Sequence[int]) -> str:
    """Like `make_shards`, with compressed MDS shards."""
    entries: list[dict[str, Any]] = []
    for number, size in enumerate(sizes):
        data = mds(range(sum(sizes[:number]), sum(sizes[: number + 1])))
        entry = shard_entry(COLUMNS, size, len(data), f"shard.{number:05d}.mds", "zstd")
        packed = zstd_compress(data)
        entry["zip_data"]["bytes"] = len(packed)
        (folder / entry["zip_data"]["basename"]).write_bytes(packed)
        entries.append(entry)
    (folder / "index.json").write_bytes(write_index(*entries))
    return f"{folder}/"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sizes", [(7, 21, 3, 0, 20), (100,), (1,) * 30, (2,), (0, 0)])
@pytest.mark.parametrize("ending", ["parquet", "mds", "mds.zstd"])
async def test_counted_samples_are_shared_evenly(
    ending: str, sizes: tuple[int, ...], shuffle: bool, tmp_path: Path
) -> None:
    """Whatever the shards: each sample is read by one rank, and the ranks' numbers of samples differ by at most one."""
    url = compressed_mds(tmp_path, sizes) if ending == "mds.zstd" else make_shards(tmp_path, sizes, ending=ending)
    for ranks, workers, common in itertools.product((2, 3), (1, 3), (True, False)):
        for key in (4, 5):
            read: list[list[int]] = []
            for rank in range(ranks):
                dataset = dataset_of(url, shuffle_shards=shuffle)
                own = key if common else key + 100 * rank
                plan = await dataset.plan(workers, rank, ranks, own, common=common)
                assert plan.shares == (ranks, sum(sizes), 0.0)
                read.append(await everything(dataset, plan))
            assert sorted(itertools.chain.from_iterable(read)) == [*range(sum(sizes))]
            assert max(map(len, read)) - min(map(len, read)) <= 1


@pytest.mark.parametrize(
    "data", [b"\x28\xb5\x2f\xfd" + bytes(40), b"no zstd at all", b""], ids=["damaged", "other", "empty"]
)
async def test_a_damaged_shard_at_the_border_fails_no_plan(data: bytes, tmp_path: Path) -> None:
    """The shard's table cannot be read: both ranks plan the whole shard, and find the error when they read it."""
    url = compressed_mds(tmp_path, (7, 21, 6))
    (tmp_path / "shard.00001.mds.zstd").write_bytes(data)
    for rank in range(2):
        dataset = dataset_of(url)
        plan = await dataset.plan(1, rank, 2, None)
        assert [each.shard for assignment in plan.assignments for each in assignment] == [[0, 1], [1, 2]][rank]
        with pytest.raises(ShardError, match=r"shard\.00001"):
            await everything(dataset, plan)


async def everything(dataset: RemoteIterableDataset, plan: EpochPlan) -> list[int]:
    """The numbers of all samples of a rank."""
    assigner = ShardAssigner(AssignmentLog(plan.assignments), [StreamStart()])
    worker = dataset.open_worker_stream(LocalAssignments(assigner, 0))
    found: list[int] = []
    async with dataset, aclosing(worker):
        with suppress(StopAsyncIteration):
            while True:
                worker.next_batch()
                found += map(number_of, await worker.take(7))
    return found


async def test_an_uneven_share_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first rank logs it once, with the part that is left out."""
    url = make_shards(tmp_path, (10,) * 5)
    for rank in range(2):
        dataset = dataset_of(url)
        for key in (5, 6):
            await dataset.plan(1, rank, 2, key)
    even = tmp_path / "even"
    even.mkdir()
    await dataset_of(make_shards(even, (10,) * 6)).plan(1, 0, 2, 5)
    (record,) = caplog.records
    assert record.message.startswith("2 ranks share 5 shards unevenly: ")
    assert "about 20% of the samples" in record.message
