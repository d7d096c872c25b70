"""One rank lists the shards of a store, and the others get its list: real processes, and a store that counts."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from tests.helpers.hub import Hub, serving_hub
from tests.helpers.listing_ranks import COPIES
from tests.helpers.rank_group import RankGroup
from tests.unit.remote.shards import mds, mds_index, tar

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(not COPIES, reason="this torch's stores cannot be copied"),
]

ROOT = "hf://datasets/acme/digits"
SIZES = (6,) * 6  # two pages of a listing


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(2, tmp_path_factory.mktemp("two"), "tcp") as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_left(two: RankGroup) -> Iterator[None]:
    """Check that the ranks keep no thread and no connection."""
    yield
    left = two("left")
    assert left[1] == two.held[1]
    # The store's server is in this rank, and notices the end of a connection when it comes to it.
    assert left[0] | {"sockets": 0} == two.held[0] | {"sockets": 0}


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
@pytest.mark.parametrize("kind", ["stream", "fixed", "elastic", "mixture", "map"])
async def test_one_listing_for_all_ranks(two: RankGroup, hub: Hub, kind: str, folder: str) -> None:
    """Both read the same commit, and together all samples."""
    found = await asyncio.to_thread(two, "listed", kind, f"{ROOT}/{folder}/", storage_options={"endpoint": hub.url})
    assert sorted(found[0] + found[1]) == [*range(36)]
    assert listings(hub) == (3 if folder == "train" else 1, 1)  # the index is looked for first


async def test_a_rank_that_comes_late(two: RankGroup, hub: Hub) -> None:
    """It has the list of the commit that the first has read; a new dataset is listed anew."""
    ask: Any = ("length", f"{ROOT}/train/")
    options = {"endpoint": hub.url}
    for rank in (1, 0):
        found = await asyncio.to_thread(two, "listed", *ask, [rank], storage_options=options)
        assert found[rank] == [36]
        hub.put("train/part-6.tar", tar(range(31)))
    assert listings(hub) == (3, 1)
    found = await asyncio.to_thread(two, "listed", *ask, storage_options=options)
    assert found == [[67], [67]]
    assert listings(hub) == (7, 2)


async def test_a_listing_that_fails(two: RankGroup, hub: Hub) -> None:
    """Each rank has the error, which says what was wrong; the store was asked once."""
    found = await asyncio.to_thread(two, "listed", "map", f"{ROOT}/test/*.tar", storage_options={"endpoint": hub.url})
    own = "ValueError: no object matches"
    assert all(own in text for text in found)
    assert sum(text.startswith("RanksDisagree: rank ") for text in found) == 1
    assert len(hub.paths("revision")) == 1


def test_a_result_of_many_pieces(two: RankGroup) -> None:
    """It comes whole, and one rank has made it."""
    found = two("once", "large", {0: "large", 1: "large"})
    assert [each[0] for each in found] == [sha256(Random(7).randbytes((3 << 20) + 5)).hexdigest()] * 2
    assert sorted(each[1] for each in found) == [0, 1]


def test_errors_are_those_of_all_and_the_next_attempt_is_new(two: RankGroup) -> None:
    """Both ranks ask twice: the first error is that of one of them, the second of one of them again."""
    found = two("once", "wrong", {0: "error", 1: "error"}, 2)
    for texts in zip(found[0][:2], found[1][:2], strict=True):
        assert all("ValueError: the store is empty" in text for text in texts)
        assert sum(text.startswith("RanksDisagree: rank ") for text in texts) == 1
    assert found[0][2] + found[1][2] == 2
    found = two("once", "broken", {0: "broken", 1: "broken"})
    assert sorted(each[0].partition(" of ")[0] for each in found) == ["RanksDisagree: the result", "broken"]


def test_a_rank_that_is_cancelled(two: RankGroup) -> None:
    """The other makes the result, whichever came first."""
    assert two("once", "left", {0: "cancelled"})[0] == ["cancelled", 1]
    first, second = two("once", "gone", {0: "cancelled", 1: "made"})
    assert first in (["cancelled", 1], ["made", 0])
    assert second == ["made", 1]


def test_what_another_rank_says_is_checked(two: RankGroup) -> None:
    """Sizes before anything is allocated, texts before anything is made of them."""
    data = zlib.compress(b"x" * 1000)

    def said(**values: Any) -> bytes:
        return json.dumps({"rank": 0, "bytes": 1000, "packed": len(data)} | values).encode()

    assert two("lie", "true", said(), [data])[1] == str(b"x" * 1000)
    assert two("lie", "too large", said(bytes=None), [])[1] == "b'own'"
    lies: dict[str, tuple[bytes, list[bytes], str]] = {
        "json": (b"{", [], "broken"),
        "nested": (b"[" * 10_000, [], "broken"),
        "list": (b"[]", [], "a header that is none"),
        "long": (b" " * 20_000, [], "a header of 20,000 bytes"),
        "huge": (said(bytes=1 << 40), [data], "a size that is out of range"),
        "negative": (said(packed=-1), [data], "a size that is out of range"),
        "flag": (said(bytes=True), [data], "a size that is out of range"),
        "short": (said(bytes=1001), [data], "it has 1,000 bytes, and says 1,001"),
        "bomb": (said(bytes=10), [data], "more bytes than it says"),
        "piece": (said(packed=len(data) + 1), [data], "a piece of"),
        "cut": (said(packed=len(data) - 3), [data[:-3]], "it has"),
        "pickled": (said(), [b"\x80" * len(data)], "broken"),
    }
    for name, (header, pieces, match) in lies.items():
        answer = two("lie", name, header, pieces)[1]
        assert answer.startswith("RanksDisagree: what another rank has left"), (name, answer)
        assert match in answer, (name, answer)
