from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader.transports import (
    AccessDenied,
    InvalidPath,
    ObjectNotFound,
    ObjectStoreTransport,
    ObjectTooLarge,
    RangeOutOfBounds,
    ReadFailed,
    RetryPolicy,
    Transport,
)
from asyncloader.transports.testing.subject import drain
from tests.helpers.http_store import Fault, HttpStore, broken, change, status
from tests.helpers.object_stores import SOON, BucketStore, serving_bucket, warm_up

pytestmark = pytest.mark.network

CONTENT = bytes(range(256)) * (16 << 10)  # 4 MiB
A = BucketStore.key("a")
ONCE = RetryPolicy(budget_s=0)


async def usual(store: HttpStore, request: web.Request) -> None:
    """No fault."""


@pytest.fixture(scope="module", autouse=True)
def obstore_threads() -> None:
    warm_up()


@pytest_asyncio.fixture
async def store() -> AsyncIterator[BucketStore]:
    async with serving_bucket() as store:
        store.put(A, CONTENT)
        yield store


# ------------------------------------------------------------------------------------------- retryable failures


@pytest.mark.parametrize("code", [429, 503])
async def test_answers_that_say_not_now_are_asked_again(store: BucketStore, code: int) -> None:
    """The read succeeds as soon as the store answers, and each retry is counted by its cause."""
    store.faults[A].extend([status(code), status(code)])
    async with store.transport() as transport:
        assert await transport.read("a") == CONTENT
        assert transport.retries.snapshot() | {"waited_s": 0} == {
            "retries": 2,
            "kinds": {f"status {code}": 2},
            "resumed": 0,
            "given_up": 0,
            "waited_s": 0,
        }


async def test_a_connection_that_breaks_before_the_answer_is_made_again(store: BucketStore) -> None:
    """A reset before the first byte is retryable."""
    store.faults[A].append(broken(-1))
    async with store.transport() as transport:
        assert await transport.read_range("a", 1, 2) == CONTENT[1:3]
        assert transport.retries.kinds == {"store": 1}


async def test_a_broken_download_goes_on_where_it_broke(store: BucketStore) -> None:
    """The next request names the missing bytes and the version that they must have."""
    store.faults[A].append(broken(3_000_000))
    async with store.transport() as transport:
        assert await transport.read("a") == CONTENT
        assert (transport.retries.total, transport.retries.resumed) == (1, 1)
    _, second = store.asked
    first, last = (int(each) for each in (second.range or "").removeprefix("bytes=").split("-"))
    assert 0 < first <= 3_000_000
    assert last == len(CONTENT) - 1
    assert second.headers["If-Match"] == store.objects[A].etag


async def test_bytes_behind_a_stop_are_asked_for_when_they_are_wanted(store: BucketStore) -> None:
    """By a request of their own, which names the version; also after a break before the stop."""
    store.faults[A].append(broken(200_000))
    async with store.transport() as transport:
        async with aclosing(transport.pinned("a").stream(start=5, stop=700_000, chunk_size=100_000)) as chunks:
            data = b""
            while len(data) < 699_995:
                data += await anext(chunks)
            assert {(asked.range or "").partition("-")[2] for asked in store.asked} == {"699999"}
            data += b"".join(await drain(chunks))
        assert data == CONTENT[5:]
        assert store.asked[-1].range == f"bytes=700000-{len(CONTENT) - 1}"
        assert store.asked[-1].headers["If-Match"] == store.objects[A].etag


@pytest.mark.parametrize("after", [-1, 0, 1_000_000])
async def test_a_store_that_stalls_is_asked_again(store: BucketStore, after: int) -> None:
    """Silence before the head, after it and in the middle of the body ends after `stalled_s`."""
    store.faults[A].append(broken(after, stall=True))
    async with store.transport(stalled_s=0.2) as transport:
        assert await transport.read("a") == CONTENT
        assert transport.retries.total == 1


async def test_the_budget_ends(store: BucketStore) -> None:
    """A long outage is an error with path, root, status and number of attempts; the original error is its cause."""
    store.faults[A].extend([status(503)] * 1000)
    policy = RetryPolicy(budget_s=0.3, first_delay_s=0.01, cap_s=0.05)
    async with store.transport(retry=policy) as transport:
        with pytest.raises(ReadFailed, match=r"'a'.*s3://bucket/root: .*503.*no progress for 0.3 s") as caught:
            await transport.read("a")
        assert caught.value.path == "a"
        assert type(caught.value.__cause__).__module__ == "obstore.exceptions"
        assert transport.retries.given_up == 1
        assert transport.retries.total >= 2


async def test_no_budget_means_one_request(store: BucketStore) -> None:
    """obstore makes no attempts of its own on top of the policy's."""
    store.faults[A].extend([status(503)] * 5)
    async with store.transport(retry=ONCE) as transport:
        with pytest.raises(ReadFailed, match="retries are off"):
            await transport.read("a")
    assert len(store.asked) == 1


# --------------------------------------------------------------------------------------- other failures


@pytest.mark.parametrize(
    ("code", "error"),
    [(400, ReadFailed), (401, AccessDenied), (403, AccessDenied), (404, ObjectNotFound), (501, ReadFailed)],
)
async def test_answers_about_the_request_itself_fail_at_once(
    store: BucketStore, code: int, error: type[Exception]
) -> None:
    """One request; the text names the path, the root and the status."""
    store.faults[A].append(status(code))
    async with store.transport() as transport:
        with pytest.raises(error, match=rf"'a'.*s3://bucket/root.*{code}"):
            await transport.read("a")
        assert transport.retries.total == 0
    assert len(store.asked) == 1


def ignore_conditions(data: bytes) -> Fault:
    """Send another version of the object, although the old version was requested."""

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        store.put(A, data)
        first = int(request.headers["Range"].removeprefix("bytes=").partition("-")[0])
        span = f"bytes {first}-{len(data) - 1}/{len(data)}"
        headers = {"ETag": store.objects[A].etag or "", "Content-Range": span}
        return web.Response(status=206, body=data[first:], headers=headers)

    return fault


@pytest.mark.parametrize("second", [change(CONTENT[::-1]), ignore_conditions(CONTENT[::-1])], ids=["412", "206"])
async def test_an_object_that_changes_is_an_error(store: BucketStore, second: Fault) -> None:
    """Bytes of two versions are never mixed, also by a store that ignores If-Match."""
    store.faults[A].extend([broken(2_000_000), second])
    given: list[bytes] = []

    async def take(transport: Transport) -> None:
        async with aclosing(transport.stream("a", chunk_size=50_000)) as chunks:
            async for chunk in chunks:
                given.append(chunk)  # noqa: PERF401 - it has to have what came before the error

    async with store.transport() as transport:
        with pytest.raises(ReadFailed, match=r"'a'.*the object changed while it was read") as caught:
            await take(transport)
        assert caught.value.path == "a"
        assert CONTENT.startswith(b"".join(given))
        assert await transport.read("a") == CONTENT[::-1]


async def test_a_weak_etag_proves_nothing(store: BucketStore) -> None:
    """Without a strong ETag a read begins again, and a stream that breaks is an error; `info` has no version."""
    store.put(A, CONTENT, etag='W/"1"')
    store.faults[A].extend([broken(2_000_000), broken(2_000_000)])
    async with store.transport() as transport:
        assert (await transport.read_with_info("a")) == (CONTENT, (len(CONTENT), None))
        assert transport.retries.resumed == 0
        store.faults[A].append(broken(2_000_000))
        with pytest.raises(ReadFailed, match="nothing proves"):
            await drain(transport.stream("a", chunk_size=50_000))
        assert (await transport.info("a")).etag is None


async def test_a_body_that_is_longer_than_its_head_states(store: BucketStore) -> None:
    """Only the bytes that were asked for are returned."""

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        stated = {"Content-Range": "bytes 1-4/5", "ETag": '"1"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        return web.Response(status=206, headers=stated, body=b"1234567890")

    store.faults[A].extend([fault, fault])
    async with store.transport() as transport:
        assert await transport.read_range("a", 1, 4) == b"1234"
        assert b"".join(await drain(transport.stream("a", start=1))) == b"1234"


async def test_large_objects_are_refused_by_their_head(store: BucketStore) -> None:
    """The size is known before the bytes arrive; the connection is dropped even while the error is kept."""
    async with store.transport() as transport:
        with pytest.raises(ObjectTooLarge) as caught:
            await transport.read("a", max_bytes=1000)
        assert caught.value.size == len(CONTENT)
        with pytest.raises(RangeOutOfBounds) as other:
            await transport.read_range("a", 5, len(CONTENT))
        assert other.value.size == len(CONTENT)


# ------------------------------------------------------------------------------------------- other stores


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs"])
async def test_stores_of_one_protocol(store: BucketStore, scheme: str) -> None:
    """Amazon's and Google's stores are read and listed in the same way."""
    async with store.transport(scheme) as transport:
        assert await transport.read_range("a", 255, 3) == CONTENT[255:258]
        assert (await transport.info("a")).etag == store.objects[A].etag
        assert await drain(transport.list()) == ["a"]


@pytest.mark.parametrize(
    "url", ["az://bucket/root", "azure://bucket/root", "abfss://bucket@acme.dfs.core.windows.net/root"]
)
async def test_azure(store: BucketStore, url: str) -> None:
    """Azure's store is read by the container in the URL, and the account there or in the configuration."""
    options: dict[str, Any] = {
        "endpoint": store.url,
        "skip_signature": True,
        "retry": SOON,
        "config": {} if "@" in url else {"account_name": "acme"},
    }
    async with ObjectStoreTransport(url, **options) as transport:
        assert await transport.read("a") == CONTENT
        assert await transport.size("a") == len(CONTENT)
        with pytest.raises(ObjectNotFound, match=f"'b' does not exist in {url}: "):
            await transport.read("b")


# ----------------------------------------------------------------------------------------------- listings


async def test_listing_in_pages_survives_failures(store: BucketStore) -> None:
    """Pages arrive in any order and fail in between; all paths are listed, sorted, each once."""
    store.page = 7
    names = [f"{number % 10}/{number:03}" for number in range(100)]
    for name in names:
        store.put(BucketStore.key(name), b"1")
    for key in ["bucket", "bucket/"]:
        store.faults[key].extend([usual, status(503), usual, broken(-1), usual])
    async with store.transport() as transport:
        assert await drain(transport.list()) == sorted([*names, "a"])
        assert await drain(transport.list("3/01")) == ["3/013"]


async def test_folders_of_a_console_are_not_listed(store: BucketStore) -> None:
    """An empty object that is the folder of another is not listed; other empty objects are."""
    for name, data in {"dir/": b"", "dir/x": b"1", "empty": b"", "e.txt/y": b""}.items():
        store.put(BucketStore.key(name), data)
    async with store.transport() as transport:
        listed = await drain(transport.list())
        assert listed == ["a", "dir/x", "e.txt/y", "empty"]
        for path in listed:
            await transport.read(path)


async def test_names_that_are_no_paths(store: BucketStore) -> None:
    """A name that obstore cannot hold ends a listing with an error that has the name; a prefix without it is listed."""
    store.put(BucketStore.key("x//y"), b"1")
    store.put(BucketStore.key("z/1"), b"1")
    async with store.transport() as transport:
        with pytest.raises(InvalidPath, match=r"x//y.*open the transport at a prefix without it"):
            await drain(transport.list())
        assert await drain(transport.list("z/")) == ["z/1"]


async def test_listing_a_bucket_that_does_not_exist(store: BucketStore) -> None:
    """A wrong bucket name is an error, not an empty listing."""
    for key in ["bucket", "bucket/"]:
        store.faults[key].append(status(404))
    async with store.transport() as transport:
        with pytest.raises(ObjectNotFound, match="the listing does not exist in s3://bucket/root") as caught:
            await drain(transport.list())
        assert caught.value.path is None
