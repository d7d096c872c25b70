"""A store that has never answered: little time for all attempts, one line in the log, and an error that helps."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, Dataset
from asyncloader.transports import HttpTransport, ReadFailed, RetryPolicy, network_client

pytestmark = pytest.mark.network

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


@contextmanager
def silent() -> Generator[tuple[socket.socket, int]]:
    """A socket that does not listen, and its port, which no other process can take as long as the socket is open."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock, int(sock.getsockname()[1])


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(ANSWER)
    await writer.drain()
    writer.close()


PATIENT = RetryPolicy(first_delay_s=0.01, cap_s=0.02)


class Told(logging.Handler):
    """Keeps the log's lines, and the result of `look` at each line; `event` is set with each line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.event = asyncio.Event()
        self.look: Callable[[], str] = str
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.look())
        self.lines.append(f"{record.levelname} {record.getMessage()}")
        self.event.set()


async def test_a_wrong_address_is_told_soon() -> None:
    """The error has host, cause, attempts and option."""
    retry = RetryPolicy(first_contact_s=0.3, first_delay_s=0.01, cap_s=0.02)
    with silent() as (_, port):
        url = f"http://127.0.0.1:{port}"
        async with HttpTransport(url, retry=retry) as transport:
            with pytest.raises(ReadFailed) as caught:
                await transport.read("a")
    words = re.escape(f"{url}/a: no connection to {url.removeprefix('http://')}: Connect call failed")
    end = r"no answer at all within 0\.3 s\. Is the address right\? RetryPolicy\(first_contact_s=\) is how .*"
    found = re.search(rf"{words}.*tried (\d+) times: {end}", str(caught.value))
    assert found
    assert int(found[1]) > 2


@pytest.fixture
def told() -> Iterator[Told]:
    handler, log = Told(), logging.getLogger("asyncloader")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


async def test_a_store_that_comes_back_is_told(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line when the store has not answered for some seconds, a line when it answers, and none in a healthy run."""
    monkeypatch.setattr(network_client, "_SILENT_S", -1.0)
    with silent() as (sock, port):
        root = f"http://127.0.0.1:{port}"
        async with HttpTransport(root, retry=PATIENT) as transport:
            reading = asyncio.ensure_future(transport.read("a"))
            await told.event.wait()
            async with await asyncio.start_server(answer, sock=sock):
                assert await reading == b"hi"
                assert await transport.read("a") == b"hi"
    assert len(told.lines) == 2
    assert told.lines[0].startswith(f"WARNING {root} has not answered for ")
    assert told.lines[0].endswith("; it is tried for 15 s, then the read fails")
    assert told.lines[1] == f"WARNING {root} answers again"


class Objects(Dataset[Any]):
    """Three objects of a store, one for each worker."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __len__(self) -> int:
        return 3

    async def __aenter__(self) -> None:
        self.transport = HttpTransport(self.url, retry=PATIENT)

    async def __aexit__(self, *_: object) -> None:
        await self.transport.aclose()

    async def __getitem__(self, index: int) -> int:
        return len(await self.transport.read(str(index)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
async def test_what_three_workers_see_is_told_once(told: Told, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process logs it, however the workers were started."""
    monkeypatch.setattr(network_client, "_SILENT_S", -1.0)
    asked: Counter[bytes] = Counter()

    async def down_at_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked[(await reader.readuntil(b"\r\n\r\n")).split()[1]] += 1
        up = len(asked) == 3 and min(asked.values()) > 1  # by then each worker has reported the silence
        writer.write(ANSWER if up else b"HTTP/1.1 503 Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(down_at_first, "127.0.0.1", 0) as server:
        root = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options: dict[str, Any] = {"num_workers": 3, "multiprocessing_context": method, "worker_init_fn": impatient}
        async with AsyncDataLoader(Objects(root), **options) as loader:
            told.look = loader.explain
            assert [batch.tolist() async for batch in loader] == [[2]] * 3
            assert "waiting: " not in loader.explain()
    # On a busy machine the log also reports how the time to the first batch was spent.
    (down, seen), (up, _) = [each for each in zip(told.lines, told.seen, strict=True) if root in each[0]]
    assert down.startswith(f"WARNING {root} has not answered for ")
    assert up == f"WARNING {root} answers again"
    assert f"\nwaiting: {root} does not answer\n" in seen
    assert "\nwaiting: for a batch, for " in seen


def impatient(worker: int) -> None:
    """Apply the test's change: a worker that is not forked does not have it."""
    network_client._SILENT_S = -1.0
