from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from yarl import URL

from asyncloader.transports import open_transport
from asyncloader.transports.http import HttpTransport
from asyncloader.transports.http_client import _MOST_ORIGINS, origin_of


@pytest.mark.parametrize("url", ["https://host", "https://HOST:443/a", "https://user:password@host/b?c"])
def test_an_origin_has_one_form(url: str) -> None:
    """The scheme's default port and the case of the host make no difference."""
    for encoded in (False, True):
        assert origin_of(URL(url, encoded=encoded)) == ("https", "host", 443)


@pytest.mark.parametrize("url", ["http://host/", "https://host:444/", "https://host.example/", "https://other/"])
def test_other_origins(url: str) -> None:
    """Another scheme, port or host is another origin."""
    assert origin_of(URL(url)) != origin_of(URL("https://host/"))


@pytest.mark.parametrize("headers", [5, "Authorization: secret", [("Authorization", "secret")], {"secret"}])
def test_headers_that_are_no_mapping(headers: Any) -> None:
    """They are refused, not left out in silence; the text does not repeat a secret."""
    with pytest.raises(TypeError, match=r"headers= is a .*: give a mapping, or a function") as caught:
        HttpTransport("http://host/", headers=headers)
    assert "secret" not in str(caught.value)


async def test_origins_without_end() -> None:
    """What is remembered of the origins that redirects name is bounded."""
    transport = HttpTransport("http://host/")
    client = transport._client
    for number in range(2 * _MOST_ORIGINS + 1):
        client._find_proxy(("http", f"host{number}", 80))
        assert 0 < len(client._proxies) <= _MOST_ORIGINS
    await transport.aclose()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n"


@pytest.mark.parametrize("keeps", [True, False], ids=["kept connections", "a connection for each request"])
async def test_requests_grow_with_the_answers(keeps: bool) -> None:
    """A server gets five at a time before its first answer, then more. A cancelled request holds up no other."""
    arrived = answered = 0
    five = asyncio.Event()
    crowds: list[tuple[int, int]] = []  # answers, and new connections without an answer, as each connection comes

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived, answered
        arrived += 1
        crowds.append((answered, arrived - answered))
        if arrived == 5:
            five.set()
        await five.wait()
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
        assert transport._client._granted > 100  # type: ignore[attr-defined]
    assert [each == b"x" for each in found].count(True) == 130
    assert max(crowd for answers, crowd in crowds if not answers) == 5
