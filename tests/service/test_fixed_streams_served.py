"""Fixed streams that a service reads: the batches and states of local workers, whatever happens to the nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, StateError
from tests.helpers.remote_folders import make_shards
from tests.helpers.running import KINDS
from tests.service import definitions
from tests.service.serving import NodeProcess, serving
from tests.service.test_pools import read

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZES = (7, 11, 0, 25, 30)
OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 2}
SERVED = ["fixed_streams"], "--open", "fixed_streams"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), *SERVED) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shards"
    made.mkdir()
    for number, size in enumerate(SIZES):
        first = sum(SIZES[:number])
        lines = [f'{{"n": {first + line}}}\n' for line in range(size)]
        (made / f"{number}.jsonl").write_text("".join(lines))
    return made


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def local(folder: Path, epochs: int = 1) -> list[list[list[int]]]:
    """The batches without workers."""
    return [
        numbers(each)
        for each in read("sync", {**OPTIONS, "num_workers": 0}, definitions.fixed_streams(str(folder), 9), epochs)
    ]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("place", ["tcp", "unix"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_local_workers(
    kind: str, place: str, workers: int, node: NodeProcess, folder: Path
) -> None:
    """Over two epochs with the same workers, and by any of the service's addresses."""
    expected = local(folder, 2)
    assert sorted(number for batch in expected[0] for number in batch) == [*range(sum(SIZES))]
    served = definitions.fixed_streams(str(folder), 9)
    options: dict[str, Any] = {
        **OPTIONS,
        "num_workers": workers,
        "persistent_workers": True,
        "workers": getattr(node, place),
    }
    assert [numbers(each) for each in read(kind, options, served, epochs=2)] == expected


def test_states_and_ranks(node: NodeProcess, folder: Path) -> None:
    """A state moves between a service and local workers, and to other ranks; the length is known. `shuffle` may ask for
    what the definition does, at either place.
    """
    (whole,) = local(folder)
    served = definitions.fixed_streams(str(folder), 9)
    states = []
    for workers in (node.tcp, None):
        with DataLoader[Any](served, **OPTIONS, workers=workers, shuffle=True) as loader:
            assert len(loader) == len(whole)
            batches = iter(loader)
            assert numbers(next(batches) for _ in range(5)) == whole[:5]
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert states[0] == states[1]
    parts = []
    for rank in range(2):
        options: dict[str, Any] = {**OPTIONS, "batch_size": 2, "rank": rank, "world_size": 2, "on_uneven": "pad"}
        with DataLoader[Any](served, **options, workers=node.tcp) as loader:
            loader.load_state_dict(states[0])
            parts.append(numbers(loader))
    joined = [[*first, *second] for first, second in zip(*parts, strict=True)]
    assert joined[:-1] == whole[5:-1]
    assert {*joined[-1]} == {*whole[-1]}


def test_a_definition_that_does_not_shuffle(node: NodeProcess, folder: Path) -> None:
    """It is out of the reach of the loader's `shuffle`."""
    loader = DataLoader[Any](definitions.fixed_streams(str(folder)), **OPTIONS, workers=node.tcp, shuffle=True)
    with loader, pytest.raises(ValueError, match="give shuffle_buffer= in its definition"):
        next(iter(loader))


def test_a_node_that_is_killed(node: NodeProcess, folder: Path, tmp_path: Path) -> None:
    """Its workers go on at the other node, with the same batches."""
    (whole,) = local(folder)
    with serving(tmp_path, *SERVED, listen=["127.0.0.1:0"]) as other:
        options: dict[str, Any] = {**OPTIONS, "max_worker_restarts": 0, "workers": f"{other.tcp},{node.tcp}"}
        with DataLoader[Any](definitions.fixed_streams(str(folder), 9), **options) as loader:
            batches = iter(loader)
            head = [next(batches) for _ in range(3)]
            other.kill()
            assert numbers([*head, *batches]) == whole


def test_shards_that_change(node: NodeProcess, folder: Path) -> None:
    """A state of other shards is refused. A node counts once, as it lists once: it has not read these before."""
    served = definitions.fixed_streams(str(folder), 9)
    with DataLoader[Any](served, **OPTIONS) as loader:
        next(iter(loader))
        state = loader.state_dict()
    make_shards(folder, (3,), ending="jsonl")
    with DataLoader[Any](served, **OPTIONS, workers=node.tcp) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="other shards"):
            next(iter(loader))
