"""The server of a loader's view: its page, its stream, and requests that mean harm."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from asyncloader.live import live_server as server_module
from asyncloader.live.live_server import LiveServer

pytestmark = pytest.mark.network

TIMEOUT = asyncio.timeout  # around each test: a hang is an error


class Feed:
    """Gives a line whenever one is asked for, and counts how often it was begun and closed."""

    def __init__(self, line: bytes = b'{"x": 1}') -> None:
        self.line = line
        self.begun = self.closed = 0
        self.next = asyncio.Event()
        self.last = False

    async def __call__(self) -> AsyncGenerator[bytes]:
        self.begun += 1
        try:
            while True:
                yield self.line
                if self.last:
                    return
                await self.next.wait()
                self.next.clear()
        finally:
            self.closed += 1


@asynccontextmanager
async def serving(feed: Feed) -> AsyncGenerator[LiveServer]:
    server = LiveServer(feed)
    await server.listen_at_port(0)
    try:
        async with TIMEOUT(30):
            yield server
    finally:
        await server.close()
        await server.close()
        assert feed.begun == feed.closed


async def connect(server: LiveServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = urlsplit(server.url).port
    assert port is not None
    sock = socket.create_connection(("127.0.0.1", port))
    return await asyncio.open_connection(sock=sock, limit=1 << 20)


def request(server: LiveServer, more: str = "", host: str = "localhost") -> bytes:
    return f"GET {urlsplit(server.url).path}{more} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


async def ask(server: LiveServer, data: bytes) -> bytes:
    reader, writer = await connect(server)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


async def stream(server: LiveServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connect(server)
    writer.write(request(server, "events"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
    return reader, writer


@pytest.mark.loops
async def test_the_page() -> None:
    """Comes whole, and its header allows its own script and style, by their hashes, and nothing else."""
    async with serving(Feed()) as server:
        answer = await ask(server, request(server))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    policy = re.search(rb"Content-Security-Policy: ([^\r]*)", head)
    assert policy is not None
    assert b"unsafe" not in policy[1]
    assert policy[1].startswith(b"default-src 'none'; script-src 'sha256-")
    for name in (b"no-store", b"no-referrer", b"nosniff", b"frame-ancestors 'none'"):
        assert name in head
    assert not re.search(rb"(?:src|href)=\"(?!data:,)|https?://(?!www\.w3\.org/2000/svg)|\sstyle=|\son[a-z]+=\"", body)


@pytest.mark.loops
async def test_the_stream() -> None:
    """Each connection that follows has a feed of its own, which is closed with it; the end of a feed is an event."""
    feed = Feed()
    async with serving(feed) as server:
        one, first = await stream(server)
        assert await one.readline() == b'data: {"x": 1}\n'
        first.close()
        while not feed.closed:
            feed.next.set()  # the end of a connection shows when a line is written
            await asyncio.sleep(0)
        feed.next.clear()
        two, second = await stream(server)
        assert await two.readuntil(b"\n\n") == b'data: {"x": 1}\n\n'
        feed.line, feed.last = b'{"x": 2}', True
        feed.next.set()
        assert await two.read() == b'data: {"x": 2}\n\nevent: end\ndata: \n\n'
        second.close()
        await server.over.wait()
        assert feed.begun == feed.closed == 2


async def test_a_feed_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Ends the stream, and the log has its error."""

    async def broken() -> AsyncGenerator[bytes]:
        yield b"{}"
        raise ValueError("planted")

    server = LiveServer(broken)
    await server.listen_at_port(0)
    reader, writer = await stream(server)
    assert (await reader.read()).endswith(b"event: end\ndata: \n\n")
    writer.close()
    await server.close()
    assert "planted" in caplog.text


@pytest.mark.loops
async def test_a_reader_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gets fewer lines, each whole, and in the end it is left."""
    monkeypatch.setattr(server_module, "_SLOW_S", 0.2)
    feed = Feed(b"x" * 100_000)
    async with serving(feed) as server:
        slow, kept = await stream(server)
        transport: Any = kept.transport
        transport.pause_reading()
        while server._connections:
            feed.next.set()
            await asyncio.sleep(0)
        transport.resume_reading()
        with suppress(ConnectionError):
            assert len(await slow.read()) < 100 * 100_008
        kept.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /x/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"403"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
    ],
)
async def test_refusals(data: bytes, status: bytes) -> None:
    """Are answered with a text, and the connection is closed."""
    async with serving(Feed()) as server:
        answer = await ask(server, data)
        assert answer.split()[1] == status
        assert server.url.rsplit("/", 2)[1].encode() not in answer


async def test_requests_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is too long, or cut off, or does not come in time, ends the connection without an answer."""
    monkeypatch.setattr(server_module, "_REQUEST_S", 0.2)
    async with serving(Feed()) as server:
        for data in (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4000, b"GET /", b""):
            reader, writer = await connect(server)
            writer.write(data)
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


@pytest.mark.loops
async def test_more_connections_than_are_served() -> None:
    """Those that ask for nothing lose their places to others; those that follow the run keep theirs."""
    async with serving(Feed()) as server:
        following = [await stream(server) for _ in range(20)]
        silent = [await connect(server) for _ in range(30)]
        answer = await ask(server, request(server))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert len(server._connections) <= server_module._MOST_CONNECTIONS
        more = [await stream(server) for _ in range(server_module._MOST_CONNECTIONS - 20)]
        reader, writer = await connect(server)
        assert await reader.read() == b""
        for events, _ in following:
            assert await events.readuntil(b"\n\n")
        for _, connection in [*following, *silent, *more, (reader, writer)]:
            connection.close()


@pytest.mark.loops
async def test_requests_that_are_refused_hold_no_place() -> None:
    """Whoever lacks the secret cannot keep others out, with as many connections as are served."""
    async with serving(Feed()) as server:
        refused = []
        for _ in range(server_module._MOST_CONNECTIONS):
            reader, writer = await connect(server)
            writer.write(b"GET /x/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"403"
            refused.append(writer)
        assert (await ask(server, request(server))).startswith(b"HTTP/1.1 200 OK")
        for writer in refused:
            writer.close()


async def test_a_port_in_use() -> None:
    """Is named in the error."""
    async with serving(Feed()) as server:
        other = LiveServer(Feed())
        with pytest.raises(OSError, match=f"port {urlsplit(server.url).port}: Address already in use"):
            await other.listen_at_port(urlsplit(server.url).port or 0)
        await other.close()
