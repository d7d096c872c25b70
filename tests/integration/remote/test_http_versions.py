"""Streams over HTTP from any byte, and the versions of objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader.transports import (
    CachedTransport,
    HttpTransport,
    ObjectNotFound,
    RangeOutOfBounds,
    RangesIgnored,
    ReadFailed,
    RetryPolicy,
    SizeUnknown,
)
from asyncloader.transports.testing.subject import drain
from tests.helpers.http_store import Fault, HttpStore, change, chunked, serving, status

pytestmark = pytest.mark.network

CONTENT = bytes(range(256)) * 8192
OTHER = bytes(reversed(CONTENT))
SOON = RetryPolicy(budget_s=60, first_delay_s=0.001, cap_s=0.01)
OLD = {"Last_Modified": "Tue, 03 Nov 2026 08:00:00 GMT", "Date": "Sat, 21 Nov 2026 18:00:00 GMT"}


@pytest_asyncio.fixture
async def store() -> AsyncIterator[HttpStore]:
    async with serving() as store:
        store.put("a", CONTENT)
        yield store


def opened(store: HttpStore, **options: Any) -> HttpTransport:
    return HttpTransport(store.url, retry=SOON, **options)


async def streamed(transport: HttpTransport, start: int, path: str = "a") -> bytes:
    return b"".join(await drain(transport.stream(path, start=start)))


def answer(code: int, body: bytes = b"", **headers: str) -> Fault:
    """Send a given response."""

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=code, body=body, headers=named)

    return fault


# ------------------------------------------------------------------------------------------- from any byte on


async def test_only_what_is_wanted_is_asked_for(store: HttpStore) -> None:
    """The bytes before the start are not sent; from byte 0 on the whole object is requested."""
    async with opened(store) as transport:
        for start in [0, 1, len(CONTENT) - 1]:
            assert await streamed(transport, start) == CONTENT[start:]
    assert store.ranges_asked("a") == [None, "bytes=1-", f"bytes={len(CONTENT) - 1}-"]


async def test_stretches_of_an_object_share_a_connection(store: HttpStore) -> None:
    """A stream to a stop asks for these bytes alone: its connection is free as soon as they have arrived."""
    edges = [0, 700_000, 1_500_000, len(CONTENT)]
    async with opened(store) as transport:
        pinned = transport.pinned("a")
        for start, stop in pairwise(edges):
            async with aclosing(pinned.stream(start=start, stop=stop)) as chunks:
                got = b""
                while len(got) < stop - start:
                    got += await anext(chunks)
                assert got == CONTENT[start:stop]
    assert store.ranges_asked("a") == [f"bytes={start}-{stop - 1}" for start, stop in pairwise(edges)]
    assert len({asked.peer for asked in store.asked}) == 1


async def test_a_stretch_that_comes_in_parts(store: HttpStore) -> None:
    """A server that gives less than was asked for, or more, or what no longer has these bytes."""
    etag, size = store.objects["a"].etag or "", len(CONTENT)

    def gives(first: int, after: int) -> Fault:
        return answer(206, CONTENT[first:after], Content_Range=f"bytes {first}-{after - 1}/{size}", ETag=etag)

    async with opened(store) as transport:
        store.faults["a"] += [gives(5, 9), gives(9, 20_000), gives(20_000, 30_000)]
        chunks = await drain(transport.pinned("a").stream(start=5, stop=10_000))
        assert b"".join(chunks) == CONTENT[5:]
        ends = ["5-9999", "9-9999", f"20000-{size - 1}", f"30000-{size - 1}"]
        assert store.ranges_asked("a") == [f"bytes={each}" for each in ends]
        store.faults["a"] += [gives(5, 9999), change(CONTENT[:8000])]
        with pytest.raises(ReadFailed, match="changed while it was read"):
            await drain(transport.pinned("a").stream(start=5, stop=10_000))


async def test_a_server_without_ranges(store: HttpStore) -> None:
    """The server sends the whole object, and the bytes before the start are dropped; also if no size is stated. A start
    past the end is an error, also where only the end of the bytes shows the object's length.
    """
    store.ranges = False
    async with opened(store) as transport:
        for start in [1, 1_500_000, len(CONTENT), len(CONTENT) + 1]:
            for faults in ([], [chunked()]):
                store.faults["a"] += faults
                if start <= len(CONTENT):
                    assert await streamed(transport, start) == CONTENT[start:]
                    continue
                with pytest.raises(RangeOutOfBounds, match=r"'a'.*it has 2,097,152 bytes") as caught:
                    await streamed(transport, start)
                assert caught.value.size == len(CONTENT)


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 1])
async def test_416_without_a_size(store: HttpStore, size: int) -> None:
    """If a server refuses the range without a reason, the size is requested, and decides."""
    store.put("a", bytes(size))
    store.faults["a"].append(status(416))
    async with opened(store) as transport:
        start = len(CONTENT)
        if size == start:
            assert await streamed(transport, start) == b""
        else:
            error, text = (RangeOutOfBounds, "has 2,097,151 bytes") if size < start else (ReadFailed, "answered 416")
            with pytest.raises(error, match=text):
                await streamed(transport, start)
    assert [asked.method for asked in store.asked] == ["GET", "HEAD"]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (answer(206, CONTENT[5:9], Content_Range="bytes 5-8/*"), "does not state the object's size"),
        (answer(206, CONTENT[4:], Content_Range=f"bytes 4-{len(CONTENT) - 1}/{len(CONTENT)}"), "bytes from 5 on"),
        (answer(206, CONTENT[5:]), "no Content-Range"),
        (answer(404), "does not exist"),
    ],
    ids=["no size", "other bytes", "no range", "missing"],
)
async def test_answers_that_are_not_used(store: HttpStore, fault: Fault, text: str) -> None:
    """An answer whose bytes are not certainly those from the start to the end is refused."""
    store.faults["a"].append(fault)
    async with opened(store) as transport:
        with pytest.raises((ReadFailed, ObjectNotFound), match=text):
            await streamed(transport, 5)


async def test_a_part_of_what_has_no_length(store: HttpStore) -> None:
    """An object that was sent in chunks and broke does not end with a part of it that states no size either."""
    etag = store.objects["a"].etag or ""

    async def break_off(store: HttpStore, request: web.Request) -> web.StreamResponse:
        head = web.StreamResponse(headers={"ETag": etag})
        head.enable_chunked_encoding()
        await head.prepare(request)
        await head.write(CONTENT[:1000])
        assert request.transport is not None
        request.transport.close()
        return head

    part = answer(206, CONTENT[1000:2000], Content_Range="bytes 1000-1999/*", ETag=etag)
    store.faults["a"] += [break_off, part] * 2
    async with opened(store) as transport:
        for read in [transport.read("a"), streamed(transport, 0)]:
            with pytest.raises(ReadFailed, match="gives a part and does not state the object's size"):
                await read


# --------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("etag", "headers", "known"),
    [
        ('"strong"', {}, '"strong"'),
        ('W/"weak"', {}, None),
        ("", OLD, OLD["Last_Modified"]),
        ("", {"Last_Modified": OLD["Date"], "Date": OLD["Date"]}, None),
        ('W/"weak"', OLD, f'W/"weak" {OLD["Last_Modified"]}'),
        ("", {}, None),
    ],
    ids=["strong", "weak", "old", "new", "weak and old", "nothing"],
)
async def test_what_proves_a_version(store: HttpStore, etag: str, headers: dict[str, str], known: str | None) -> None:
    """A strong ETag does, or a date long past; any other validator might stand for other bytes as well."""
    store.put("a", b"data", etag=etag, **headers)
    async with opened(store) as transport:
        assert await transport.info("a") == (4, known)
        assert await transport.read_with_info("a") == (b"data", (4, known))
    assert [asked.method for asked in store.asked] == ["HEAD", "GET"]


async def test_the_version_without_head(store: HttpStore) -> None:
    """A server that serves no HEAD is asked for one byte: its answer has size and version. Also of an empty object."""
    store.heads = False
    store.put("empty", b"")
    async with opened(store) as transport:
        assert await transport.info("a") == (len(CONTENT), store.objects["a"].etag)
        assert (await transport.info("empty")).size == 0
    assert store.ranges_asked("a") == [None, "bytes=0-0"]


async def test_the_version_of_an_error_page(store: HttpStore) -> None:
    """An ETag on an answer that refuses a range belongs to that answer, and is not taken for the object's."""
    store.put("empty", b"")
    store.faults["empty"] += [status(405), answer(416, b"page", Content_Range="bytes */0", ETag='"page"')]
    async with opened(store) as transport:
        assert await transport.info("empty") == (0, None)


@pytest.mark.thorough
async def test_a_size_that_the_server_does_not_state(store: HttpStore, tmp_path: Path) -> None:
    """`size` raises. Objects are still read, also through a cache."""

    async def sizeless(store: HttpStore, request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=405) if request.method == "HEAD" else await chunked()(store, request)

    store.faults["a"].extend([sizeless] * 50)
    inner = opened(store)
    with pytest.raises(SizeUnknown, match=r"'a'.*answered 200, but it does not state the object's size"):
        await inner.info("a")
    async with CachedTransport(inner, store.url, tmp_path) as transport:
        for _ in range(2):
            assert await transport.read("a") == CONTENT
            assert b"".join(await drain(transport.stream("a"))) == CONTENT
        with pytest.raises(SizeUnknown):
            await transport.size("a")


async def test_a_cache_before_a_server_without_ranges(store: HttpStore, tmp_path: Path) -> None:
    """The first read of a part far inside an object fetches the whole object, once. Where it cannot be kept, a range is
    refused, and a stream is read.
    """
    store.ranges = False
    whole, start = CONTENT * 2, 3 << 20
    store.put("b", whole)
    async with CachedTransport(opened(store), store.url, tmp_path) as transport:
        for _ in range(2):
            assert await transport.read_ranges("b", [(start, 10), (start + 9000, 10)]) == [
                whole[start : start + 10],
                whole[start + 9000 : start + 9010],
            ]
            async with aclosing(transport.pinned("b").stream(start=start + 5, stop=start + 15)) as chunks:
                assert (await anext(chunks))[:10] == whole[start + 5 : start + 15]
        assert [asked.method for asked in store.asked].count("GET") == 2
    async with CachedTransport(opened(store), store.url, tmp_path / "other", 4096) as transport:
        with pytest.raises(RangesIgnored, match="cache_dir="):
            await transport.read_range("b", start, 10)
        assert b"".join(await drain(transport.stream("b", start=start))) == whole[start:]
