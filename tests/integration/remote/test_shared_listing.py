"""One rank lists the shards of a store, and the others get its list: real processes, and a store that counts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import zlib
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from tests.helpers.hub import Hub, serving_hub
from tests.helpers.listing_ranks import COPIES
from tests.helpers.rank_group import RankGroup
from tests.helpers.running import PATIENCE_S
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
        "missing": (said(), [], "a piece is missing"),
        "endless rank": (said(rank=1 << 70), [data], "a header that is none"),
    }
    answer = two("lie", "escapes", json.dumps({"rank": 0, "error": "\x1b[2J" + "long" * 1000}).encode(), [])[1]
    assert answer.startswith("RanksDisagree: rank 0 could not do what it does for all ranks: ")
    assert answer.isprintable()
    assert len(answer) < 2100
    for name, (header, pieces, match) in lies.items():
        answer = two("lie", name, header, pieces)[1]
        assert answer.startswith("RanksDisagree: what another rank has left"), (name, answer)
        assert match in answer, (name, answer)


async def test_two_loaders_and_two_epochs(two: RankGroup, hub: Hub) -> None:
    """Ranks that need two lists in opposite orders do not wait for one another; a second epoch lists nothing."""
    options = {"endpoint": hub.url}
    urls = [f"{ROOT}/train/", f"{ROOT}/mds/"]
    assert await asyncio.to_thread(two, "orders", urls, storage_options=options) == [[36] * 4] * 2
    assert listings(hub) == (3 + 1, 2)
    found = await asyncio.to_thread(two, "epochs", urls[0], storage_options=options)
    assert [sorted(one + other) for one, other in zip(*found, strict=True)] == [[*range(36)]] * 2
    assert listings(hub) == (3 + 1 + 3, 3)


@pytest.mark.parametrize("kind", ["fixed", "mixture"])
async def test_ranks_with_other_shards(two: RankGroup, hub: Hub, kind: str) -> None:
    """Each has an error, which says which rank has what."""
    urls = [f"{ROOT}/train/", f"{ROOT}/mds/"]
    found = await asyncio.to_thread(two, "listed", kind, urls, storage_options={"endpoint": hub.url})
    for text in found:
        assert re.search(r"rank 1 has urls=\['.*/mds/.* and rank 0 has urls=\['.*/train/", text), text


@pytest.mark.parametrize("other", ["mds", "copied"])
async def test_ranks_that_share_other_shards(two: RankGroup, hub: Hub, other: str) -> None:
    """Each would read its half of another list, or of another store's."""
    for number in range(6):
        hub.put(f"copied/part-{number}.tar", tar(range(6)))
    urls = [f"{ROOT}/train/", f"{ROOT}/{other}/"]
    found = await asyncio.to_thread(two, "listed", "stream", urls, storage_options={"endpoint": hub.url})
    for text in found:
        assert re.search(rf"RanksDisagree: rank 1 reads 6 shards from 'hf://.*/{other}/.* by 1 worker", text), text
        assert re.search(r"but rank 0 reads 6 shards from 'hf://.*/train/part-0.tar' to .*/part-5.tar", text), text


def test_a_list_that_is_too_large_for_the_store(two: RankGroup) -> None:
    """Each rank makes its own."""
    for each in two("once", "limit", {0: "large", 1: "large"}, most=1000):
        assert each == [sha256(Random(7).randbytes((3 << 20) + 5)).hexdigest(), 1]


def test_a_rank_that_falls_silent(tmp_path: Path) -> None:
    """The other ranks wait while it lives, and say for which; the next of them asks where it was killed or stopped. A
    rank that goes on has the result of the others. Where the store has ended, each asks for itself.
    """
    with RankGroup(4, tmp_path, "tcp") as four:
        found = four("lost", "long", 2, "works")
        assert [each[:2] for each in found] == [["of rank 2", rank == 2] for rank in range(4)]
        for rank in (0, 1, 3):
            assert f"rank {rank} waits for rank 2, which asks the store for all ranks" in found[rank][2][0]

        found = four("lost", "foreign", 3, "claim", b"\xff" * 5000)
        assert_one_for_all(found, "another program's claim in torch.distributed's store")

        four.ask("lost", "late", 2, "stopped")
        found = four.answers(0, 1, 3)
        assert_one_for_all(found, "rank 2")
        os.kill(four.processes[2].pid, signal.SIGCONT)
        assert four.answers(2)[0][:2] == [found[0][0], 1]

        four.ask("lost", "gone", 2, "killed")
        found = four.answers(0, 1, 3)
        assert_one_for_all(found, "rank 2")
        four.processes[2].wait(PATIENCE_S)

        four.ask("lost", "store", 0, "killed", gone=(2,))
        for rank, (result, asked, lines) in zip((1, 3), four.answers(1, 3), strict=True):
            assert (result, asked) == (f"of rank {rank}", 1)
            assert f"rank {rank} asks the store for itself" in lines[-1]


def assert_one_for_all(found: list[Any], lost: str) -> None:
    """One rank was asked, and all have its result; one says at least that it has given the first up."""
    assert len({each[0] for each in found}) == 1
    assert sum(each[1] for each in found) == 1
    assert any(f"gives {lost} up, which was to ask the store" in line for each in found for line in each[2])


def test_torch_distributed_initialized_again_on_one_store(tmp_path: Path) -> None:
    """A rank gets no result of before, whichever comes first, and whichever had a part in it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with RankGroup(2, tmp_path) as group:
        found = group("initialized_again", port, [[0, 1], [1, 0], [0], [0, 1], [1], [1, 0]])
    assert found == [["0", "1", "2", "3", "5"], ["0", "1", "3", "4", "5"]]
