"""A loader with `workers=` is made without the network; a node is asked when an attribute depends on the dataset."""

from __future__ import annotations

import asyncio
import copy
import socket
import warnings
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import RandomSampler

from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions, Service, ServiceUnavailable
from asyncloader.errors import NoEffectWarning
from asyncloader.samplers.seeded import SeededDraws, SeededSampler
from asyncloader.service.client import connect
from asyncloader.service.protocol.records import DatasetInfo
from tests.service import definitions

OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 2, "workers": "tcp://127.0.0.1:1"}
MAP = DatasetInfo(iterable=False, asynchronous=False, stateful=False, length=40, shuffle=None)
STREAM = DatasetInfo(iterable=True, asynchronous=False, stateful=False, length=40, shuffle=None)


class Node:
    """The node's answer, and the number of requests for it."""

    def __init__(self) -> None:
        self.info = MAP
        self.asked = 0
        self.away = False

    def __call__(self, service: Any, defined: Any) -> DatasetInfo:
        self.asked += 1
        if self.away:
            raise ServiceUnavailable("no node")
        return self.info


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node that replaces the network."""
    node = Node()
    monkeypatch.setattr(connect, "ask_dataset_info", node)
    return node


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a machine that answers nothing: the queue of its connections is full."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as server:
        address = server.getsockname()
        filling = []
        for _ in range(4):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(address)
            filling.append(each)
        yield f"tcp://127.0.0.1:{address[1]}"
        for each in filling:
            each.close()


@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_what_needs_no_dataset_asks_nobody(kind: Any, node: Node) -> None:
    """A loader is made, shown, copied, cloned and closed without a request."""
    node.away = True
    loader = kind(definitions.numbers(), shuffle=True, **OPTIONS)
    assert "UnknownDataset" in repr(loader)
    assert "UnknownDataset" in loader._repr_html_()
    assert (loader.batch_size, loader.num_workers, loader.seed) == (4, 2, 3)
    clone = loader.clone(batch_size=5)
    assert clone.batch_size == 5
    copied = copy.copy(loader)
    loader.close()
    clone.close()
    copied.close()
    del copied, clone, loader
    assert not node.asked


@pytest.mark.parametrize("read", [len, iter, lambda loader: loader.dataset, lambda loader: loader.state_dict()])
def test_a_node_is_asked_once(read: Any, node: Node) -> None:
    """The first use asks the node, again after an error, with the result as if the constructor had asked."""
    node.away = True
    with DataLoader[Any](definitions.numbers(), shuffle=True, **OPTIONS) as loader:
        for asked in (1, 2):
            with pytest.raises(ServiceUnavailable, match="no node"):
                read(loader)
            assert node.asked == asked
        node.away = False
        assert len(loader) == 10
        sampler, dataset = loader.sampler, loader.dataset
        assert isinstance(sampler, SeededSampler)
        assert id(sampler.data_source) == id(dataset)
        assert (sampler.shuffle, len(sampler)) == (True, 40)
        with loader.clone() as clone:
            assert isinstance(clone.sampler, SeededSampler)
            assert clone.sampler.shuffle
    assert node.asked == 4  # the clone asks again


def test_a_clone_has_the_order_and_what_was_set(node: Node) -> None:
    """The clone has both even if the loader has not asked a node yet."""
    order = RandomSampler(range(40))
    loader = DataLoader[Any](definitions.numbers(), sampler=order, **OPTIONS)
    loader.timeout = 7.0
    with loader.clone() as clone:
        assert not node.asked
        assert len(clone) == 10
        assert isinstance(clone.sampler, SeededDraws)
        assert (clone.sampler.sampler, clone.timeout) == (order, 7.0)
    loader.close()


def test_arguments_that_do_not_go_with_the_dataset(node: Node) -> None:
    """The constructor's error is raised once the dataset is known; for arguments that suit no dataset, at once."""
    node.info = STREAM
    loader = DataLoader[Any](definitions.numbers(), shuffle=True, **OPTIONS)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected unspecified shuffle option, but got shuffle=True"):
            iter(loader)
    with pytest.raises(ValueError, match="on_uneven='pad' needs a map dataset"):
        len(DataLoader[Any](definitions.numbers(), on_uneven="pad", **OPTIONS))
    asked = node.asked
    with pytest.raises(ValueError, match="mutually exclusive"):
        DataLoader[Any](definitions.numbers(), shuffle=True, sampler=[1], **OPTIONS)
    wrong: dict[str, Any] = {**OPTIONS, "seed": -1}
    with pytest.raises(ValueError, match="seed should be"):
        DataLoader[Any](definitions.numbers(), shuffle=True, **wrong)
    assert node.asked == asked


def test_options_without_an_effect(node: Node) -> None:
    """The constructor warns, once; not of options whose effect depends on the dataset, which it does not know."""
    node.info = STREAM
    with pytest.warns(NoEffectWarning, match="device_prefetch=3 does nothing without device="):
        early = DataLoader[Any](definitions.numbers(), device_options=DeviceOptions(device_prefetch=3), **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader[Any](definitions.numbers(), concurrency=4, **OPTIONS)
        assert (len(early), len(loader), len(loader.clone(timeout=3))) == (10, 10, 10)


@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_nobody_answers(kind: Any, silent: str) -> None:
    """The constructor does not wait for a node; `iter()` or `aiter()` raises the error."""
    service = Service(f"{silent},tcp://127.0.0.1:1", wait=0.01)
    loader = kind(definitions.numbers(), **{**OPTIONS, "workers": service})

    async def read() -> None:
        aiter(loader)

    with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:1: Connection refused"):
        asyncio.run(read()) if kind is AsyncDataLoader else iter(loader)
    loader.close()


def test_functions_beside_another_loaders_dataset(node: Node) -> None:
    """A framework makes a loader of another loader's attributes. That loader's `collate_fn` is torch's, and does not
    replace the dataset's, which runs in the workers. Other functions do, or are an error if they cannot be sent.
    """
    node.info = MAP
    engine = SimpleNamespace(serve=lambda _: Service("tcp://127.0.0.1:1"))

    def functions(loader: Any) -> Any:
        return loader.dataset.defined.make().functions

    options: dict[str, Any] = OPTIONS | {"workers": engine, "dataset": range(40)}
    with DataLoader[Any](collate_fn=sum, **options) as first:
        options = OPTIONS | {"workers": engine, "dataset": first.dataset}
        with DataLoader[Any](collate_fn=first.collate_fn, **options) as second:
            assert functions(second) == {"collate_fn": sum}
        with DataLoader[Any](collate_fn=max, worker_init_fn=print, **options) as second:
            assert functions(second) == {"collate_fn": max, "worker_init_fn": print}
    for workers in (OPTIONS["workers"], engine):
        with DataLoader[Any](definitions.numbers(), **OPTIONS) as first:
            options = OPTIONS | {"workers": workers, "dataset": first.dataset}
            DataLoader[Any](collate_fn=first.collate_fn, **options).close()
            with pytest.raises(ValueError, match="collate_fn runs in the service's workers: return it from numbers"):
                DataLoader[Any](collate_fn=sum, **options)
