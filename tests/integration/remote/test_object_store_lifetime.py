from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncloader.transports import ObjectStoreTransport, Transport, TransportClosed, TransportError
from asyncloader.transports.testing.subject import drain
from tests.helpers.forking import fork
from tests.helpers.http_store import broken
from tests.helpers.object_stores import KEYS, BucketStore, Moto, moto_server, serving_bucket

pytestmark = pytest.mark.network

CONTENT = bytes(range(256)) * (16 << 10)  # 4 MiB
A, B = BucketStore.key("a"), BucketStore.key("b")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with moto_server() as server:
        server.make_bucket("bucket")
        server.put("bucket/root/a", b"data")
        yield server


@pytest_asyncio.fixture
async def store(moto: Moto) -> AsyncIterator[BucketStore]:
    async with serving_bucket() as store:
        store.put(A, CONTENT)
        store.put(B, b"data")
        yield store


def opened(moto: Moto) -> ObjectStoreTransport:
    return ObjectStoreTransport("s3://bucket/root", endpoint=moto.url, config=KEYS)


# ----------------------------------------------------------------------------------- bounds, cancelling, closing


@pytest.mark.parametrize("after", [-1, 1_000_000])
async def test_closing_ends_a_read_that_stalls(store: BucketStore, after: int) -> None:
    """`aclose` does not wait for a store that is silent: the read raises TransportClosed."""
    store.faults[A].append(broken(after, stall=True))
    transport = store.transport(stalled_s=1000)
    reading = asyncio.create_task(transport.read("a"))
    await store.seen(1)
    await asyncio.gather(transport.aclose(), transport.aclose())
    with pytest.raises(TransportClosed, match="s3://bucket/root is closed"):
        await reading


# -------------------------------------------------------------------------------------------------------- forks


def test_a_forked_child_raises_at_once(moto: Moto) -> None:
    """After a request in the parent, every call in the child raises and names the remedy; the parent still reads."""
    transport = opened(moto)
    asyncio.run(transport.read("a"))

    def child() -> None:
        for each in (transport, opened(moto), pickle.loads(pickle.dumps(transport))):
            for call in (
                each.read,
                each.size,
                lambda path, t=each: drain(t.list(path)),
                lambda p, t=each: drain(t.stream(p)),
            ):
                with pytest.raises(TransportError, match=r"forked from one that had already read.*forkserver"):
                    asyncio.run(call("a"))
        asyncio.run(transport.aclose())
        with pytest.raises(TransportClosed):
            asyncio.run(transport.read("a"))

    fork(child).wait()
    assert asyncio.run(transport.read("a")) == b"data"
    asyncio.run(transport.aclose())


def run(program: str, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ENDING = """
import asyncio, sys
from obstore import get_async
from asyncloader.transports import ObjectStoreTransport

async def main():
    transport = ObjectStoreTransport("s3://bucket/root", endpoint=sys.argv[1])
    await transport.size("a")
    async for _ in (await get_async(transport._client.use().objects, "a")).stream(1):
        pass

asyncio.run(main())
"""


@pytest.mark.thorough
async def test_a_program_may_end_behind_its_last_request(store: BucketStore) -> None:
    """obstore's threads still hold Python objects then; one in three such programs aborted while exiting."""
    store.put(A, CONTENT[:100_000])
    for _ in range(8):
        await asyncio.to_thread(run, ENDING, store.url)
    await asyncio.get_running_loop().shutdown_default_executor()


def _read_in_child(transport: Transport) -> None:
    assert asyncio.run(transport.read("a")) == b"data"


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["forkserver"])
def test_children_that_inherit_nothing_read(moto: Moto, method: str) -> None:
    """The error's advice works: such a child gets the transport by pickle and reads."""
    transport = opened(moto)
    asyncio.run(transport.read("a"))
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_read_in_child, args=(transport,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    process.close()
    asyncio.run(transport.aclose())
