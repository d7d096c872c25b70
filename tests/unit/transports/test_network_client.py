from __future__ import annotations

import asyncio
import gc
import os
import weakref

import pytest

from asyncloader.transports.errors import TransportClosed, TransportError
from asyncloader.transports.network_client import NetworkClient
from asyncloader.transports.retry import RetryPolicy
from tests.helpers.forking import fork

pytestmark = pytest.mark.loops


class Client:
    """A client without a network."""

    def __init__(self) -> None:
        self.closed = False
        self.left = False


class Owner(NetworkClient[Client]):
    """Owns such clients, and records the clients that it opened."""

    def __init__(self, requests: int = 1) -> None:
        super().__init__("the test's transport", requests, RetryPolicy())
        self.opened: list[Client] = []
        self.refuses = False

    def where(self, path: str | None) -> str:
        """A URL for error messages."""
        return f"test://{path or ''}"

    def open_client(self) -> Client:
        """Open a client; raise an error while `refuses` is set."""
        if self.refuses:
            raise TransportError("none can be made")
        self.opened.append(Client())
        return self.opened[-1]

    async def close_client(self, client: Client) -> None:
        """Close it after one turn of the loop."""
        await asyncio.sleep(0)
        client.closed = True

    @staticmethod
    def leave_to_parent(client: Client) -> object:
        """Record it on the client."""
        client.left = True
        return client


async def wait_for_ever(owner: Owner, entered: asyncio.Event, limit: float | None = None) -> None:
    async with owner.scope() as scope:
        scope.limit(limit)
        entered.set()
        await asyncio.get_running_loop().create_future()


async def waiting(owner: Owner, limit: float | None = None) -> asyncio.Task[None]:
    """A call that is in progress, and ends only by its limit or by the owner."""
    entered = asyncio.Event()
    task = asyncio.create_task(wait_for_ever(owner, entered, limit))
    await entered.wait()
    return task


def test_the_next_loop_gets_a_client_and_slots_of_its_own() -> None:
    """Slots and calls of a loop that has ended are not counted."""
    owner = Owner(requests=1)

    async def hold() -> tuple[Client, asyncio.Semaphore]:
        await owner.scope().__aenter__()  # is never left
        await owner.slots.acquire()  # is never released
        return owner.use(), owner.slots

    first, slots = asyncio.run(hold())

    async def go_on() -> None:
        assert owner.use() is not first
        assert owner.slots is not slots
        assert not owner.slots.locked()
        await owner.aclose()

    asyncio.run(go_on())
    assert [client.closed for client in owner.opened] == [False, True]


async def test_another_loop_is_refused_while_the_first_is_open() -> None:
    """Neither use nor close is allowed from another thread's loop; the first loop can continue."""
    owner = Owner()
    client = owner.use()

    async def elsewhere() -> None:
        with pytest.raises(TransportError, match="the test's transport is in use by another event loop"):
            owner.use()
        with pytest.raises(TransportError, match="in use by another event loop"):
            await owner.aclose()

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert owner.use() is client
    await owner.aclose()
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_each_call_has_its_own_limit() -> None:
    """Each call ends by its own time-out, in any order; a call without a time-out continues."""
    owner = Owner()
    stays = await waiting(owner, None)
    calls = [await waiting(owner, seconds) for seconds in (0.03, 0.01, 0.02, 0.01)]
    async with owner.scope() as scope:
        scope.limit(0.001)
        scope.limit(None)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, TimeoutError)
    assert not stays.done()
    await owner.aclose()
    with pytest.raises(TransportClosed):
        await stays


async def test_closing_ends_the_calls_and_then_closes_once() -> None:
    """The client is closed after the last call, for all concurrent callers of `aclose`."""
    owner = Owner()
    client = owner.use()
    seen: list[bool] = []

    async def call() -> None:
        async with owner.scope():
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0)
                seen.append(client.closed)

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.gather(owner.aclose(), owner.aclose())
    assert seen == [False] * 3
    assert client.closed
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, TransportClosed)
    with pytest.raises(TransportClosed, match="the test's transport is closed; open another transport"):
        owner.use()
    await owner.aclose()


async def test_a_cancelled_caller_leaves_the_closing_to_the_others() -> None:
    """The client is closed even if the first caller was cancelled."""
    owner = Owner()
    client = owner.use()
    first, second = (asyncio.create_task(owner.aclose()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert client.closed
    assert first.cancelled()


async def test_closing_begins_again_when_all_tasks_were_cancelled() -> None:
    """A program that cancels every task of the loop, including the closing task, can close afterwards."""
    owner = Owner()
    client = owner.use()
    closing = asyncio.create_task(owner.aclose())
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not client.closed
    await owner.aclose()
    assert client.closed


def test_a_forked_child_leaves_the_parents_client_alone() -> None:
    """The child neither uses, closes nor garbage-collects it; in the parent it continues to work."""
    owner = Owner()
    loop = asyncio.new_event_loop()

    async def use() -> Client:
        return owner.use()

    clients = [loop.run_until_complete(use())]  # with this list and the owner's emptied, no reference is left

    def child() -> None:
        assert clients[0].left
        assert asyncio.run(use()) is not clients[0]
        inherited = weakref.ref(clients[0])
        clients.clear()
        owner.opened.clear()
        gc.collect()
        asyncio.run(owner.aclose())
        kept = inherited()
        assert kept is not None
        assert not kept.closed

    fork(child).wait()
    assert not clients[0].left
    assert loop.run_until_complete(use()) is clients[0]
    loop.run_until_complete(owner.aclose())
    loop.close()


def test_a_child_with_its_parents_pid_knows_that_it_was_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pid namespace of its own a child can have the same pid: the fork itself is detected."""
    owner = Owner()
    pid = os.getpid()

    async def use() -> Client:
        return owner.use()

    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(use())

    def child() -> None:
        monkeypatch.setattr(os, "getpid", lambda: pid)
        assert asyncio.run(use()) is not client

    fork(child).wait()
    loop.run_until_complete(owner.aclose())
    loop.close()
