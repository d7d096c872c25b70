"""Uploads to object stores: broken connections, busy stores, refusals; and whole shards in a bucket."""

from __future__ import annotations

import asyncio
from itertools import count
from urllib.parse import unquote

import pytest
from aiohttp import web

from asyncloader import RemoteIterableDataset, write_shards
from asyncloader.transports import AccessDenied, RetryPolicy, WriteFailed
from asyncloader.transports.object_store_client import PART_BYTES
from tests.helpers.http_store import Asked, Fault, status
from tests.helpers.object_stores import (
    KEYS,
    BucketStore,
    moto_server,
    serving_store,
    sockets,
    sockets_closed,
    warm_up,
)
from tests.integration.remote.test_write_shards import LIMIT, NUMBER, same, sample_of, samples_of

pytestmark = pytest.mark.network


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    warm_up()


DATA = bytes(range(256)) * (PART_BYTES // 100)  # three parts
PATH = BucketStore.key("a")


class UploadStore(BucketStore):
    """A bucket that can be written to, also by multipart uploads."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.numbers = count()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method in ("GET", "HEAD"):
            return await super().handle(request)
        path = unquote(request.rel_url.raw_path[1:])
        self.asked.append(Asked(request.method, path, request.headers.copy(), request.rel_url.raw_query_string, 0))
        if self.faults[path] and (answer := await self.faults[path].popleft()(self, request)) is not None:
            return answer
        data = await request.read()
        query = request.query
        if request.method == "DELETE":
            self.uploads.pop(query.get("uploadId", ""), None)
            if "uploadId" not in query:
                self.objects.pop(path, None)
            return web.Response(status=204)
        if "uploads" in query:
            upload = f"u{next(self.numbers)}"
            self.uploads[upload] = {}
            names = f"<Bucket>bucket</Bucket><Key>{path}</Key><UploadId>{upload}</UploadId>"
            return web.Response(text=f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>")
        if "partNumber" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = data
            return web.Response(headers={"ETag": f'"{query["partNumber"]}"'})
        if "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"])
            self.put(path, b"".join(parts[number] for number in sorted(parts)))
            found = f"<ETag>{self.objects[path].etag}</ETag>"
            return web.Response(text=f"<CompleteMultipartUploadResult>{found}</CompleteMultipartUploadResult>")
        self.put(path, data)
        return web.Response(headers={"ETag": self.objects[path].etag or ""})


async def cut(store: object, request: web.Request) -> web.StreamResponse:
    """Break the connection in the middle of the body."""
    await request.content.read(1000)
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


FAULTS: list[list[Fault]] = [
    [status(503)],
    [cut],
    [status(500), cut, status(429), cut],
]


@pytest.mark.parametrize("size", [1000, len(DATA)])
@pytest.mark.parametrize("faults", FAULTS, ids=["busy", "cut", "several"])
@pytest.mark.parametrize("reached", [False, True])
async def test_a_failed_request_is_sent_again(size: int, faults: list[Fault], reached: bool) -> None:
    """In one request or in parts; before and after the store has answered for the first time."""
    async with serving_store(UploadStore()) as store:
        store.faults[PATH].extend(faults)
        async with store.transport() as transport:
            if reached:
                await transport.write("first", [b""])
            info = await transport.write("a", [DATA[:7], DATA[7:size]])
            assert info == await transport.info("a")
            assert await transport.read("a") == DATA[:size]
        assert not store.faults[PATH]


async def test_a_refused_upload() -> None:
    """It is about writing, and not sent again."""
    async with serving_store(UploadStore()) as store:
        async with store.transport() as transport:
            for size in (10, len(DATA)):
                store.faults[PATH].append(status(403))
                with pytest.raises(AccessDenied, match="no permission for writing 'a'"):
                    await transport.write("a", [DATA[:size]])
            store.faults["bucket"].append(status(403))
            with pytest.raises(AccessDenied, match="no permission for deleting 'a'"):
                await transport.delete("a")
        assert len(store.asked) == 3
        assert not store.objects


async def test_a_store_that_stays_out() -> None:
    """The last failure is raised, and nothing is visible."""
    async with serving_store(UploadStore()) as store:
        store.faults[PATH].extend([status(503)] * 1000)
        retry = RetryPolicy(budget_s=0.1, first_delay_s=0.01, cap_s=0.02)
        async with store.transport(retry=retry) as transport:
            with pytest.raises(WriteFailed, match=r"writing 'a' failed.*503"):
                await transport.write("a", [DATA])
        assert not store.objects


async def test_a_cancelled_upload_is_not_visible() -> None:
    """In the middle of its parts."""
    async with serving_store(UploadStore()) as store:
        parts = asyncio.Event()

        async def hold(_: object, request: web.Request) -> None:
            if "partNumber" in request.query:
                parts.set()
                await store.ending.wait()

        store.faults[PATH].extend([hold] * 4)
        async with store.transport() as transport:
            task = asyncio.create_task(transport.write("a", [DATA]))
            await parts.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not store.objects


async def test_shards_in_a_bucket() -> None:
    """Written, read, continued, and overwritten, by their URLs."""
    before = sockets()
    with moto_server() as moto:
        moto.make_bucket("bucket")
        options = {"endpoint": moto.url, "config": KEYS}
        url = "s3://bucket/some/train-{shard:03d}.mds"
        shards = await write_shards(samples_of("mds"), url, storage_options=options, **LIMIT)
        assert await write_shards(samples_of("mds"), url, storage_options=options, **LIMIT) == shards
        dataset = RemoteIterableDataset("s3://bucket/some/", storage_options=options)
        found = [sample async for sample in dataset]
        assert len(found) == NUMBER
        assert all(same(found[at][name], value) for at in range(NUMBER) for name, value in sample_of("mds", at).items())
        (one,) = await write_shards(samples_of("mds", 3), url, storage_options=options, overwrite=True)
        assert (one.url, one.samples) == ("s3://bucket/some/train-000.mds", 3)
        assert (
            len([sample async for sample in RemoteIterableDataset("s3://bucket/some/", storage_options=options)]) == 3
        )
        moto.reset()
    await sockets_closed(before)
