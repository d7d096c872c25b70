"""The connections of one process take turns, and a node describes its dataset."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from asyncloader import Mixture, RemoteIterableDataset
from asyncloader.service.node import worker_host
from asyncloader.service.node.hosted_connection import (
    ConnectionChannel,
    ConnectionLoop,
    ConnectionSetup,
    HostedConnection,
    dataset_info_of,
)
from asyncloader.service.node.worker_host import _CurrentInfo, _Host
from asyncloader.service.protocol.definition import Made
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.service.protocol.records import DatasetInfo
from asyncloader.service.protocol.shard_plan import PlanRequest
from asyncloader.telemetry.counters import CONNECTION_KEY, Recorder, total
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import channel_pair
from tests.helpers.running import PATIENCE_S
from tests.service import definitions


def connection(number: int, loader: str) -> Any:
    made = object.__new__(HostedConnection)
    made.loader, made._frames, made._queued = loader, deque([(1, b"")] * 100), 0
    made.channel = SimpleNamespace(fileno=lambda: number, full=False)  # type: ignore[assignment]
    return made


def test_loaders_have_equal_time() -> None:
    """Loaders share time equally, however many connections they have; a late loader gets its share from then on."""
    host: Any = _Host(None, None, None, None, DatasetInfo())  # type: ignore[arg-type]
    for number in range(8):
        host._add(connection(number, "large"))
    turns: Counter[str] = Counter()

    def take(times: int) -> None:
        for _ in range(times):
            chosen = host._next()
            chosen.take()
            host._used[chosen.loader] += 2.0 if chosen.loader == "slow" else 1.0
            turns[chosen.loader] += 1

    take(40)
    host._add(connection(8, "small"))
    host._add(connection(9, "slow"))
    take(50)
    assert turns["large"] == 40 + 20
    assert turns["small"] == 20
    assert turns["slow"] == 10
    for each in host._connections.values():
        each._frames.clear()
    assert host._next() is None


SETUP = WorkerSetup(
    *(None, True, True, 4, list, False, 0, None, 2, 1, (), 0),
    seeded=SeededSetup(0, 1, 0, seed_collate=False),
)


class Divided(IterableDataset[int]):
    """A dataset whose length is that of a worker's part."""

    def __len__(self) -> int:
        info = get_worker_info()
        return 100 if info is None else 100 // info.num_workers

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


async def _unasked() -> None:
    raise AssertionError("only fixed streams are counted")


def test_a_connection_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection's dataset is compared with the node's outside of any worker, where the node's was described."""
    monkeypatch.setattr(torch_worker, "_worker_info", SimpleNamespace(num_workers=2))
    start = MSGPACK.dumps(tuple(EpochStart()))
    asked = SimpleNamespace(setup=SETUP, start=start, worker=0, catalog=None)
    opening: Any = SimpleNamespace(info=DatasetInfo(iterable=True, length=100), asked=asked)
    setup = ConnectionSetup(opening, definitions.numbers(), Made(Divided(), {}), _unasked).load()
    assert len(setup.dataset) == 100


@pytest.mark.loops
async def test_a_loader_that_hangs_up_behind_its_frames() -> None:
    """Its end is read with them: of a socket that was closed with bytes unread, uvloop calls the reader only once."""
    ours, theirs = channel_pair()
    theirs.setblocking(False)
    theirs.send(b"an answer that is not read")
    ours.send(wire.pack(wire.ASSIGNMENT, b""))
    ours.close()
    taken: list[int] = []
    channel = ConnectionChannel(theirs, asyncio.get_running_loop())
    runner = SimpleNamespace(
        channel=channel, opens=False, stopped=False, control=lambda kind, _: taken.append(kind), close=_nothing
    )
    async with asyncio.timeout(PATIENCE_S):
        await ConnectionLoop(SimpleNamespace(channel=channel, runner=runner), taken.append).run()  # type: ignore[arg-type]
    assert taken == [wire.ASSIGNMENT]
    channel.close()


async def _nothing() -> None:
    pass


def test_a_connection_whose_start_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node reads whose start it was, as of a task: `worker_init_fn` may exit, or hang."""
    ours, theirs = channel_pair()
    recorder = Recorder()
    host: Any = _Host(SimpleNamespace(take_fd=theirs.detach), recorder, None, None, DatasetInfo())  # type: ignore[arg-type]
    runner = Mock(side_effect=SystemExit)
    monkeypatch.setattr(worker_host, "TaskRunner", runner)
    with pytest.raises(SystemExit):
        host._open(SimpleNamespace(number=7, asked=SimpleNamespace(worker=0)))
    assert total(recorder.block, CONNECTION_KEY) == 7
    runner.call_args.args[1].close()
    ours.close()


async def test_a_plan_beside_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset that makes plans is made outside of any worker, too: no connection's info is current then."""
    current = _CurrentInfo()
    monkeypatch.setattr(torch_worker, "_worker_info", current)
    seen: list[Any] = []

    def make() -> Made:
        seen.append(get_worker_info())
        raise OSError("no disk")

    channel: Any = SimpleNamespace(send_all=lambda frame: seen.append(b"no disk" in frame))
    defined: Any = SimpleNamespace(make=make)
    host: Any = _Host(channel, None, defined, None, DatasetInfo())  # type: ignore[arg-type]
    await host._plan(1, PlanRequest(1, 0, 1, None, False, ""))
    assert seen == [None, True]
    assert get_worker_info() is current  # type: ignore[comparison-overlap]


def test_what_a_loader_must_know() -> None:
    """Kind, length and state are described; or the reason why the dataset cannot be served."""
    for defined, expected in [
        (definitions.numbers(), DatasetInfo(False, 40, False, False)),
        (definitions.awaited(), DatasetInfo(False, 40, True, False)),
        (definitions.stream(), DatasetInfo(True, None, False, True)),
        (definitions.async_stream(), DatasetInfo(True, None, True, False)),
    ]:
        assert dataset_info_of(defined.make().dataset) == expected
    assert "has no length" in dataset_info_of(definitions.endless().make().dataset).problem
    numbers = definitions.numbers().make().dataset
    assert "a service cannot read a Mixture" in dataset_info_of(Mixture([numbers, numbers], [1, 2])).problem
    several = definitions.stream().make().dataset
    several.loader_streams = 2
    assert "a service cannot read a Stream, which has loader_streams" in dataset_info_of(several).problem
    # The store is not asked yet.
    assert dataset_info_of(RemoteIterableDataset("none.tar", shuffle_buffer=7)) == DatasetInfo(
        True, None, True, False, 7
    )
    assert dataset_info_of(RemoteIterableDataset("none.tar", shuffle_buffer=7, streams=2)) == DatasetInfo(
        True, None, True, False, 7, "", 2, True
    )
