"""A web server on loopback with programmable faults, one per request."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import unquote

import pytest
from aiohttp import web

from asyncloader.transports import Transport

LISTING = ".listing"  # one path on each line; no object itself

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Asked(NamedTuple):
    """A request that arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    query: str
    peer: int  # the port of the connection's other end

    @property
    def range(self) -> str | None:
        return self.headers.get("Range")


@dataclass
class Stored:
    """An object, and the other properties that the server reports of it."""

    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    etag: str | None = None

    def __post_init__(self) -> None:
        self.etag = self.etag if self.etag is not None else f'"{sha256(self.data).hexdigest()[:16]}"'


Fault = Callable[["HttpStore", web.Request], Awaitable[web.StreamResponse | None]]
"""Returns a response of its own, or changes something and returns None for the usual response."""


class HttpStore:
    """The server. `objects` has its objects, `faults[path]` the faults of that path's requests, from the left."""

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self.asked: list[Asked] = []
        self.latency_s = 0.0
        self.ranges = True
        self.heads = True
        self.in_flight = 0
        self.most_in_flight = 0
        self.ending = asyncio.Event()
        self._arrived = asyncio.Event()
        self.url = ""

    def put(self, path: str, data: bytes, *, etag: str | None = None, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.objects[path] = Stored(data, named, etag)

    def ranges_asked(self, path: str) -> list[str | None]:
        return [asked.range for asked in self.asked if asked.path == path]

    async def seen(self, requests: int) -> None:
        """Wait until this number of requests has arrived in all."""
        while len(self.asked) < requests:
            self._arrived.clear()
            await self._arrived.wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = unquote(request.rel_url.raw_path[1:])
        peer = request.transport.get_extra_info("peername")[1] if request.transport else 0
        self.asked.append(Asked(request.method, path, request.headers.copy(), request.rel_url.raw_query_string, peer))
        self._arrived.set()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            if self.faults[path] and (answer := await self.faults[path].popleft()(self, request)) is not None:
                return answer
            return self.answer(request, path)
        finally:
            self.in_flight -= 1

    def answer(self, request: web.Request, path: str) -> web.Response:
        if request.method == "HEAD" and not self.heads:
            return web.Response(status=405)
        if path == LISTING:
            return web.Response(body="".join(f"{each}\n" for each in reversed(self.objects)).encode())
        if path not in self.objects:
            return web.Response(status=404, text="nothing here")
        stored = self.objects[path]
        headers = dict(stored.headers)
        if stored.etag:
            headers["ETag"] = stored.etag
        body, status = stored.data, 200
        asked = _RANGE.fullmatch(request.headers.get("Range", "")) if self.ranges else None
        if asked and request.headers.get("If-Range", stored.etag) in {stored.etag, headers.get("Last-Modified")}:
            start, size = int(asked[1]), len(stored.data)
            end = min(size, int(asked[2]) + 1 if asked[2] else size)
            if start >= size:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
            body, status = stored.data[start:end], 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        if request.method == "HEAD":
            return web.Response(status=200, headers={**headers, "Content-Length": str(len(stored.data))})
        return web.Response(body=body, status=status, headers=headers)


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None, store: HttpStore | None = None) -> AsyncGenerator[HttpStore]:
    """Run a store, by default a new one, on a free port of the loopback interface, with `tls` by https."""
    store = HttpStore() if store is None else store
    app = web.Application(handler_args={"access_log": None})
    app.router.add_route("*", "/{path:.*}", store.handle)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        host, port = runner.addresses[0][:2]
        store.url = f"{'https' if tls else 'http'}://{host}:{port}"
        yield store
    finally:
        store.ending.set()
        await runner.cleanup()


# ------------------------------------------------------------------------------------------------------ faults


def status(code: int, **headers: str) -> Fault:
    """Answer with a status instead of the object."""

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        return web.Response(status=code, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return fault


def redirect(target: str, code: int = 302) -> Fault:
    """Send the client elsewhere."""
    return status(code, Location=target)


def change(data: bytes, *, etag: str | None = None, **headers: str) -> Fault:
    """Replace the object just before it is served."""

    async def fault(store: HttpStore, request: web.Request) -> None:
        store.put(unquote(request.rel_url.raw_path[1:]), data, etag=etag, **headers)

    return fault


def broken(after: int, *, stated: int = 0, stall: bool = False, when: asyncio.Event | None = None) -> Fault:
    """Give `after` bytes of the usual answer's body; then, and after `when`, break the connection or stall.

    `stated` is added to the Content-Length. With -1 for `after`, not even the head is given.
    """

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        usual = store.answer(request, unquote(request.rel_url.raw_path[1:]))
        body = usual.body
        assert isinstance(body, bytes)
        answer = web.StreamResponse(status=usual.status, headers=usual.headers.copy())
        answer.content_length = len(body) + stated
        if after >= 0:
            await answer.prepare(request)
            await answer.write(body[:after])
        if when is not None:
            await when.wait()
        if stall:
            await store.ending.wait()
        assert request.transport is not None
        request.transport.abort()
        return answer

    return fault


def chunked(*, close: bool = False) -> Fault:
    """Give the object without a length: in chunks, or, with `close`, until the connection ends."""

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        stored = store.objects[unquote(request.rel_url.raw_path[1:])]
        answer = web.StreamResponse(headers={"ETag": stored.etag or '"x"'})
        if close:
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + stored.data)
            request.transport.close()
            return answer
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        for start in range(0, len(stored.data), 1000):
            await answer.write(stored.data[start : start + 1000])
        await answer.write_eof()
        return answer

    return fault


async def read_behind_a_cancelled_one(store: HttpStore, transport: Transport, path: str) -> bytes:
    """Return the result of a read of `path` that waited for the only slot, which a cancelled read of "a" had."""
    reading = asyncio.create_task(transport.read("a"))
    waiting = asyncio.create_task(transport.read(path))
    await store.seen(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    return await waiting
