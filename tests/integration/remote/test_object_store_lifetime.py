from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncloader.transports import ObjectStoreTransport, RetryPolicy, Transport, TransportClosed, TransportError
from asyncloader.transports.testing.subject import drain
from tests.helpers.forking import fork
from tests.helpers.http_store import broken, read_behind_a_cancelled_one, status
from tests.helpers.object_stores import KEYS, BucketStore, Moto, moto_server, serving_bucket
from tests.unit.transports.forking_programs import FORKED

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


@pytest.mark.thorough
async def test_requests_are_bounded(store: BucketStore) -> None:
    """A hundred reads wait for three slots, and all are served."""
    store.latency_s = 0.001
    async with store.transport(requests=3) as transport:
        assert await asyncio.gather(*(transport.read("b") for _ in range(100))) == [b"data"] * 100
    assert store.most_in_flight == 3
    assert len({asked.peer for asked in store.asked}) <= 3


async def test_an_open_stream_holds_a_slot(store: BucketStore) -> None:
    """With one slot, another read waits until the stream is closed, and is then served."""
    async with store.transport(requests=1) as transport:
        async with aclosing(transport.stream("a", chunk_size=1000)) as chunks:
            await anext(chunks)
            reading = asyncio.create_task(transport.read("b"))
            await asyncio.sleep(0)
            assert len(store.asked) == 1
        assert await reading == b"data"


@pytest.mark.parametrize("after", [-1, 1_000_000])
async def test_a_cancelled_read_gives_its_slot_back(store: BucketStore, after: int) -> None:
    """Cancelled in front of a store that stalls, a read ends at once, and the only slot is free again."""
    store.faults[A].append(broken(after, stall=True))
    async with store.transport(requests=1, stalled_s=1000) as transport:
        assert await read_behind_a_cancelled_one(store, transport, "b") == b"data"
        assert transport.retries.total == 0


async def test_a_stream_cancelled_in_a_wait_can_be_left(store: BucketStore) -> None:
    """The cancelled stream has ended, its slot is free, and the transport remains usable."""
    store.faults[A].append(broken(100_000, stall=True))
    async with store.transport(requests=1, stalled_s=1000) as transport:
        streaming = asyncio.create_task(drain(transport.stream("a", chunk_size=1 << 20)))
        await store.seen(1)
        streaming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await streaming
        assert await transport.read("b") == b"data"


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


async def test_closing_ends_a_back_off(store: BucketStore) -> None:
    """`aclose` does not wait for the next attempt either."""
    store.faults[A].extend([status(503)] * 100)
    transport = store.transport(retry=RetryPolicy(budget_s=10_000, first_delay_s=5000, cap_s=5000))
    reading = asyncio.create_task(transport.read("a"))
    await store.seen(1)
    while not transport.retries.total:  # noqa: ASYNC110 - it has no event, and the loop is about to change it
        await asyncio.sleep(0)
    await transport.aclose()
    with pytest.raises(TransportClosed):
        await reading


async def test_closing_ends_a_listing(store: BucketStore) -> None:
    """A listing whose store is silent ends, too."""
    for key in ["bucket", "bucket/"]:
        store.faults[key].append(broken(-1, stall=True))
    transport = store.transport(stalled_s=1000)
    listing = asyncio.create_task(drain(transport.list()))
    await store.seen(1)
    await transport.aclose()
    with pytest.raises(TransportClosed):
        await listing


async def test_a_foreign_loop_is_refused(store: BucketStore) -> None:
    """While a loop uses a transport another loop cannot; a pickled copy can be used there."""
    async with store.transport() as transport:
        await transport.read("b")
        copy = pickle.loads(pickle.dumps(transport))

        def elsewhere() -> bytes:
            async def run() -> bytes:
                with pytest.raises(TransportError, match="in use by another event loop"):
                    await transport.read("b")
                with pytest.raises(TransportError, match="in use by another event loop"):
                    await transport.aclose()
                async with copy:
                    data: bytes = await copy.read("b")
                    return data

            return asyncio.run(run())

        assert await asyncio.to_thread(elsewhere) == b"data"
        assert await transport.read("b") == b"data"
    await asyncio.get_running_loop().shutdown_default_executor()


def test_loops_one_after_another(moto: Moto) -> None:
    """When a loop has ended, the transport can be used in the next loop."""
    transport = opened(moto)
    for _ in range(2):
        assert asyncio.run(transport.read("a")) == b"data"
    asyncio.run(transport.aclose())


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


async def test_a_child_forked_in_the_middle_of_a_read(moto: Moto) -> None:
    """A child forked from within the loop, with a read in progress, raises, and the parent's read succeeds."""
    async with opened(moto) as transport:
        reading = asyncio.create_task(transport.read("a"))
        await asyncio.sleep(0)

        def child() -> None:
            with pytest.raises(TransportError, match="forked"):
                asyncio.run(transport.read("a"))

        fork(child).wait()
        assert await reading == b"data"


PROGRAM = (
    FORKED
    + """
import asyncio, sys
from asyncloader.transports import ObjectStoreTransport

def read():
    return asyncio.run(transport.read("a"))

def fine():
    assert read() == b"data"
    forked(refused)

def refused():
    try:
        read()
    except Exception as error:
        assert "forkserver" in str(error), error
    else:
        raise AssertionError

transport = ObjectStoreTransport("s3://bucket/root", endpoint=sys.argv[1])
assert "obstore" not in sys.modules
forked(fine)
assert read() == b"data"
forked(refused)
forked(lambda: forked(refused))
"""
)


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


def test_only_a_fork_after_a_request_is_harmful(moto: Moto) -> None:
    """A transport made before a fork works in the child if the parent had read nothing; otherwise the child raises."""
    run(PROGRAM, moto.url)


ENDING = """
import asyncio, sys
from obstore import get_async
from asyncloader.transports import ObjectStoreTransport

async def main():
    transport = ObjectStoreTransport("s3://bucket/root", endpoint=sys.argv[1])
    await transport.size("a")
    async for _ in (await get_async(transport._client.owner.use().objects, "a")).stream(1):
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
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
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
