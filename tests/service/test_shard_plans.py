"""Shards that a service reads: planned at a node, assigned by the loader, with the batches of local workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, StateError
from tests.helpers.comparing import assert_same
from tests.helpers.running import KINDS
from tests.service import definitions
from tests.service.serving import NodeProcess, serving
from tests.service.test_pools import read

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # local ones

OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 3}
SERVED = ["shards"], "--open", "shards"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), *SERVED) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make shards of different lengths."""
    made = tmp_path / "shards"
    made.mkdir()
    for shard in range(9):
        lines = [f'{{"n": {1000 * shard + line}}}\n' for line in range(10 + 7 * shard)]
        (made / f"{shard}.jsonl").write_text("".join(lines))
    return made


@pytest.mark.parametrize("place", ["tcp", "unix"])
@pytest.mark.parametrize("shuffle", [0, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_local_workers(
    kind: str, shuffle: int, place: str, node: NodeProcess, folder: Path
) -> None:
    """They are the same to the bit, over two epochs with the same workers."""
    served = definitions.shards(str(folder), shuffle)
    options = {**OPTIONS, "persistent_workers": True}
    expected = read("sync", options, served, epochs=2)
    assert len({int(n) for batch in expected[0] for n in batch}) == 9 * 10 + 7 * 36
    assert_same(read(kind, {**options, "workers": getattr(node, place)}, served, epochs=2), expected)


def test_states_move_between_places(node: NodeProcess, folder: Path) -> None:
    """An epoch that local workers began is resumed at a service, and an epoch of a service by local workers."""
    served = definitions.shards(str(folder), 20)
    whole = read("sync", OPTIONS, served)[0]
    for before, after in ((None, node.tcp), (node.tcp, None)):
        with DataLoader[Any](served, **OPTIONS, workers=before) as loader:
            batches = iter(loader)
            head = [next(batches) for _ in range(7)]
            state = loader.state_dict()
        with DataLoader[Any](served, **OPTIONS, workers=after) as loader:
            loader.load_state_dict(state)
            assert_same([*head, *loader], whole)


def test_a_node_that_is_killed(node: NodeProcess, folder: Path, tmp_path: Path) -> None:
    """The rest of each shard is read at another node, from where it was."""
    served = definitions.shards(str(folder), 20)
    whole = read("sync", OPTIONS, served)[0]
    with (
        serving(tmp_path, *SERVED, listen=["127.0.0.1:0"]) as other,
        DataLoader[Any](served, **OPTIONS, max_worker_restarts=0, workers=f"{other.tcp},{node.tcp}") as loader,
    ):
        batches = iter(loader)
        head = [next(batches) for _ in range(3)]
        other.kill()
        assert_same([*head, *batches], whole)


def test_a_store_that_changes_in_mid_epoch(node: NodeProcess, folder: Path, tmp_path: Path) -> None:
    """A node that finds other shards than the plan's reads none of them: the ranges would be of other samples."""
    served = definitions.shards(str(folder))
    with (
        serving(tmp_path, *SERVED, listen=["127.0.0.1:0"]) as other,
        DataLoader[Any](served, **OPTIONS, workers=f"{other.tcp},{node.tcp}") as loader,
    ):
        batches = iter(loader)
        next(batches)
        (folder / "0.jsonl").write_text('{"n": 7}\n')
        other.kill()
        with pytest.raises(StateError, match="other shards than those that the epoch was planned with"):
            list(batches)
