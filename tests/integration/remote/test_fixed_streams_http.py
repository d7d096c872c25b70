"""Fixed streams over HTTP: each asks for its own bytes once, and goes on whatever a server does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from aiohttp import web

from asyncloader import AsyncDataLoader, RemoteIterableDataset, write_shards_sync
from asyncloader.remote.reading import AT_ONCE
from asyncloader.transports import ReadFailed, RetryPolicy
from tests.helpers.http_store import HttpStore, broken, change, serving, status
from tests.helpers.running import run_async

pytestmark = [pytest.mark.independent, pytest.mark.network]

ALL, SHARDS, BATCH = range(96), 2, 4
SOON = RetryPolicy(budget_s=5, first_delay_s=0.001, cap_s=0.01)
FORMATS = ["jsonl", "mds", "tar", "tfrecord"]
Files = dict[str, bytes]


def text_of(number: int) -> str:
    """A text of some 32 KiB: a stream has more bytes than are read at once."""
    return f"{number:05d}" + chr(97 + number % 26) * 32_000


def number_in(sample: dict[str, Any]) -> int:
    (found,) = (value for name, value in sample.items() if not name.startswith("__"))
    text = found.decode() if isinstance(found, bytes) else found
    assert text == text_of(int(text[:5]))
    return int(text[:5])


@pytest.fixture(scope="module", params=FORMATS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Two shards, of four streams each, and their indexes."""
    return written(tmp_path_factory.mktemp(request.param), request.param)


def written(folder: Path, ending: str) -> Files:
    field = "record" if ending == "tfrecord" else "txt"
    made: list[dict[str, Any]] = [{"__key__": f"k{number:05d}", field: text_of(number)} for number in ALL]
    if ending == "tfrecord":
        made = [sample | {field: sample[field].encode()} for sample in made]
    write_shards_sync(made, f"{folder}/s{{shard}}.{ending}", max_samples=len(ALL) // SHARDS)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shards_of(files: Files) -> list[str]:
    return sorted(name for name in files if re.fullmatch(r"s\d\..*", name))


def make(store: HttpStore, files: Files, streams: int = 1, **options: Any) -> AsyncDataLoader[Any]:
    """A loader of eight streams, or of several times eight."""
    for name, data in files.items():
        store.put(name, data)
    names = ["index.json"] if "index.json" in files else shards_of(files)
    dataset = RemoteIterableDataset(
        [f"{store.url}/{name}" for name in names], streams=streams, shuffle_buffer=24, storage_options={"retry": SOON}
    )
    return AsyncDataLoader(dataset, batch_size=BATCH, seed=3, decode=number_in, **options)


Change = Callable[[HttpStore], object]


async def epochs(files: Files, before: Change | None = None, **options: Any) -> tuple[list[list[list[int]]], HttpStore]:
    """Read two epochs; `before` the second, the server changes."""
    async with serving() as store, make(store, files, **options) as loader:
        first = [batch.tolist() async for batch in loader]
        store.asked.clear()
        if before is not None:
            before(store)
        return [first, [batch.tolist() async for batch in loader]], store


@pytest.fixture(scope="module")
def usual(files: Files) -> tuple[list[list[list[int]]], HttpStore]:
    """Two epochs of a server that does as it should, and what it was asked for in the second."""
    return run_async(epochs(files))


def test_each_byte_is_asked_for_once(files: Files, usual: tuple[list[list[list[int]]], HttpStore]) -> None:
    """A stream that ends inside a shard does not ask for the bytes behind its own."""
    found, store = usual
    assert found[0] != found[1]
    for epoch in found:
        assert sorted(number for batch in epoch for number in batch) == [*ALL]
    for name in shards_of(files):
        size = len(files[name])
        ends = [(asked or "bytes=0-").removeprefix("bytes=").split("-") for asked in store.ranges_asked(name)]
        asked = sorted((int(first), int(last or size - 1) + 1) for first, last in ends)
        if name.endswith(".mds"):
            assert asked.pop(0)[1] <= asked[0][0]  # the table
        assert len(asked) == 4
        assert [stop for _, stop in asked] == [*(start for start, _ in asked[1:]), size]


async def short(store: HttpStore, request: web.Request) -> web.StreamResponse | None:
    """Give less than was asked for."""
    answer = store.answer(request, unquote(request.rel_url.raw_path[1:]))
    body, stated = answer.body, re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
    if stated is None or not isinstance(body, bytes) or len(body) <= 100_000:
        return None
    part = f"bytes {stated[1]}-{int(stated[1]) + 99_999}/{stated[2]}"
    return web.Response(
        body=body[:100_000], status=206, headers={"Content-Range": part, "ETag": answer.headers["ETag"]}
    )


async def as_usual(store: HttpStore, request: web.Request) -> None:
    """Nothing is wrong."""


def without_ranges(store: HttpStore) -> None:
    store.ranges = False


def in_parts(store: HttpStore) -> None:
    for path in store.objects:
        store.faults[path].extend([short] * 100)


def busy(store: HttpStore) -> None:
    for path in store.objects:
        busy_now = status(503, Retry_After="0")
        store.faults[path].extend([busy_now, broken(100_000), broken(70_000), busy_now] * 4)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("trouble", [without_ranges, in_parts, busy])
def test_the_batches_are_the_same(
    files: Files, trouble: Change, loop: str, usual: tuple[list[list[list[int]]], HttpStore]
) -> None:
    """Whatever the server does with ranges, and however often it breaks off or asks to wait."""
    assert run_async(epochs(files, trouble), loop)[0] == usual[0]


def test_a_shard_that_is_replaced_between_two_streams(files: Files) -> None:
    """The streams of an epoch read one version of it, or raise."""
    name = shards_of(files)[1]
    replaced = files[name].replace(text_of(80).encode(), text_of(81).encode())

    def replace_it(store: HttpStore) -> None:
        store.faults[name].extend([*[as_usual] * (len(store.ranges_asked(name)) // 2), change(replaced)])

    async def run() -> None:
        async with serving() as store, make(store, files) as loader:
            assert len([batch async for batch in loader]) == len(ALL) // BATCH
            replace_it(store)
            with pytest.raises(ReadFailed, match="changed while it was read"):
                async for _ in loader:
                    pass

    run_async(run())


def test_left_while_the_server_stalls(files: Files) -> None:
    """The loader ends its reads, and can be read again."""

    def stalling(store: HttpStore) -> None:
        for name in shards_of(files):
            first = [as_usual] * (1 + name.endswith(".mds"))  # the table
            store.faults[name].extend([*first, *[broken(50_000, stall=True)] * 3])

    async def run() -> None:
        async with serving() as store, make(store, files, num_workers=0) as loader:
            whole = [batch.tolist() async for batch in loader]
            loader.set_epoch(0)
            stalling(store)
            async for _ in loader:
                break
            store.faults.clear()
            loader.set_epoch(0)
            assert [batch.tolist() async for batch in loader] == whole

    run_async(run())


def test_short_streams_of_a_server_without_ranges(tmp_path: Path) -> None:
    """A stream that is short enough to be read at once is read, too, where it lies far inside its shard."""
    files = written(tmp_path, "tar")
    found, store = run_async(epochs(files, without_ranges, streams=3))
    assert [*ALL] == sorted(number for batch in found[1] for number in batch)
    bounds = [
        asked.removeprefix("bytes=").split("-")
        for name in shards_of(files)
        for asked in store.ranges_asked(name)
        if asked
    ]
    assert any(int(first) > 1 << 20 and last and int(last) - int(first) < AT_ONCE for first, last in bounds)
