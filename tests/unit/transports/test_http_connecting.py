"""How many connections to a web server are opened at a time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from asyncloader.transports import open_transport
from asyncloader.transports.http_connecting import Connecting

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n"


@pytest.mark.parametrize("keeps", [True, False], ids=["kept connections", "a connection for each request"])
async def test_connections_grow_with_the_answers(keeps: bool) -> None:
    """A server gets five at a time before its first answer, then more. A cancelled request holds up no other."""
    arrived = answered = 0
    crowds: list[tuple[int, int]] = []  # answers, and new connections without an answer, as each connection comes

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived, answered
        arrived += 1
        crowds.append((answered, arrived - answered))
        first = True
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(0.02)  # the server's latency: as long as many connections take
                answered, first = answered + first, False
                writer.write(HEAD + (b"" if keeps else b"Connection: close\r\n") + b"\r\nx")
                if not keeps:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, open_transport(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as transport:
        reads = [asyncio.create_task(transport.read(f"{number}")) for number in range(150)]
        await asyncio.sleep(0)
        for each in reads[20:40]:
            each.cancel()
        found = await asyncio.gather(*reads, return_exceptions=True)
    assert [each == b"x" for each in found].count(True) == 130
    assert max(crowd for answers, crowd in crowds if not answers) == 5
    assert max(crowd for _, crowd in crowds) > 8


def test_slow_connections_halve_the_number_once_for_each_crowd() -> None:
    """TCP has tried those again that the server dropped, all of one crowd at about the same time."""
    connecting = Connecting()
    for began in (0.0, 0.001, 0.002):
        connecting.opened(began, began + 1.02)
    assert connecting.most == 2
    connecting.opened(2.0, 2.4)
    assert connecting.most == 2
    for _ in range(3):
        connecting.begin()
    assert connecting.full
    connecting.opened(3.0, 3.6)
    assert connecting.most == 1
