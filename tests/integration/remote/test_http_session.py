from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from asyncloader.transports.http import HttpTransport
from asyncloader.transports.retry import RetryPolicy

pytestmark = pytest.mark.network

SOON = RetryPolicy(budget_s=60, first_delay_s=0.001, cap_s=0.01)

Answer = Callable[[int, list[str], asyncio.StreamWriter], Awaitable[None]]
"""Gets the number of the request, from 0, its lines, and the connection."""


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@asynccontextmanager
async def answering(answer: Answer) -> AsyncGenerator[str]:
    """Run a server that writes what it likes; gives its URL."""
    number = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                number += 1
                await answer(number - 1, head.split("\r\n"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())


@pytest.mark.parametrize("idle", [False, True])
async def test_an_answer_that_was_not_asked_for(idle: bool) -> None:
    """It is no answer to the next request, whether it came with the answer before or while the connection was idle."""
    first: list[asyncio.StreamWriter] = []
    read = asyncio.Event()

    async def answer(number: int, lines: list[str], writer: asyncio.StreamWriter) -> None:
        if number == 0:
            first.append(writer)
            writer.write(ok(b"data") + (b"" if idle else ok(b"of no request")))
        elif number == 1 and idle:
            await read.wait()
            # It arrives before the answer to the other connection.
            first[0].write(ok(b"of no request"))
            writer.write(ok(b"data"))
        else:
            writer.write(ok(b"data"))

    async with answering(answer) as url, HttpTransport(url, retry=SOON) as transport:
        one, other = (asyncio.create_task(transport.read("a")) for _ in range(2))
        assert await one == b"data"
        read.set()
        assert await other == b"data"
        assert [*await asyncio.gather(transport.read("a"), transport.read("a"))] == [b"data", b"data"]


@pytest.mark.parametrize("broken", [1, 2])
async def test_a_connection_that_the_server_closes_when_it_is_used_again(broken: int) -> None:
    """The request is sent once more at once; if that connection is closed, too, it is a failure that is retried."""

    async def answer(number: int, lines: list[str], writer: asyncio.StreamWriter) -> None:
        if 1 <= number <= broken:
            writer.close()
        else:
            writer.write(ok(b"data"))

    async with answering(answer) as url, HttpTransport(url, retry=SOON) as transport:
        assert [await transport.read("a"), await transport.read("a")] == [b"data", b"data"]
        assert transport.retries.total == broken - 1


async def test_what_is_sent() -> None:
    """Headers of the user's replace those of every request, in whatever case, and no header is sent twice."""
    asked: list[list[str]] = []

    async def answer(number: int, lines: list[str], writer: asyncio.StreamWriter) -> None:
        asked.append(lines)
        writer.write(ok(b"data").removesuffix(b"data" if lines[0].startswith("HEAD") else b""))

    headers = {"user-agent": "me", "X-Other": "é"}
    async with answering(answer) as url, HttpTransport(f"{url}/a b?c=d%2f", headers=headers) as transport:
        await transport.read("e/f#?")
        assert await transport.size("e") == 4
    host = url.removeprefix("http://")
    for lines, first in zip(asked, ["GET /a%20b/e/f%23%3F?c=d%2f", "HEAD /a%20b/e?c=d%2f"], strict=True):
        assert lines[0] == f"{first} HTTP/1.1"
        assert sorted(line.lower() for line in lines[1:] if line) == [
            "accept-encoding: identity",
            "accept: */*",
            f"host: {host}",
            "user-agent: me",
            "x-other: é",
        ]


async def test_a_header_that_would_end_its_line() -> None:
    """It is refused before anything is sent, and the error does not show its value, which may be a secret."""
    asked = []

    async def answer(number: int, lines: list[str], writer: asyncio.StreamWriter) -> None:
        asked.append(lines)

    headers = {"X-Token": "secret\r\nX-Other: 1"}
    async with answering(answer) as url, HttpTransport(url, headers=headers) as transport:
        with pytest.raises(ValueError, match=r"[Hh]eader") as raised:
            await transport.read("a")
    assert not asked
    assert "secret" not in str(raised.value)
