"""Datasets with `loader_streams` that a service reads: the batches are those of a loader without workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.setup import EpochStart, for_worker
from tests.helpers.comparing import assert_same
from tests.service import definitions
from tests.service.serving import NodeProcess, serving

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

OPTIONS: dict[str, Any] = {"batch_size": 2, "seed": 5}
NAMES = ["declared"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One process for each definition, which serves all connections."""
    with serving(tmp_path_factory.mktemp("node"), NAMES, workers=1) as made:
        yield made


def loader(name: str, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(getattr(definitions, name)(), **OPTIONS, **options)


def epochs(name: str, count: int, **options: Any) -> list[list[torch.Tensor]]:
    with loader(name, **options) as made:
        return [list(made) for _ in range(count)]


@pytest.mark.parametrize("place", ["tcp", "unix"])
@pytest.mark.parametrize("name", NAMES)
def test_batches_beside_another_loader(node: NodeProcess, name: str, place: str) -> None:
    """Two loaders with other numbers of workers read in one process; over two epochs with the same workers."""
    local: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    expected = epochs(name, 2, **local)
    assert [int(batch[0, 0]) for batch in expected[0]] == [0, 1, 2, 4, 0, 1, 2, 4, 0, 2, 4, 0, 2, 2, 2]
    options: dict[str, Any] = {"workers": getattr(node, place), "persistent_workers": True}
    with loader(name, num_workers=2, **options) as first, loader(name, num_workers=7, **options) as second:
        for batches in expected:
            pairs = list(zip(first, second, strict=True))
            assert_same([one for one, _ in pairs], batches)
            assert_same([other for _, other in pairs], batches)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on_elsewhere_after_a_process_was_killed(node: NodeProcess, name: str) -> None:
    """Each of its streams goes on where it was; from a service to local workers, and back, with other numbers."""
    (expected,) = epochs(name, 1)
    got: list[torch.Tensor] = []
    state: dict[str, Any] = {}
    local: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    for options, killed in (
        ({"num_workers": 2, "workers": node.tcp}, True),
        (local, False),
        ({"num_workers": 3, "workers": node.unix}, True),
        ({"num_workers": 0}, False),
    ):
        with loader(name, **options) as made:
            made.load_state_dict(state)
            batches: Any = iter(made)
            got += [next(batches), next(batches)]
            if killed:
                os.kill(batches._workers[0].pid, signal.SIGKILL)
            got.append(next(batches))
            state = made.state_dict()
    assert_same(got, expected[: len(got)])


def start(**fields: Any) -> tuple[Any, ...]:
    return tuple(EpochStart(epoch=1)._replace(**fields))


WRONG: dict[str, Any] = {
    "a number": start(streams=(1,)),
    "streams in streams": start(streams=(for_worker([EpochStart()]),)),
    "too many": start(streams=(EpochStart(),) * 1025),
    "a negative epoch": start(streams=(EpochStart(epoch=-1),)),
    "a message, which would be unpickled": start(streams=(EpochStart(message=b"x"),)),
    "a message of another kind": start(streams=(EpochStart(message=""),)),  # type: ignore[arg-type]
    "a cursor that is none": start(streams=(EpochStart(cursor=(0,)),)),  # type: ignore[arg-type]
    "a cursor of negative batches": start(streams=(EpochStart(cursor=Cursor(-1, 0, False, None, None)),)),
}


@pytest.mark.parametrize("values", WRONG.values(), ids=WRONG)
def test_starts_of_streams_are_checked(values: tuple[Any, ...]) -> None:
    """A node's process reads what a loader has sent."""
    with pytest.raises(ValueError, match="broken stream: a start of an epoch, a cursor"):
        MSGPACK.load_start(MSGPACK.dumps(values))


def test_starts_of_streams_are_read() -> None:
    """With the states of their datasets."""
    begun = for_worker([EpochStart(cursor=Cursor(3, 6, False, {"at": [1, 2]}, None)), EpochStart(skip=4)])
    assert MSGPACK.load_start(MSGPACK.dumps(tuple(begun))) == begun
