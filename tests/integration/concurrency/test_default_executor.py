"""The loader never waits for the loop's default executor, whose threads the program may keep busy for any time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from asyncloader import AsyncDataLoader, RemoteIterableDataset
from asyncloader.dataloader2 import DataLoader2
from asyncloader.service.node.metrics_endpoint import MetricsEndpoint
from asyncloader.service.protocol.sockets import bind
from asyncloader.transports import open_transport
from tests.helpers.datasets import Numbers, Sized
from tests.helpers.http_store import Stored, serving
from tests.helpers.remote_folders import make_shards
from tests.helpers.running import PATIENCE_S, run_script

pytestmark = pytest.mark.loops


class Refusing(ThreadPoolExecutor):
    """Raises where the program's busy executor would let a call wait."""

    def submit(self, function: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
        raise AssertionError(f"{function} was given to the default executor")


@pytest.fixture
def refusing() -> Callable[[], None]:
    """A function for the test's loop, which afterwards has a default executor that refuses every call."""
    return lambda: asyncio.get_running_loop().set_default_executor(Refusing(1))


@pytest.mark.parametrize("workers", [0, 1])
async def test_no_batch_waits_for_it(workers: int, refusing: Callable[[], None]) -> None:
    """No batch waits for it: small ones, large ones copied while others are kept; nor does the workers' end."""
    refusing()
    for dataset in (Numbers(6), Sized([3 << 20] * 12)):
        async with asyncio.timeout(PATIENCE_S):
            async with AsyncDataLoader[Any](dataset, num_workers=workers) as loader:
                assert len([batch async for batch in loader]) == len(dataset)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "tar", "parquet", "mds"])
async def test_no_shard_waits_for_it(ending: str, tmp_path: Path, refusing: Callable[[], None]) -> None:
    """Listing, indexes, footers and decompression do without it."""
    refusing()
    url = make_shards(tmp_path, (5, 4), ending=ending)
    async with asyncio.timeout(PATIENCE_S):
        async with AsyncDataLoader[Any](RemoteIterableDataset(url), batch_size=None) as loader:
            assert len([sample async for sample in loader]) == 9


@pytest.mark.network
async def test_no_name_waits_for_it(monkeypatch: pytest.MonkeyPatch, refusing: Callable[[], None]) -> None:
    """Looking up a server's name, or the names at which a node and its metrics listen, does without it."""
    refusing()
    names: list[Any] = []
    looks_up = socket.getaddrinfo

    def noted(host: Any, *rest: Any, **options: Any) -> Any:
        names.append(host)
        return looks_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    async with asyncio.timeout(PATIENCE_S), serving() as store:
        store.objects["a"] = Stored(b"data")
        url = store.url.replace("127.0.0.1", "localhost")
        async with open_transport(url) as transport:
            assert await transport.read("a") == b"data"
        assert names == ["localhost"]
        sock, address = await bind("tcp://localhost:0")
        sock.close()
        assert "localhost" not in address
        endpoint = MetricsEndpoint(cast("Any", None))
        await endpoint.listen("localhost:0")
        await endpoint.close()
        assert endpoint.address.startswith("http://")


async def test_dataloader2_ends_without_it(refusing: Callable[[], None]) -> None:
    """DataLoader2 is read and closed by `aclose` without it."""
    refusing()
    loader = DataLoader2[Any](IterableWrapper(range(3)))
    assert [each async for each in loader] == [0, 1, 2]
    async with asyncio.timeout(PATIENCE_S):
        await loader.aclose()


STUCK = """
import asyncio, threading, torch
from asyncloader import AsyncDataLoader

begun = threading.Event()

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        begun.set()
        threading.Event().wait()

async def main():
    waiting = asyncio.ensure_future(anext(aiter(AsyncDataLoader(Stuck()))))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    waiting.cancel()
    await asyncio.wait([waiting])

asyncio.run(main())
print("done")
"""


def test_a_stuck_dataset_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    """A call of the dataset that never returns does not keep the program from exiting."""
    done = run_script(tmp_path, STUCK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
