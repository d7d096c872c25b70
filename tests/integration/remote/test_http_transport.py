from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader.transports import AccessDenied, ObjectNotFound, ObjectTooLarge, RangeOutOfBounds, ReadFailed
from asyncloader.transports.http import HttpTransport
from asyncloader.transports.retry import RetryPolicy
from asyncloader.transports.testing.subject import drain
from tests.helpers.http_store import Fault, HttpStore, broken, change, chunked, serving, status

pytestmark = pytest.mark.network

CONTENT = bytes(range(256)) * 8192  # 2 MiB: more than the buffers of both ends, so an answer is cut in its middle
OTHER = bytes(reversed(CONTENT))
SOON = RetryPolicy(budget_s=60, first_delay_s=0.001, cap_s=0.01)
NEVER = RetryPolicy(budget_s=0)


@pytest_asyncio.fixture
async def store() -> AsyncIterator[HttpStore]:
    async with serving() as store:
        yield store


def opened(store: HttpStore, retry: RetryPolicy = SOON, **options: Any) -> HttpTransport:
    return HttpTransport(store.url, retry=retry, **options)


def raw(answer: bytes) -> Fault:
    """Send these bytes as the answer, and end the connection."""

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(answer)
        request.transport.close()
        return web.StreamResponse()

    return fault


# ------------------------------------------------------------------------------------------------ retries


@pytest.mark.parametrize("code", [408, 503])
async def test_a_retryable_status_is_retried(store: HttpStore, code: int) -> None:
    """Requests to failing servers are retried until they succeed, and each retry is counted."""
    store.put("a", b"data")
    store.faults["a"] += [status(code), status(code, Retry_After="0"), status(code, Retry_After="soon")]
    async with opened(store) as transport:
        assert await transport.read("a") == b"data"
        assert transport.retries.kinds == {f"status {code}": 3}
        assert (transport.retries.resumed, transport.retries.given_up) == (0, 0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(400, ReadFailed), (401, AccessDenied), (403, AccessDenied), (404, ObjectNotFound), (410, ObjectNotFound)],
)
async def test_a_status_that_is_not_retryable_fails_at_once(store: HttpStore, code: int, kind: type[Exception]) -> None:
    """One request is made, and the error has the URL and the status."""
    store.put("dir/a b", b"data")
    store.faults["dir/a b"].append(status(code))
    async with opened(store) as transport:
        with pytest.raises(kind, match=f"'dir/a b'.*{store.url}/dir/a%20b answered {code}"):
            await transport.read("dir/a b")
        assert transport.retries.total == 0
    assert len(store.asked) == 1


# ----------------------------------------------------------------------------------------------- broken downloads


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [broken(1 << 20), broken(1 << 20, stall=True), broken(-1), broken(-1, stall=True)])
async def test_a_broken_read_gives_the_object(store: HttpStore, fault: Fault) -> None:
    """Resets and stalls, before the answer and in its middle: in the end the bytes are right."""
    store.put("a", CONTENT)
    store.faults["a"] += [fault, fault]
    # A reset at once may be hidden by aiohttp's own second attempt on a connection that it had kept.
    async with opened(store, first_byte_s=1.0, stalled_s=1.0) as transport:
        assert await transport.read("a") == CONTENT
        assert transport.retries.total >= 1


@pytest.mark.thorough
@pytest.mark.parametrize("stall", [False, True])
async def test_a_broken_stream_goes_on_where_it_broke(store: HttpStore, stall: bool) -> None:
    """The rest is requested by Range and If-Range from the first byte that was not given; no byte is given twice."""
    store.put("a", CONTENT)
    seen = asyncio.Event()
    store.faults["a"].append(broken(1 << 20, when=seen, stall=stall))
    async with opened(store, stalled_s=1.0) as transport:
        async with aclosing(transport.stream("a", chunk_size=1000)) as chunks:
            got = [await anext(chunks) for _ in range(10)]
            seen.set()
            got += await drain(chunks)
        assert b"".join(got) == CONTENT
        assert transport.retries.resumed == 1
    first, second = store.asked
    assert first.range is None
    start = int((second.range or "").removeprefix("bytes=").partition("-")[0])
    assert 10_000 <= start <= 1 << 20
    assert second.headers["If-Range"] == store.objects["a"].etag


@pytest.mark.thorough
async def test_a_broken_range_is_resumed_within_itself(store: HttpStore) -> None:
    """A resumed request ends where the range ends."""
    store.put("a", CONTENT)
    store.faults["a"].append(broken(1 << 19, stall=True))
    async with opened(store, stalled_s=1.0) as transport:
        assert await transport.read_range("a", 1000, 1 << 20) == CONTENT[1000 : 1000 + (1 << 20)]
    first, second = store.ranges_asked("a")
    assert first == f"bytes=1000-{999 + (1 << 20)}"
    assert second == f"bytes={1000 + (1 << 19)}-{999 + (1 << 20)}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("call", "new"),
    [
        (lambda transport: transport.read("a"), OTHER),
        (lambda transport: drain(transport.stream("a")), None),
        (lambda transport: transport.read_range("a", 5, (2 << 20) - 5), OTHER[5 : 2 << 20]),
    ],
    ids=["read", "stream", "range"],
)
async def test_a_changed_object_is_never_mixed(
    store: HttpStore, call: Callable[[HttpTransport], Awaitable[Any]], new: bytes | None
) -> None:
    """An object is replaced between the parts of its download: a stream that has given some bytes fails, and a read
    returns the new object, not the halves of two.
    """
    store.put("a", CONTENT)
    store.faults["a"] += [broken(1 << 20), change(OTHER)]
    async with opened(store, stalled_s=0.5) as transport:
        if new is None:
            with pytest.raises(ReadFailed, match=r"'a'.*changed while it was read"):
                await call(transport)
        else:
            assert await call(transport) == new
        assert await transport.read("a") == OTHER


# ------------------------------------------------------------------------------------------------- lying servers


async def test_a_body_shorter_than_stated(store: HttpStore) -> None:
    """An answer that ends before its stated length is broken, however often it is sent."""
    store.put("a", b"12345")
    store.faults["a"].extend([broken(5, stated=5)] * 1000)
    async with opened(store, retry=RetryPolicy(budget_s=0.2, first_delay_s=0.01)) as transport:
        with pytest.raises(ReadFailed, match="'a'"):
            await transport.read("a")
        assert transport.retries.kinds["broken body"] > 0


async def test_a_body_without_an_end(store: HttpStore) -> None:
    """Without length and chunks a broken connection looks like the end, so such an answer is refused."""
    store.put("a", b"12345")
    store.faults["a"].append(chunked(close=True))
    async with opened(store) as transport:
        with pytest.raises(ReadFailed, match="states neither Content-Length nor chunks"):
            await transport.read("a")


async def test_an_object_without_a_length(store: HttpStore) -> None:
    """A chunked answer is read to its end, and counted against `max_bytes` as it arrives."""
    store.put("a", CONTENT)
    store.faults["a"] += [chunked(), chunked()]
    async with opened(store) as transport:
        assert await transport.read("a") == CONTENT
        with pytest.raises(ObjectTooLarge, match="more than max_bytes=5,000"):
            await transport.read("a", max_bytes=5000)


async def test_a_server_that_hangs_up_in_the_handshake() -> None:
    """The connection is retried, and the error names the cause although the system has no text for it."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = "https://{}:{}".format(*server.sockets[0].getsockname())
        retry = RetryPolicy(budget_s=0.1, first_delay_s=0.001)
        async with HttpTransport(url, retry=retry) as transport:
            with pytest.raises(ReadFailed, match=r"no connection to 127\.0\.0\.1:[0-9]+: [A-Z]\w+.*tried"):
                await transport.read("a")
            assert transport.retries.total > 0


async def test_what_is_not_http(store: HttpStore) -> None:
    """An answer that is not HTTP fails at once."""
    store.faults["a"].append(raw(b"220 smtp.example.org ready\r\n\r\n"))
    async with opened(store) as transport:
        with pytest.raises(ReadFailed, match="not legal HTTP"):
            await transport.read("a")


@pytest.mark.parametrize("start", [1 << 20, (1 << 20) + 1])
async def test_a_server_that_ignores_range(store: HttpStore, start: int) -> None:
    """Up to `range_gap` bytes before the range are read and dropped; more are an error."""
    store.ranges = False
    store.put("a", CONTENT)
    async with opened(store) as transport:
        if start <= transport.range_gap:
            assert await transport.read_range("a", start, 10) == CONTENT[start : start + 10]
        else:
            with pytest.raises(ReadFailed, match="it ignores Range"):
                await transport.read_range("a", start, 10)
        with pytest.raises(RangeOutOfBounds):
            await transport.read_range("a", 5, len(CONTENT))


async def test_a_range_of_the_object_that_is_refused(store: HttpStore) -> None:
    """A 416 with a size that has the range says nothing about the range, so no sample may be left out for it."""
    store.faults["a"].append(status(416, Content_Range="bytes */100"))
    async with opened(store) as transport:
        with pytest.raises(ReadFailed, match="answered 416"):
            await transport.read_range("a", 0, 5)


async def test_an_encoded_body(store: HttpStore) -> None:
    """Compressed bytes are not taken for the object's, unless requested; nothing is ever decompressed here."""
    store.put("a", b"\x1f\x8b not really", Content_Encoding="gzip")
    async with opened(store) as transport:
        for call in (transport.read("a"), transport.read_range("a", 0, 3), transport.size("a")):
            with pytest.raises(ReadFailed, match="its bytes are encoded \\('gzip'\\)"):
                await call
    async with opened(store, encoded=True) as transport:
        assert await transport.read("a") == b"\x1f\x8b not really"
        assert await transport.size("a") == 13
    assert {asked.headers["Accept-Encoding"] for asked in store.asked} == {"identity"}


def test_an_option_that_was_removed() -> None:
    """The error says what to do instead."""
    with pytest.raises(TypeError, match=r"verify= was removed: compare digests .* in decode="):
        HttpTransport("http://localhost/", verify=True)
