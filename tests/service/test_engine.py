"""Workers at the nodes of an engine: any dataset, nodes that leave in mid-epoch, and their end.

The engine here starts its nodes on this machine, with the class that a cluster's agents use.
"""

from __future__ import annotations

import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import DataLoader, Service
from asyncloader.service.node import agent
from asyncloader.service.node.agent import AgentNode
from asyncloader.service.protocol.definition import PickledDefinition
from tests import script_server
from tests.helpers.comparing import assert_same
from tests.service import definitions

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")  # local ones
OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 4, "max_worker_restarts": 0}


class LocalEngine:
    """Nodes on this machine, with one process each."""

    def __init__(self, nodes: int, *, unix: bool = False) -> None:
        self._token = secrets.token_hex(16)
        self._unix = unix
        self._nodes = [AgentNode("127.0.0.1", 1, (self._token, None, None, None)) for _ in range(nodes)]

    def serve(self, definition: PickledDefinition) -> Service:
        for node in self._nodes:
            node.serve(definition.data)
        return Service(",".join(self.addresses), self._token)

    @property
    def addresses(self) -> list[str]:
        return [node.addresses[self._unix] for node in self._nodes]

    def kill(self, number: int) -> None:
        """Kill a node and its processes without notice, as when a machine fails."""
        node = self._nodes.pop(number)
        for process in [psutil.Process(node.process.pid), *psutil.Process(node.process.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.close()

    def close(self) -> None:
        for node in self._nodes:
            node.close()


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with_two = LocalEngine(2)
    yield with_two
    with_two.close()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork nodes from a process that has imported torch; without this fixture they are new interpreters."""
    names = {"Popen": script_server.Forked, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(agent, "subprocess", SimpleNamespace(**names))


class Noise(Dataset[Any]):
    """Indices and random numbers."""

    def __init__(self, length: int = 40, seconds: float = 0.0) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return index, torch.rand(3)


class Counting(IterableDataset[Any]):
    """A stream, of which each worker reads its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id, 50, info.num_workers)


def at_nodes(loader: DataLoader[Any]) -> dict[str, float]:
    """Return the number of workers at each node."""
    ending = "/workers"
    return {name.removesuffix(ending)[5:]: n for name, n in loader.stats().items() if name.endswith(ending)}


def test_any_dataset_and_functions_travel(engine: LocalEngine) -> None:
    """Also objects that no node can import; a definition is built in each process. A clone has them, too."""
    shift = 5

    class Here(Noise):
        pass

    def collate(samples: list[Any]) -> Any:
        return torch.tensor([index + shift for index, _ in samples]), torch.stack([noise for _, noise in samples])

    cases: list[tuple[Any, dict[str, Any]]] = [
        (Here(), {"shuffle": True, "collate_fn": collate, "worker_init_fn": lambda worker: torch.rand(worker + 1)}),
        (Counting(), {}),
        (definitions.with_functions(), {}),
    ]
    for dataset, own in cases:
        expected = DataLoader[Any](
            dataset, multiprocessing_context="fork", **OPTIONS | own
        )  # as no other start carries
        with DataLoader[Any](dataset, workers=engine, **OPTIONS | own) as loader:
            assert_same([*loader, *loader], [*expected, *expected])
            if own:
                with loader.clone(batch_size=8) as bigger:
                    assert_same([*bigger], [*expected.clone(batch_size=8)])


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_a_node_that_goes(unix: bool) -> None:
    """A node that dies leaves its workers to the other: the batches are those of an undisturbed run, and no restart is
    counted.
    """
    engine = LocalEngine(2, unix=unix)
    try:
        with DataLoader[Any](Noise(40_000, 0.002), shuffle=True, workers=engine, **OPTIONS) as loader:
            batches = iter(loader)
            got = [next(batches) for _ in range(10)]
            first, second = engine.addresses
            assert at_nodes(loader) == {first: 2, second: 2}
            engine.kill(0)
            while at_nodes(loader) != {first: 0, second: 4}:
                got.append(next(batches))
            got += islice(batches, 50)
            del batches
        assert_same(got, list(islice(DataLoader[Any](Noise(40_000), shuffle=True, **OPTIONS), len(got))))
    finally:
        engine.close()


def test_what_cannot_be_pickled_is_an_error_at_once(forked: None, engine: LocalEngine) -> None:
    """The error is raised before anything is sent."""

    class Locked(Noise):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
        DataLoader[Any](Locked(), workers=engine, **OPTIONS)
