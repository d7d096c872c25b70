"""A broken read continues with bytes of the same version, or is an error, whatever a server answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import product

import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader.transports import HttpTransport, ReadFailed, RetryPolicy
from tests.helpers.http_store import Fault, HttpStore, broken, serving

pytestmark = pytest.mark.network

SOON = RetryPolicy(budget_s=1, first_delay_s=0.001, cap_s=0.01)
SIZE = 400_000
CONTENT = bytes(SIZE)
CHANGED = {
    "not": CONTENT,
    "after the break": CONTENT[: SIZE - 1000] + b"x" * 1000,
    "everywhere": b"x" * SIZE,
    "shorter": CONTENT[: SIZE - 5],
}
OLD, DATE = "Tue, 03 Nov 2026 08:00:00 GMT", "Sat, 21 Nov 2026 18:00:00 GMT"
VALIDATORS: dict[str, list[dict[str, str]]] = {  # of the first and the next version
    "strong": [{"ETag": '"1"'}, {"ETag": '"2"'}],
    "weak": [{"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}],
    "weak and old": [{"ETag": 'W/"1"', "Last-Modified": OLD}, {"ETag": 'W/"2"', "Last-Modified": DATE}],
    "old": [{"Last-Modified": OLD}, {"Last-Modified": DATE}],
    "new": [{"Last-Modified": DATE}, {"Last-Modified": DATE}],
    "none": [{}, {}],
}


def answering(data: bytes, validators: dict[str, str], how: str) -> Fault:
    """Serve the object like a server of this kind."""

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        headers = {"Date": DATE, **validators}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        condition = request.headers.get("If-Range")
        if asked and how != "no ranges" and (how != "honours" or condition in {None, *validators.values()}):
            start, end = int(asked[1]), min(len(data), int(asked[2] or SIZE) + 1)
            stated = start + 7 if how == "other bytes" and start else start
            headers["Content-Range"] = f"bytes {stated}-{end - 1}/{len(data)}"
            if how == "mute" or (how == "silent" and condition):
                headers = {name: value for name, value in headers.items() if name not in validators}
            return web.Response(body=data[start:end], status=206, headers=headers)
        return web.Response(body=data, headers=headers)

    return fault


@pytest_asyncio.fixture
async def store() -> AsyncIterator[HttpStore]:
    async with serving() as store:
        yield store


NOT_PROVED = {"weak", "new", "none"}
SERVERS = ["honours", "ignores", "silent", "mute", "no ranges", "other bytes"]


@pytest.mark.parametrize("stops", [False, True], ids=["breaks", "stops"])
@pytest.mark.parametrize("known", VALIDATORS)
async def test_bytes_are_of_one_version(store: HttpStore, known: str, stops: bool) -> None:
    """A stream breaks after half of the object, or goes on behind its stop there, for each kind of server and each
    later content of the object.
    """
    first, second = VALIDATORS[known]
    stop = SIZE // 2

    async def streamed(path: str, how: str, becomes: str, start: int) -> None:
        seen = asyncio.Event()
        data = CHANGED[becomes]
        later = answering(data, first if becomes == "not" else second, how)
        if stops:
            store.faults[path].append(answering(CONTENT, first, "honours"))
        else:
            headers = {name.replace("-", "_"): value for name, value in first.items() if name != "ETag"}
            store.put(path, CONTENT, etag=first.get("ETag", ""), Date=DATE, **headers)
            store.faults[path].append(broken(stop, when=seen))
        store.faults[path] += [later] * 50
        got = b""
        reader = transport.pinned(path).stream(start=start, stop=stop if stops else None, chunk_size=1 << 14)
        try:
            async with aclosing(reader) as chunks:
                async for chunk in chunks:
                    got += chunk
                    seen.set()
        except ReadFailed:
            assert becomes != "not" or how in {"other bytes", "silent", "mute"} or known in NOT_PROVED, (how, becomes)
            assert not (stops and known in NOT_PROVED and becomes == "not" and how != "other bytes"), (how, becomes)
            return
        assert got in {CONTENT[start:], data[start:]}, (how, becomes)
        if stops and known == "strong" and how == "honours":
            assert store.ranges_asked(path) == [f"bytes={start}-{stop - 1}", f"bytes={stop}-{SIZE - 1}"]

    async with HttpTransport(store.url, retry=SOON) as transport:
        cases = product(SERVERS, CHANGED, [0, 1000])
        await asyncio.gather(*(streamed(f"{n}", *case) for n, case in enumerate(cases)))


async def test_parts_of_an_object_that_nothing_identifies(store: HttpStore) -> None:
    """Several requests for its parts are refused; equal weak validators suffice, and so does a single request."""
    data = bytes(4 << 20)
    ranges = [(0, 10), (3 << 20, 10)]
    store.put("a", data, etag="")
    store.put("b", data, etag='W/"1"')
    async with HttpTransport(store.url, retry=SOON) as transport:
        with pytest.raises(ReadFailed, match="neither ETag nor Last-Modified"):
            await transport.read_ranges("a", ranges)
        assert await transport.read_ranges("a", ranges[:1]) == [bytes(10)]
        assert await transport.read_ranges("b", ranges) == [bytes(10)] * 2


async def test_a_server_that_sends_a_byte_now_and_then(store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is asked again within the budget; the error states its rate. A slow consumer is no slow server."""
    monkeypatch.setattr("asyncloader.transports.download.SLOW_S", 0.2)

    async def trickle(store: HttpStore, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"ETag": '"1"', "Content-Length": str(SIZE)})
        await answer.prepare(request)
        while not store.ending.is_set():
            await answer.write(b"x")
            try:
                await asyncio.wait_for(store.ending.wait(), 0.02)
            except TimeoutError:
                continue
        return answer

    store.faults["a"] += [trickle] * 50
    store.put("b", CONTENT)
    policy = RetryPolicy(budget_s=0.5, first_delay_s=0.001, cap_s=0.01)
    async with HttpTransport(store.url, retry=policy) as transport:
        with pytest.raises(ReadFailed, match=r"bytes per second over .* below min_bytes_per_s=1024; tried \d+ times"):
            await transport.read("a")
        assert transport.retries.kinds["slow"] >= 1
        kinds = dict(transport.retries.kinds)
        async with aclosing(transport.stream("b", chunk_size=SIZE // 4)) as chunks:
            async for _ in chunks:
                await asyncio.sleep(0.1)  # the consumer's time
        assert dict(transport.retries.kinds) == kinds
