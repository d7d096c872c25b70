"""A loader's workers on the machines of a Ray cluster: batches are those of local workers, whatever happens there."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Any

import psutil
import pytest
import ray
import torch

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.integrations.ray import RayWorkers
from tests.helpers.comparing import assert_same
from tests.helpers.running import KINDS, PATIENCE_S, run_async
from tests.ray_cluster.datasets import Counting, Noise
from tests.service import definitions

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")  # local ones
OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": 4}


def read(kind: str, dataset: Any, **options: Any) -> list[Any]:
    """Read the batches of two epochs."""
    if kind == "sync":
        with DataLoader[Any](dataset, **options) as loader:
            return [*loader, *loader]

    async def run() -> list[Any]:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            return [*[batch async for batch in loader], *[batch async for batch in loader]]

    return run_async(run(), kind)


def nodes_of(loader: DataLoader[Any], count: int) -> list[str]:
    """Wait until this number of nodes is ready. Returns their addresses."""
    assert len(loader)  # the first question about the dataset starts them
    service: Any = loader.dataset.service  # type: ignore[attr-defined]
    deadline = monotonic() + PATIENCE_S
    while len(found := list(service.addresses)) != count:
        assert monotonic() < deadline, found
    return found


def processes_of(addresses: list[str]) -> list[psutil.Process]:
    """Return the processes that listen at a port of one of these nodes."""
    ports = {int(address.rpartition(":")[2]) for address in addresses if address.startswith("tcp")}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(each.status == "LISTEN" and each.laddr.port in ports for each in process.net_connections("tcp")):
                found.append(process)
    return found


def connected(address: str) -> socket.socket:
    """Connect to a node."""
    if address.startswith("tcp"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)))
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(address.removeprefix("unix:").replace("@", "\0"))
    except BaseException:
        sock.close()
        raise
    return sock


@pytest.fixture(scope="module")
def workers(cluster: Any) -> Iterator[RayWorkers]:
    """Start nodes on all three machines. While a copy exists, they stay for the next loader."""
    with RayWorkers(3, cpus_per_node=1) as made:
        copy = ray.put(made)
        yield made
        del copy


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_local_workers(workers: RayWorkers, kind: str) -> None:
    """Map and iterable datasets, with functions that no node can import, and definitions, which each node imports."""
    shift = 5

    def collate(samples: list[Any]) -> Any:
        return torch.tensor([index + shift for index, _ in samples]), torch.stack([noise for _, noise in samples])

    cases: list[tuple[Any, dict[str, Any]]] = [
        (Noise(60, (3,)), {"collate_fn": collate, "worker_init_fn": lambda worker: torch.rand(worker + 1)}),
        (Counting(), {"shuffle": None}),
        (definitions.drawn(), {}),
    ]
    for dataset, options in cases:
        expected = read(kind, dataset, **OPTIONS | options)
        assert_same(read(kind, dataset, workers=workers, **OPTIONS | options), expected)


def test_ranks_that_are_tasks_of_the_job_use_the_same_nodes(workers: RayWorkers) -> None:
    """Each rank reads its part, and all together read every sample once."""

    def rank(number: int, workers: RayWorkers) -> Any:
        part: Any = torch.utils.data.DistributedSampler(Noise(64), 2, number, seed=1)
        options: dict[str, Any] = OPTIONS | {"shuffle": None, "num_workers": 2, "sampler": part}
        with DataLoader[Any](Noise(64), workers=workers, **options) as loader:
            read = [int(index) for batch in loader for index in batch[0]]
            return read, {*loader.dataset.service.addresses}  # type: ignore[attr-defined]

    task: Any = ray.remote(num_cpus=0)(rank)
    (first, some), (second, others) = ray.get([task.remote(number, workers) for number in range(2)])
    assert sorted(first + second) == list(range(64))
    assert len({*some, *others}) >= 3  # by a network, or without it from the rank's own machine


def test_a_machine_that_is_gone(cluster: Any) -> None:
    """All its processes are killed in mid-epoch: the batches are those of an undisturbed run."""
    dataset = Noise(400, (8,), seconds=0.005)
    expected = list(DataLoader[Any](dataset, **OPTIONS))
    workers = RayWorkers(3, cpus_per_node=1)
    with DataLoader[Any](dataset, workers=workers, max_worker_restarts=0, **OPTIONS) as loader:
        nodes = nodes_of(loader, 3)
        batches = iter(loader)
        got = list(islice(batches, 10))
        victim = processes_of(nodes)[0]
        for process in [victim, *victim.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        got += batches
    assert_same(got, expected)


def test_a_machine_that_comes(cluster: Any) -> None:
    """It is used by the next epoch."""
    workers = RayWorkers(4, cpus_per_node=1)
    with DataLoader[Any](Noise(400, (8,)), workers=workers, **OPTIONS) as loader:
        nodes_of(loader, 3)
        assert len(list(loader)) == 100
        added = cluster.add_node(num_cpus=1)
        try:
            nodes_of(loader, 4)
            assert len(list(loader)) == 100
            delivered = {name for name, count in loader.stats().items() if name.endswith("/batches") and count > 0}
            assert sum(name.startswith("node/") for name in delivered) == 4
        finally:
            cluster.remove_node(added)


@pytest.mark.parametrize("end", ["close", "collection"])
def test_nodes_end_with_their_last_user(cluster: Any, end: str) -> None:
    """The next loader starts new nodes."""
    workers = RayWorkers(1, cpus_per_node=1)
    for _ in range(2):
        loader = DataLoader[Any](Noise(8), workers=workers, **OPTIONS)
        (address,) = nodes_of(loader, 1)
        loader.close()
        connected(address).close()
        del loader
        if end == "close":
            workers.close()
        else:
            workers = RayWorkers(1, cpus_per_node=1)
        deadline = monotonic() + PATIENCE_S
        while True:
            try:
                connected(address).close()
            except ConnectionRefusedError:
                break
            assert monotonic() < deadline


def test_fewer_machines_than_wanted(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The loader runs, and a warning gives the numbers."""
    workers = RayWorkers(9, cpus_per_node=1)
    with DataLoader[Any](Noise(8), workers=workers, **OPTIONS) as loader:
        assert len(list(loader)) == 2
    assert re.search(r"RayWorkers\(nodes=9\): [123] of 9 machines have", caplog.text)
