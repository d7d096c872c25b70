"""Every format in every way in which shards can be read: the same samples, and the same batches where order is fixed.

A row is a format, a column a way of reading. The samples read are those written; the batches of two workers are equal
however the workers are started, also at a service, and after a resume. A format is parsed in one place, whatever the
way of reading: each test has each format once and each way at least once, and every pair of them with
`--combinations`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.http_store import serving as serving_http
from tests.helpers.rank_group import RankGroup
from tests.helpers.running import run_async
from tests.helpers.shards_of_formats import SIZES
from tests.service import definitions
from tests.service.serving import NodeProcess, serving
from tests.service.test_pools import read

pytestmark = [pytest.mark.independent, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

UNLUCKY = 13
OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 2}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(
        tmp_path_factory.mktemp("node"), ["files", "unlucky_files"], "--open", "files", "--open", "unlucky_files"
    ) as made:
        yield made


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """The batches of two workers."""
    return read("sync", OPTIONS, definitions.files(str(folder)))[0]


def numbers_of(batches: Sequence[Any]) -> list[int]:
    return [int(number) for numbers, _ in batches for number in numbers]


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_without_workers(folder: Path, kind: str, expected: list[Any]) -> None:
    """Each sample is read once, with the fields that workers read."""
    (batches,) = read(kind, OPTIONS | {"num_workers": 0}, definitions.files(str(folder)))
    assert sorted(numbers_of(batches)) == sorted(numbers_of(expected)) == [*range(sum(SIZES))]
    assert sorted(field for _, fields in batches for field in fields) == sorted(
        field for _, fields in expected for field in fields
    )


def at(place: str, node: NodeProcess | None = None) -> dict[str, Any]:
    """The options of a loader whose workers are at a place."""
    workers = node.tcp if node is not None and place == "service" else "threads" if place == "threads" else None
    return OPTIONS | {"num_workers": 0 if place == "no workers" else 2, "workers": workers}


@pytest.mark.parametrize("way", ["fork", "spawn", "asyncio", "threads", "threads, asyncio"])
def test_by_workers(folder: Path, way: str, expected: list[Any]) -> None:
    """However the workers are started, and with either loader, the batches are equal."""
    method = {"asyncio": "forkserver", "threads": None, "threads, asyncio": None}.get(way, way)
    options: dict[str, Any] = OPTIONS | {"multiprocessing_context": method, "workers": None if method else "threads"}
    assert_same(read("asyncio" if "asyncio" in way else "sync", options, definitions.files(str(folder)))[0], expected)


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_at_a_service(folder: Path, kind: str, node: NodeProcess, expected: list[Any]) -> None:
    """A service's node finds the same shards, and gives the same batches."""
    assert_same(read(kind, OPTIONS | {"workers": node.tcp}, definitions.files(str(folder)))[0], expected)


@pytest.mark.parametrize("places", ["local", "to a service", "from a service", "to threads", "from threads"])
def test_resumed(folder: Path, places: str, node: NodeProcess, expected: list[Any]) -> None:
    """Another loader resumes the run, also at another place."""
    direction, _, place = places.partition(" ")
    other = {"a service": node.unix, "threads": "threads"}.get(place)
    here, there = other if direction == "from" else None, other if direction == "to" else None
    served = definitions.files(str(folder))
    with DataLoader[Any](served, **OPTIONS, workers=here) as loader:
        batches = iter(loader)
        head = [next(batches) for _ in range(5)]
        state = loader.state_dict()
    with DataLoader[Any](served, **OPTIONS, workers=there) as loader:
        loader.load_state_dict(state)
        assert_same([*head, *loader], expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_by_two_ranks(folder: Path, workers: int, two: RankGroup) -> None:
    """The ranks end together, with at most one sample's difference, and no sample twice."""
    ranks = two("shards", f"{folder}/", num_workers=workers)
    assert [end for ((_, end),) in ranks] == ["end", "end"]
    first, second = ([int(n) for batch in batches for n in batch] for ((batches, _),) in ranks)
    assert len(first) > 10
    assert abs(len(first) - len(second)) < 2
    assert len({*first, *second}) == len(first) + len(second)
    assert {*first, *second} <= {*range(sum(SIZES))}


@pytest.mark.parametrize("place", ["no workers", "local", "threads"])
def test_from_a_cache(folder: Path, place: str, tmp_path: Path, expected: list[Any]) -> None:
    """The second epoch has the samples of the first, in its own order, and requests no data from the store."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = at(place)

    async def run() -> list[list[Any]]:
        async with serving_http() as store:
            for name, data in files.items():
                store.put(name, data, etag='"v1"')
            urls = [f"{store.url}/{name}" for name in (["index.json"] if "index.json" in files else sorted(files))]
            served = definitions.listed_files(urls, str(tmp_path))
            async with AsyncDataLoader[Any](served, **options) as loader:
                first = [batch async for batch in loader]
                store.asked.clear()
                second = [batch async for batch in loader]
                assert {asked.method for asked in store.asked} == {"HEAD"}
                return [first, second]

    for batches in run_async(run()):
        assert sorted(numbers_of(batches)) == sorted(numbers_of(expected))


@pytest.mark.parametrize("place", ["no workers", "local", "threads", "service"])
def test_a_shard_that_is_cut_off(
    place: str, node: NodeProcess, tmp_path: Path, folder: Path, expected: list[Any]
) -> None:
    """A truncated shard raises; where bad samples are skipped, all other shards are read, and the loss is recorded."""
    for path in folder.iterdir():
        data = path.read_bytes()
        damaged = path.name.startswith(("s1.", "shard.00001"))
        (tmp_path / path.name).write_bytes(data[: len(data) - len(data) // 4] if damaged else data)
    served = definitions.files(str(tmp_path))
    options = at(place, node)
    with DataLoader[Any](served, **options) as loader, pytest.raises(Exception, match=r"s1\.|shard\.00001|index\.json"):
        list(loader)
    with DataLoader[Any](served, **options, on_error="skip") as loader:
        found = numbers_of(list(loader))
        assert loader.skipped_samples
    others = {*range(SIZES[0]), *range(sum(SIZES[:2]), sum(SIZES))}
    assert others <= {*found} < {*range(sum(SIZES))}
    assert len(found) == len({*found})


@pytest.mark.parametrize("place", ["no workers", "local", "threads", "service"])
def test_a_sample_that_raises(folder: Path, place: str, node: NodeProcess, expected: list[Any]) -> None:
    """It is left out, or raised. Key and shard name it, in a record and in the note on the error."""
    served = definitions.unlucky_files(str(folder))
    options = at(place, node)
    with DataLoader[Any](served, **options, on_error="skip") as loader:
        found = list(loader)
        (skipped,) = loader.skipped_samples
    assert sorted(numbers_of(found)) == sorted({*numbers_of(expected)} - {UNLUCKY})
    assert re.fullmatch(rf"'.+' of '{re.escape(str(folder))}/(s1\..+|shard\.00001\.mds.*)'", skipped.index)
    with DataLoader[Any](served, **options) as loader, pytest.raises(ValueError, match="unlucky") as raised:
        list(loader)
    assert any(note.startswith(f"while reading sample {skipped.index}") for note in raised.value.__notes__)
