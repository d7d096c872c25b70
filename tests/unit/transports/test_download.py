from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transports.download import Download, read_blocks
from asyncloader.transports.errors import ReadFailed, TransportError
from asyncloader.transports.network_client import NetworkClient, Scope
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import Attempts, RequestFailed, RetryPolicy

SOON = RetryPolicy(budget_s=60, first_delay_s=1e-6, cap_s=1e-6)


class Answer(NamedTuple):
    """The store's next response: the object's version, and the number of bytes that arrive (None: all).

    A silent response does not name its version. A whole response has the whole object, even if a part was asked for.
    """

    number: int = 0
    breaks_after: int | None = None
    silent: bool = False
    whole: bool = False


class Store:
    """One object, whose bytes all are its version's number, and its responses. The last response is repeated."""

    def __init__(self, size: int, answers: list[Answer], *, proves: bool) -> None:
        self.size = size
        self.answers = answers
        self.proves = proves
        self.asked: list[int] = []

    def content(self, number: int) -> bytes:
        """The bytes of a version: the first half of all versions is equal."""
        return bytes(self.size // 2) + bytes([number]) * (self.size - self.size // 2)

    def ask(self, position: int) -> Answer:
        """Return the next response."""
        self.asked.append(position)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class StoreClient(NetworkClient[Store]):
    """Requests to such a store, which is the client itself."""

    def __init__(self, store: Store, retry: RetryPolicy = SOON) -> None:
        super().__init__("the test's transport", 1, retry)
        self.store = store

    def open_client(self) -> Store:
        """Return the store; nothing needs to be opened."""
        return self.store

    async def close_client(self, client: Store) -> None:
        """Do nothing."""

    @staticmethod
    def leave_to_parent(client: Store) -> object:
        """Return the client, which only has to be kept alive."""
        return client

    def where(self, path: str | None) -> str:
        """A URL for error messages."""
        return f"test://{path or ''}"


class StoreDownload(Download[StoreClient]):
    """Reads the store's responses, three bytes at a time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.answer: Answer | None = None
        self.left: int | None = None
        self.at = 0

    async def _next(self, scope: Scope, most: int) -> bytes:
        store = self._client.use()
        if self._done:
            return b""
        if self.answer is None:
            await self._take_slot()
            first = self._position
            self.answer = store.ask(first)
            self.left = self.answer.breaks_after
            self.at = 0 if self.answer.whole else first
            named = store.proves and not self.answer.silent
            self._check_version(self.at, Version(f'"{self.answer.number}"' if named else None))
            self._end = store.size if self._end is None else self._end
            end = self._asked_end()
            self._until = None if self.answer.whole or end == self._end else end
        assert self._end is not None
        data = b""
        while not data and self._position < self._end:
            await asyncio.sleep(0)
            wanted = min(most or 3, 3, (self._until or self._end) - self.at)
            if self.left is not None:
                if wanted > self.left:
                    raise RequestFailed("broken body", "the connection broke")
                self.left -= wanted
            data = self._drop_skipped(store.content(self.answer.number)[self.at : self.at + wanted])
            self.at += wanted
        self._advance(len(data))
        self._end_response()
        return data

    def _classify_error(self, error: BaseException) -> RequestFailed | None:
        return error if isinstance(error, RequestFailed) else None

    def _drop(self) -> None:
        self.answer = None


@asynccontextmanager
async def client_of(store: Store) -> AsyncGenerator[StoreClient]:
    """A client; checks at the end that it has released its slot."""
    client = StoreClient(store)
    try:
        yield client
        assert not client.slots.locked()
    finally:
        await client.aclose()


def run(store: Store, use: Callable[[StoreClient], Awaitable[bytes]]) -> tuple[bytes, StoreClient]:
    """Use a client of the store in an event loop of its own."""

    async def main() -> tuple[bytes, StoreClient]:
        async with client_of(store) as client:
            return await use(client), client

    return asyncio.run(main())


ANSWERS = st.lists(st.builds(Answer, st.integers(0, 2), st.integers(0, 12), st.booleans(), st.booleans()), max_size=6)
LAST = st.builds(Answer, st.integers(0, 2), st.none(), st.booleans(), st.booleans())


@given(
    st.integers(0, 20), ANSWERS, LAST, st.booleans(), st.booleans(), st.integers(0, 9), st.none() | st.integers(0, 21)
)
def test_bytes_are_of_one_version_or_there_is_an_error(
    size: int, answers: list[Answer], last: Answer, proves: bool, streams: bool, start: int, stop: int | None
) -> None:
    """Whatever breaks and changes, the result is one version as a whole or an error, never a mixture. The bytes may be
    those of two requests, before and behind a stop.
    """
    start = min(start, size)
    store = Store(size, [*answers, last], proves=proves)
    given_out: list[bytes] = []

    async def use(client: StoreClient) -> bytes:
        download = StoreDownload(client, "a", start)
        if not streams:
            return await download.rest()
        download.ask_to(stop)
        while part := await download.part(2):
            given_out.append(part)
        return b"".join(given_out)

    try:
        data, _ = run(store, use)
    except ReadFailed:
        assert answers
        assert any(store.content(number)[start:].startswith(b"".join(given_out)) for number in range(3))
        return
    assert data in {store.content(number)[start:] for number in range(3)}


@given(st.integers(1, 20), st.lists(st.integers(0, 12), max_size=6))
def test_a_proved_download_asks_for_no_byte_twice(size: int, breaks: list[int]) -> None:
    """The download continues where it broke, and counts that; each failure is one retry."""
    store = Store(size, [*(Answer(0, after) for after in breaks), Answer()], proves=True)
    data, client = run(store, lambda client: StoreDownload(client, "a").rest())
    assert data == store.content(0)
    assert store.asked == sorted(store.asked)
    assert client.counts.total == len(store.asked) - 1
    assert client.counts.resumed == sum(position > 0 for position in store.asked)


@pytest.mark.parametrize(("proves", "answer"), [(False, Answer(1, 6)), (True, Answer(1, 6, silent=True))])
async def test_an_unproved_stream_that_breaks(proves: bool, answer: Answer) -> None:
    """Returned bytes cannot be taken back, and nothing proves that the rest is of their version."""
    async with client_of(Store(12, [answer, Answer(1)], proves=proves)) as client:
        download = StoreDownload(client, "a")
        for _ in range(2):
            await download.part(3)
        with pytest.raises(ReadFailed, match=r"the connection broke; the object changed .* or nothing proves"):
            await download.part(3)


@pytest.mark.parametrize(("proves", "asked"), [(True, [2, 7]), (False, [2, 2])])
async def test_bytes_behind_a_stop_are_requested_when_they_are_wanted(proves: bool, asked: list[int]) -> None:
    """The slot is free in between. All are requested at once where nothing would prove that they are of one version."""
    store = Store(12, [Answer(1)], proves=proves)
    async with client_of(store) as client:
        download = StoreDownload(client, "a", 2)
        download.ask_to(7)
        got = b"".join([await download.part(size) for size in (3, 2)])
        assert (got, client.slots.locked()) == (store.content(1)[2:7], not proves)
        while part := await download.part(3):
            got += part
        assert (got, store.asked) == (store.content(1)[2:], asked)
        assert client.counts.total == 0


async def test_an_error_that_is_not_the_stores_is_raised_as_it_is() -> None:
    """The slot is free afterwards."""

    class Buggy(StoreDownload):
        async def _next(self, scope: Scope, most: int) -> bytes:
            await super()._next(scope, most)
            raise ZeroDivisionError

    async with client_of(Store(9, [Answer()], proves=True)) as client:
        with pytest.raises(ZeroDivisionError):
            await Buggy(client, "a").rest()
        assert await StoreDownload(client, "a").rest() == bytes(9)


async def test_a_download_that_waits_for_a_slot_can_be_cancelled() -> None:
    """A download without a slot releases none; a download that is left in the middle releases its own."""
    async with client_of(Store(9, [Answer()], proves=True)) as client:
        first, second = StoreDownload(client, "a"), StoreDownload(client, "a")
        assert await first.part(3) == bytes(3)
        waits = asyncio.create_task(second.rest())
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert client.slots.locked()
        first.close()


async def test_blocks_of_two_versions_are_refused() -> None:
    """Ranges that several requests read are of one version, or an error names the object."""
    async with client_of(Store(9, [Answer(0), Answer(1)], proves=True)) as client:
        downloads = [StoreDownload(client, "a", start, 3) for start in (0, 6)]
        with pytest.raises(ReadFailed, match="'a' changed while it was read") as caught:
            await read_blocks(client, "a", downloads, 2)
        assert caught.value.path == "a"


def test_a_spent_budget_names_the_attempts() -> None:
    """Without retries the first failure is the last, and counts as given up."""

    async def main() -> StoreClient:
        client = StoreClient(Store(9, [Answer(0, 0)], proves=True), RetryPolicy(budget_s=0))
        with pytest.raises(TransportError, match=r"reading 'a' failed: test://a: .*tried once: retries are off"):
            await StoreDownload(client, "a").rest()
        await client.aclose()
        return client

    assert asyncio.run(main()).counts.given_up == 1


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free memory."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_a_read_that_was_retried_keeps_no_bytes() -> None:
    """When a read that broke has returned, only its caller has the bytes: no error's traceback keeps them."""
    async with client_of(Store(3, [Answer(breaks_after=0), Answer()], proves=True)) as client:
        data = await StoreDownload(client, "a").rest()
        mine = bytes(bytearray(3))
        assert sys.getrefcount(data) == sys.getrefcount(mine)


@pytest.mark.usefixtures("no_collector")
async def test_a_final_error_is_freed_with_its_last_use() -> None:
    """An error that names its reason, such as a missing object's, refers to nothing that refers to it."""
    async with client_of(Store(0, [Answer()], proves=True)) as client:
        failed = RequestFailed("status 404", "", retryable=False, final=TransportError("missing"))
        with pytest.raises(TransportError, match="missing") as caught:
            client.judge("a", failed, Attempts(SOON, 0.0), 0.0)
        error = weakref.ref(caught.value)
        del caught
        assert error() is None
