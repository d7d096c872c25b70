"""The blocks of a Ray dataset as a dataset: local workers and those in the cluster read its rows, in exact order."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

pytest.importorskip("ray.data")

from asyncloader import DataLoader
from asyncloader.integrations.ray import BlockSampler, RayBlocks, RayWorkers
from tests.helpers.comparing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")  # ray.data's own options
OPTIONS: dict[str, Any] = {"batch_size": 8, "seed": 3, "num_workers": 2}
UNASSISTED: dict[str, Any] = OPTIONS | {"num_workers": 0}


@pytest.fixture(scope="module")
def blocks(cluster: Any) -> RayBlocks:
    """A hundred rows in seven blocks, computed by the cluster."""

    def squared(batch: Any) -> Any:
        return {"id": batch["id"], "square": batch["id"] ** 2, "row": np.repeat(batch["id"][:, None], 3, axis=1)}

    return RayBlocks(ray.data.range(100, override_num_blocks=7).map_batches(squared, batch_format="numpy"))


def test_rows(blocks: RayBlocks) -> None:
    """Each row can be read once, with all columns, in whichever block it is."""
    assert len(blocks) == 100
    assert sum(blocks.block_sizes) == 100
    rows = blocks.__getitems__(range(100))
    assert sorted(row["id"] for row in rows) == list(range(100))
    assert all((row["square"], row["row"].tolist()) == (row["id"] ** 2, [row["id"]] * 3) for row in rows)
    with pytest.raises(IndexError, match="index 100 of 100 rows"):
        blocks[100]


def test_threads_read_it(blocks: RayBlocks) -> None:
    """A block that other threads drop from the memory, while this one reads a row of it, does no harm."""
    firsts = [0, *np.cumsum(blocks.block_sizes).tolist()][:-1]
    expected = [blocks[first]["id"] for first in firsts]
    last = firsts.pop()
    read: list[Any] = []

    def meanwhile(_: Any, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == "move_to_end" and not read:
            read.extend(threads.map(blocks.__getitem__, firsts))

    with ThreadPoolExecutor(1) as threads:
        before = sys.getprofile()
        sys.setprofile(meanwhile)
        try:
            found = blocks[last]
        finally:
            sys.setprofile(before)
    assert [*(row["id"] for row in read), found["id"]] == expected


def test_an_order_that_reads_few_blocks_at_a_time(blocks: RayBlocks) -> None:
    """It gives every row once, block by block; another order in the next epoch; the same order from any position on."""
    sampler = BlockSampler(blocks, 5)
    first = list(sampler)
    assert sorted(first) == list(range(100))
    ends = np.cumsum(blocks.block_sizes)
    found = [int(np.searchsorted(ends, index, "right")) for index in first]
    assert sum(a != b for a, b in pairwise(found)) == len(blocks.block_sizes) - 1
    assert first[:14] != sorted(first[:14])
    assert all(list(sampler.iter_from(start)) == first[start:] for start in range(101))
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_seeds_and_positions() -> None:
    """A seed of numpy's counts as Python's, an iterator keeps its epoch, and a position outside of it is refused."""
    blocks: Any = SimpleNamespace(block_sizes=[3, 0, 5])
    seed: Any = np.int64(5)
    sampler = BlockSampler(blocks, seed)
    expected = list(BlockSampler(blocks, 5))
    items = iter(sampler)
    sampler.set_epoch(1)
    assert list(items) == expected
    for start in (-1, 9):
        with pytest.raises(ValueError, match=f"start should be between 0 and 8, but got start={start}"):
            sampler.iter_from(start)


@pytest.mark.parametrize("place", ["here", "cluster"])
def test_workers_read_it(blocks: RayBlocks, place: str) -> None:
    """The batches are those without workers, from workers here or of `RayWorkers`, also after a state was resumed."""
    expected = list(DataLoader[Any](blocks, sampler=BlockSampler(blocks, 5), **UNASSISTED))
    sampler = BlockSampler(blocks, 5)
    workers: dict[str, Any] = {"workers": RayWorkers(2, cpus_per_node=1)} if place == "cluster" else {}
    with DataLoader[Any](blocks, sampler=sampler, **OPTIONS, **workers) as loader:
        batches = iter(loader)
        got = [next(batches) for _ in range(5)]
        state = loader.state_dict()
        del batches
        with loader.clone() as other:
            other.load_state_dict(state)
            got += list(other)
    assert_same(got, expected)
