"""Fake object stores on loopback: a bucket with programmable faults, moto's S3 server, and leak checks."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote
from xml.sax.saxutils import escape

from aiohttp import web

from asyncloader.transports.object_store import ObjectStoreTransport
from asyncloader.transports.retry import RetryPolicy
from tests.helpers.http_store import HttpStore

KEYS = {"access_key_id": "a", "secret_access_key": "b"}
SOON = RetryPolicy(budget_s=60, first_delay_s=0.001, cap_s=0.01)

_BELIEVED = "AWS4-HMAC-SHA256 Credential=a/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=b"

# Reached only by a leak, or on a badly overloaded machine.
GRACE_S = 20.0


class BucketStore(HttpStore):
    """The bucket ``bucket``, whose objects are below ``root/``, by the protocol that S3 and Google share. The keys of
    `faults` and `objects` are whole paths of URLs (`key`). A listing's path is ``bucket``.
    """

    page = 1000

    @staticmethod
    def key(path: str) -> str:
        return f"bucket/root/{path}"

    def answer(self, request: web.Request, path: str) -> web.Response:
        if path.rstrip("/") == "bucket":
            return self.listing(request)
        wanted = request.headers.get("If-Match")
        if wanted is not None and path in self.objects and wanted != self.objects[path].etag:
            return web.Response(status=412, text="<Error><Code>PreconditionFailed</Code></Error>")
        answer = super().answer(request, path)
        answer.headers.setdefault("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        return answer

    def listing(self, request: web.Request) -> web.Response:
        prefix = request.query.get("prefix", "")
        names = sorted(name.removeprefix("bucket/") for name in self.objects)
        names = [name for name in names if name.startswith(prefix)]
        begin = int(request.query.get("continuation-token", "0"))
        end = begin + self.page
        more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < len(names) else ""
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects['bucket/' + name].data)}</Size>"
            "<LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
            for name in reversed(names[begin:end])
        )
        return web.Response(text=f"<ListBucketResult>{entries}{more}</ListBucketResult>")

    def transport(self, scheme: str = "s3", **options: Any) -> ObjectStoreTransport:
        given: dict[str, Any] = {"endpoint": self.url, "skip_signature": True, "retry": SOON, **options}
        return ObjectStoreTransport(f"{scheme}://bucket/root", **given)


Bucket = TypeVar("Bucket", bound=BucketStore)


def serving_bucket() -> AbstractAsyncContextManager[BucketStore]:
    """Run an empty bucket."""
    return serving_store(BucketStore())


@asynccontextmanager
async def serving_store(store: Bucket) -> AsyncGenerator[Bucket]:
    """Run a bucket on a free port; at the end all connections to it are closed, at both ends."""
    app = web.Application(handler_args={"access_log": None}, client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", store.handle)
    before = sockets()
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        store.url = f"http://{host}:{port}"
        yield store
    finally:
        store.ending.set()
        await runner.cleanup()
        await sockets_closed(before)


class Moto(NamedTuple):
    """moto's S3 server, which accepts every signature."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def put(self, key: str, data: bytes) -> None:
        self.ask("PUT", key, data)

    def make_bucket(self, bucket: str) -> None:
        self.ask("PUT", bucket, b"")

    def reset(self) -> None:
        """Drop every bucket; moto keeps the larger objects in open files."""
        self.ask("POST", "moto-api/reset", b"")

    def ask(self, method: str, path: str, data: bytes) -> None:
        connection = http.client.HTTPConnection(self.host, self.port)
        try:
            connection.request(method, "/" + quote(path), body=data, headers={"Authorization": _BELIEVED})
            answer = connection.getresponse()
            answer.read()
            assert answer.status in {200, 204}, (method, path, answer.status)
        finally:
            connection.close()


@contextmanager
def moto_server() -> Generator[Moto]:
    """Run moto's S3 in threads of this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        warm_up()
        yield Moto(host, port)
    finally:
        server.stop()


def warm_up() -> None:
    """Make obstore start its threads, which live as long as the process, before a test is watched for leaks."""
    import obstore
    from obstore.store import MemoryStore

    obstore.list(MemoryStore()).collect()


def sockets() -> int:
    """Return the number of open sockets; 0 where /proc does not exist. A loop may exchange its own for others."""
    found = 0
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the descriptor of this very listing
            found += str(link.readlink()).startswith("socket:")
    return found


async def sockets_closed(before: int) -> None:
    """Wait until no more sockets are open than `before`. obstore's threads close theirs without a notice."""
    deadline = asyncio.get_running_loop().time() + GRACE_S
    while (now := sockets()) > before:
        assert asyncio.get_running_loop().time() < deadline, f"{now} sockets are open, and were {before}"
        await asyncio.sleep(0.001)
