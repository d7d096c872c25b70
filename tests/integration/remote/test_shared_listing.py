"""Rank 0 lists the shards of a store, and the others get its list: real processes, and a store that counts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.helpers.hub import Hub, serving_hub
from tests.helpers.rank_group import RankGroup
from tests.unit.remote.shards import mds, mds_index, tar

pytestmark = pytest.mark.network

ROOT = "hf://datasets/acme/digits"
SIZES = (6,) * 6  # two pages of a listing


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(two: RankGroup) -> Iterator[None]:
    """Check that the ranks keep no thread and no connection."""
    yield
    assert two("left") == two.held


@pytest_asyncio.fixture
async def hub() -> AsyncIterator[Hub]:
    async with serving_hub() as served:
        for number in range(6):
            served.put(f"train/part-{number}.tar", tar(range(6 * number, 6 * number + 6)))
        parts = [mds(range(6 * number, 6 * number + 6)) for number in range(6)]
        for number, data in enumerate(parts):
            served.put(f"mds/shard.{number:05d}.mds", data)
        served.put("mds/index.json", mds_index(*parts, counts=SIZES))
        yield served


def listings(hub: Hub) -> tuple[int, int]:
    """The requests for a listing, or an index, and those for the commit of a branch."""
    indexes = [path for path in hub.paths("resolve") if path.endswith("index.json")]
    return len(hub.paths("tree")) + len(indexes), len(hub.paths("revision"))


@pytest.mark.parametrize("folder", ["train", "mds"])
@pytest.mark.parametrize("kind", ["stream", "fixed", "mixture"])
async def test_one_listing_for_all_ranks(two: RankGroup, hub: Hub, kind: str, folder: str) -> None:
    """Both read the same commit, and together all samples; the second epoch lists nothing."""
    options = {"endpoint": hub.url}
    found = await asyncio.to_thread(two, "listed", kind, f"{ROOT}/{folder}/", 2, storage_options=options)
    for first, second in zip(*found, strict=True):
        assert sorted(first + second) == [*range(36)]
    assert listings(hub) == (3 if folder == "train" else 1, 1)  # the index is looked for first


async def test_a_listing_that_fails(two: RankGroup, hub: Hub) -> None:
    """Each rank has the error, which says what was wrong; the next epoch lists anew, on rank 0 alone."""
    options = {"endpoint": hub.url}
    first, second = await asyncio.to_thread(two, "listed", "stream", f"{ROOT}/test/*.tar", 2, storage_options=options)
    for epoch in range(2):
        assert first[epoch].startswith("ValueError: no object matches")
        assert second[epoch].startswith(
            "RanksDisagree: rank 0 could not list the shards for all ranks: ValueError: no object matches"
        )
    assert len(hub.paths("revision")) == 2


async def test_a_list_that_is_none(two: RankGroup, hub: Hub) -> None:
    """What rank 0 sends is checked before anything is made of it, and rank 0 does not wait for the other."""
    found = await asyncio.to_thread(two, "listed", "broken", f"{ROOT}/train/", storage_options={"endpoint": hub.url})
    assert found[1][0].startswith("RanksDisagree: the list of shards that rank 0 has sent is broken")
    assert found[0][0].startswith("RanksDisagree: another rank's loader failed")


async def test_a_rank_that_has_listed_before(two: RankGroup, hub: Hub) -> None:
    """Rank 0 gives the list that it has; another rank keeps its own, and takes part nevertheless."""
    for known in ((0,), (1,)):
        found = await asyncio.to_thread(
            two, "listed", "stream", f"{ROOT}/train/", 1, known, storage_options={"endpoint": hub.url}
        )
        assert sorted(found[0][0] + found[1][0]) == [*range(36)]
    assert listings(hub) == (3 + 3 + 3, 3)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_is_cancelled(two: RankGroup, hub: Hub, victim: int) -> None:
    """The other rank does not wait for it; the next epoch is read by both."""
    found = await asyncio.to_thread(
        two, "listing_ends", f"{ROOT}/train/", victim, "cancelled", storage_options={"endpoint": hub.url}
    )
    assert found[victim][0] == "cancelled"
    why = "rank 0 could not list the shards for all ranks: it failed, or was" if victim == 0 else "another rank"
    assert found[1 - victim][0].startswith(f"RanksDisagree: {why}"), found
    assert sorted(found[0][1] + found[1][1]) == [*range(36)]


async def test_a_rank_that_is_killed(hub: Hub, tmp_path: Path) -> None:
    """The others have an error at once."""
    with RankGroup(2, tmp_path) as group:
        group.ask("listing_ends", f"{ROOT}/train/", 0, "killed", storage_options={"endpoint": hub.url})
        (found,) = await asyncio.to_thread(group.answers, 1)
        assert found[0].startswith("RanksDisagree: the ranks could not agree on step 0: another rank has ended")
        group.kill()


@pytest.mark.parametrize("kind", ["fixed", "mixture"])
async def test_ranks_with_other_shards(two: RankGroup, hub: Hub, kind: str) -> None:
    """Each has an error, which says which rank has what."""
    urls = [f"{ROOT}/train/", f"{ROOT}/mds/"]
    found = await asyncio.to_thread(two, "listed", kind, urls, storage_options={"endpoint": hub.url})
    for (text,) in found:
        assert re.search(r"rank 1 has urls=\['.*/mds/.* and rank 0 has urls=\['.*/train/", text), text


@pytest.mark.parametrize("other", ["mds", "copied"])
async def test_ranks_that_share_other_shards(two: RankGroup, hub: Hub, other: str) -> None:
    """Each would read its half of another list, or of another store's."""
    for number in range(6):
        hub.put(f"copied/part-{number}.tar", tar(range(6)))
    urls = [f"{ROOT}/train/", f"{ROOT}/{other}/"]
    found = await asyncio.to_thread(two, "listed", "stream", urls, storage_options={"endpoint": hub.url})
    for (text,) in found:
        assert re.search(rf"RanksDisagree: rank 1 reads 6 shards from 'hf://.*/{other}/.* by 1 worker", text), text
        assert re.search(r"but rank 0 reads 6 shards from 'hf://.*/train/part-0.tar' to .*/part-5.tar", text), text
