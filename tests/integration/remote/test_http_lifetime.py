from __future__ import annotations

import asyncio
import base64
import gc
import pickle
import shutil
import ssl
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader.transports import (
    AccessDenied,
    InvalidPath,
    ObjectNotFound,
    ReadFailed,
    TransportClosed,
    TransportError,
)
from asyncloader.transports.http import HttpTransport
from asyncloader.transports.retry import RetryPolicy
from asyncloader.transports.testing.subject import drain
from tests.helpers.forking import fork
from tests.helpers.http_store import (
    HttpStore,
    broken,
    read_behind_a_cancelled_one,
    redirect,
    serving,
    status,
)

pytestmark = pytest.mark.network

CONTENT = bytes(range(256)) * 8192
SOON = RetryPolicy(budget_s=60, first_delay_s=0.001, cap_s=0.01)


@pytest_asyncio.fixture
async def store() -> AsyncIterator[HttpStore]:
    async with serving() as store:
        store.put("a", b"data")
        yield store


def opened(store: HttpStore, retry: RetryPolicy = SOON, **options: Any) -> HttpTransport:
    return HttpTransport(store.url, retry=retry, **options)


# ----------------------------------------------------------------------------------- bounds, cancelling, closing


async def test_requests_are_bounded(store: HttpStore) -> None:
    """A hundred reads wait for three slots, and all are served."""
    store.latency_s = 0.001
    async with opened(store, requests=3) as transport:
        assert await asyncio.gather(*(transport.read("a") for _ in range(100))) == [b"data"] * 100
    assert store.most_in_flight == 3
    assert len({asked.peer for asked in store.asked}) <= 3


@pytest.mark.thorough
async def test_waiting_for_a_slot_uses_no_budget_up(store: HttpStore) -> None:
    """Time in the queue does not count towards a read's retry budget."""

    async def slow(store: HttpStore, request: web.Request) -> None:
        await asyncio.sleep(2.0)

    store.put("b", b"other")
    store.put("c", b"c")
    store.faults["a"].append(slow)
    store.faults["b"].append(status(503))
    async with opened(store, RetryPolicy(budget_s=1.5, first_delay_s=0.001), requests=1) as transport:
        assert (await transport.info("c")).size == 1  # the first answer has a budget of its own
        first = asyncio.create_task(transport.read("a"))
        await store.seen(2)
        assert await transport.read("b") == b"other"
        assert await first == b"data"


async def test_a_cancelled_read_gives_its_slot_back(store: HttpStore) -> None:
    """Cancelled in front of a server that stalls, a read ends at once, and the only slot is free again."""
    store.faults["a"].append(broken(-1, stall=True))
    async with opened(store, requests=1, first_byte_s=1000) as transport:
        assert await read_behind_a_cancelled_one(store, transport, "a") == b"data"
        assert transport.retries.total == 0


async def test_a_stream_that_is_left_gives_its_slot_back(store: HttpStore) -> None:
    """The stream's connection is closed, because the rest of the object is still in it."""
    store.put("big", CONTENT)
    async with opened(store, requests=1) as transport:
        async with aclosing(transport.stream("big", chunk_size=10)) as chunks:
            await anext(chunks)
        assert await transport.read("a") == b"data"
    assert len({asked.peer for asked in store.asked}) == 2


async def test_closing_ends_what_waits(store: HttpStore) -> None:
    """Reads that wait for an answer, for a slot or for the next attempt end with TransportClosed, not later."""
    store.faults["a"].append(broken(-1, stall=True))
    store.faults["b"].append(status(503, Retry_After="500"))
    transport = opened(store, requests=2, first_byte_s=1000, retry=RetryPolicy(budget_s=1000))
    reads = [asyncio.create_task(transport.read(path)) for path in ("a", "b")]
    await store.seen(2)
    store.put("c", b"1")
    store.faults["c"].append(broken(-1, stall=True))
    reads += [asyncio.create_task(transport.read("c")) for _ in range(2)]
    await store.seen(3)  # in the slot that "b" left after its answer
    assert transport.retries.total == 1
    await transport.aclose()
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(outcome, TransportClosed), outcome


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning")  # raised in a finalizer, it would keep its subject alive
async def test_a_forked_child_makes_its_own_connections(store: HttpStore) -> None:
    """A transport in use works in a forked child, which does not touch the parent's connection."""

    async def read() -> None:
        async with transport:
            assert await transport.read("a") == b"data"

    def body() -> None:
        gc.collect()
        asyncio.run(read())
        gc.collect()

    async with opened(store) as transport:
        assert await transport.read("a") == b"data"
        child = fork(body)
        await asyncio.to_thread(child.wait)
        assert await transport.read("a") == b"data"
    ours, childs, again = [asked.peer for asked in store.asked]
    assert ours == again != childs


def test_without_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install; constructing the transport needs no aiohttp."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(TransportError, match=r"pip install 'asyncloader\[http\]'"):
        asyncio.run(HttpTransport("http://127.0.0.1:9").read("a"))


# -------------------------------------------------------------------------------------- addresses and authority


@pytest.mark.parametrize(
    "url", ["ftp://host/", "http://", "https:///path", "host/path", "http://host:99999/", "http://h/#x"]
)
def test_malformed_urls(url: str) -> None:
    """A URL that is not http or https is refused when the transport is constructed."""
    with pytest.raises(ValueError, match=r"malformed|not an http|fragment"):
        HttpTransport.from_url(url)


@pytest.mark.parametrize(
    "options", [{"requests": 0}, {"connect_s": 0}, {"first_byte_s": -1}, {"stalled_s": float("nan")}, {"listing": "/a"}]
)
def test_options_out_of_bounds(options: dict[str, Any]) -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match=f"{next(iter(options)) if 'listing' not in options else 'absolute'}"):
        HttpTransport("http://host/", **options)


async def test_secrets_reach_the_server_and_no_text(store: HttpStore) -> None:
    """A password and a query in the URL are sent with each request, and appear in no repr, error or traceback."""
    url = store.url.replace("http://", "http://zaphod:tri%40llian@") + "/dir/?sig=gold%2Fheart"
    store.put("dir/a", b"data")
    store.faults["dir/bad"].append(status(403))
    transport = pickle.loads(pickle.dumps(HttpTransport(url, retry=SOON)))
    async with transport:
        assert await transport.read("a") == b"data"
        texts = [repr(transport)]
        for path in ("missing", "bad"):
            with pytest.raises((ObjectNotFound, AccessDenied)) as caught:
                await transport.read(path)
            texts.append("".join(traceback.format_exception(caught.value)))
    assert store.asked[0].headers["Authorization"] == "Basic " + base64.b64encode(b"zaphod:tri@llian").decode()
    assert store.asked[0].query == "sig=gold%2Fheart"
    for text in texts:
        assert not [secret for secret in ("zaphod", "llian", "heart") if secret in text], text
    assert "/dir/bad?... answered 403" in texts[2]


async def test_headers_are_asked_for_before_every_attempt(store: HttpStore) -> None:
    """A token renewed between two attempts is used by the second attempt, from plain and async functions."""
    store.faults["a"] += [status(503), status(503)]
    tokens = iter(["one", "two", "three", "four"])

    async def later() -> dict[str, str]:
        return {"Authorization": next(tokens)}

    async with opened(store, headers=later) as transport:
        await transport.read("a")
    async with opened(store, headers=lambda: {"Authorization": next(tokens)}) as transport:
        await transport.read("a")
    async with opened(store, headers={"X-Key": "k"}) as transport:
        await transport.read("a")
    assert [asked.headers.get("Authorization") for asked in store.asked] == ["one", "two", "three", "four", None]
    assert store.asked[-1].headers["X-Key"] == "k"


async def test_headers_that_cannot_be_made(store: HttpStore) -> None:
    """An error of the function is a failed read, never a bad sample; it is retried if it is of a network."""
    errors: list[Exception] = [KeyError("token"), FileNotFoundError("token"), ConnectionError("token")]

    def fail() -> dict[str, str]:
        if errors:
            raise errors.pop(0)
        return {}

    async with opened(store, headers=fail) as transport:
        for name in ["KeyError", "FileNotFoundError"]:
            with pytest.raises(ReadFailed, match=f"the function of headers= raised {name}") as caught:
                await transport.read("a")
            assert type(caught.value.__cause__).__name__ == name
        assert await transport.read("a") == b"data"
        assert transport.retries.kinds == {"headers": 1}


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(store: HttpStore, code: int) -> None:
    """A relative or absolute target is requested with the same range; an answer there counts as the object's."""
    store.put("b", b"12345")
    store.faults["a"] += [redirect("/b", code), redirect(f"{store.url}/b?x=%2F", code)]
    async with opened(store) as transport:
        assert await transport.read("a") == b"12345"
        assert await transport.read_range("a", 1, 2) == b"23"
    assert store.asked[-1].range == "bytes=1-2"
    assert store.asked[-1].query == "x=%2F"


@pytest.mark.parametrize("root", ["my data/é", "my%20data/%C3%A9"])
async def test_urls_need_not_be_escaped(store: HttpStore, root: str) -> None:
    """Spaces and letters beyond ASCII reach the server escaped once, in a root, its query, and a redirect."""
    store.put("my data/é/a", b"here")
    store.put("ü b", b"there")
    store.faults["my data/é/a"] += [redirect("/ü b?c=d e"), redirect("/%C3%BC%20b?c=d%20e")]
    async with HttpTransport(f"{store.url}/{root}?q=a%20b ß", retry=SOON) as transport:
        assert await transport.read("a") == await transport.read("a") == b"there"
        assert await transport.read("a") == b"here"
    assert [asked.query for asked in store.asked] == ["q=a%20b%20%C3%9F", "c=d%20e"] * 2 + ["q=a%20b%20%C3%9F"]


async def test_a_redirect_takes_no_authority_elsewhere(store: HttpStore) -> None:
    """Headers are sent along within the origin, and not to another origin."""
    async with serving() as other:
        other.put("b", b"there")
        store.faults["a"] += [redirect("/a"), redirect(f"{other.url}/b")]
        async with opened(store, headers={"Authorization": "secret", "X-Key": "secret"}) as transport:
            assert await transport.read("a") == b"there"
        assert [asked.headers.get("X-Key") for asked in store.asked] == ["secret", "secret"]
        assert "secret" not in other.asked[0].headers.values()


@pytest.mark.parametrize("target", ["ftp://host/x", "file:///etc/passwd", "http://["])
async def test_redirects_to_nowhere(store: HttpStore, target: str) -> None:
    """Only http and https URLs are followed."""
    store.faults["a"].append(redirect(target))
    async with opened(store) as transport:
        with pytest.raises(ReadFailed, match=r"'a'.*redirects to what is no http"):
            await transport.read("a")


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
async def test_hosts_that_nobody_can_have(store: HttpStore, host: str) -> None:
    """Such names cannot be looked up."""
    store.faults["a"].append(redirect(f"http://{host}/b"))
    for root in (store.url, f"http://{host}"):
        async with HttpTransport(root, retry=SOON) as transport:
            with pytest.raises(ReadFailed, match=r"'a'.*has a host that is no legal name"):
                await transport.read("a")
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
async def test_a_certificate_that_nobody_signed(tmp_path: Path) -> None:
    """A server with an invalid certificate gets no request, and no retry."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=127.0.0.1"]
    command = ["openssl", "req", "-x509", *made, "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    async with serving(tls) as store, opened(store) as transport:
        with pytest.raises(ReadFailed, match=r"'a'.*the certificate of 127\.0\.0\.1:[0-9]+ is refused"):
            await transport.read("a")
        assert transport.retries.total == 0
    assert not store.asked


async def test_an_endless_redirect(store: HttpStore) -> None:
    """The eleventh redirect is an error."""
    store.faults["a"].extend([redirect("/a")] * 50)
    async with opened(store) as transport:
        with pytest.raises(ReadFailed, match="redirect number 11"):
            await transport.read("a")
    assert len(store.asked) == 11


async def test_a_proxy_of_the_environment(store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """`http_proxy` is used for hosts that `no_proxy` does not name."""
    monkeypatch.setenv("http_proxy", store.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with opened(store) as direct, HttpTransport("http://nowhere.invalid/", retry=SOON) as proxied:
        assert await direct.read("a") == b"data"
        assert await proxied.read("a") == b"data"
    assert [asked.headers["Host"] for asked in store.asked][1] == "nowhere.invalid"
    monkeypatch.setenv("http_proxy", store.url.removeprefix("http://"))  # as curl takes it
    async with HttpTransport("http://nowhere.invalid/", retry=SOON) as proxied:
        assert await proxied.read("a") == b"data"


async def test_a_host_with_other_letters(store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is asked by the name in ASCII that the domain name system has for it."""
    monkeypatch.setenv("http_proxy", store.url)
    async with HttpTransport("http://Bücher.invalid:8080/", retry=SOON) as transport:
        assert await transport.read("a") == b"data"
    assert store.asked[0].headers["Host"] == "xn--bcher-kva.invalid:8080"


async def test_a_failing_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's response to CONNECT is retryable or not, like a response of the server itself."""
    answers = [b"503 Service Unavailable\r\nRetry-After: 0", b"407 Proxy Authentication Required"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + answers.pop(0) + b"\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as proxy:
        monkeypatch.setenv("https_proxy", "http://{}:{}".format(*proxy.sockets[0].getsockname()))
        async with HttpTransport("https://nowhere.invalid/", retry=SOON) as transport:
            with pytest.raises(ReadFailed, match=r"'a'.*the proxy answered 407 Proxy Authentication Required$"):
                await transport.read("a")
            assert transport.retries.kinds == {"proxy 503": 1}


async def test_the_system_looks_names_up(store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver is used although another is installed, whose errors do not show retryable failures."""
    monkeypatch.setattr("aiohttp.connector.DefaultResolver", None)
    async with HttpTransport(store.url.replace("127.0.0.1", "localhost"), retry=SOON) as transport:
        assert await transport.read("a") == b"data"
    await asyncio.get_running_loop().shutdown_default_executor()


# ------------------------------------------------------------------------------------------------------- listing


async def test_no_listing(store: HttpStore) -> None:
    """Without a listing object the error names the option."""
    async with opened(store) as transport:
        with pytest.raises(TransportError, match=r"cannot be listed.*pass listing="):
            await drain(transport.list())


async def test_a_listing_is_an_object(store: HttpStore) -> None:
    """Lines end by LF or CRLF; empty lines and repeats are skipped; the last line needs no end."""
    store.put("index", b"b/2\r\n\nb/1\na\nb/1\n" + "é".encode())
    async with opened(store, listing="index") as transport:
        assert await drain(transport.list()) == ["a", "b/1", "b/2", "é"]
        assert await drain(transport.list("b/")) == ["b/1", "b/2"]


@pytest.mark.parametrize("line", [b"../up", b"/etc/passwd", b"\xff", b"a//b"])
async def test_a_hostile_listing(store: HttpStore, line: bytes) -> None:
    """A line that is not an object's path is an error."""
    store.put("index", b"a\n" + line + b"\nb\n")
    async with opened(store, listing="index") as transport:
        with pytest.raises(InvalidPath):
            await drain(transport.list())
