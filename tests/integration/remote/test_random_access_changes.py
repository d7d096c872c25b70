"""`RemoteMapDataset` over data that changes: while it is open, once it is decoded, and between a state and its use."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from asyncloader import DataLoader, Mixture, RemoteMapDataset, StateError
from asyncloader.transports import ReadFailed
from tests.helpers.http_store import serving as serving_http
from tests.helpers.running import run_async
from tests.helpers.shards_of_formats import SIZES, write
from tests.integration.remote.test_random_access import TOTAL, put_all, write_tars
from tests.unit.remote.shards import tar

pytestmark = [pytest.mark.independent, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Tar shards that a test may change."""
    return write_tars(tmp_path / "tars")


class Rows(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"n": range(self.count)[index] - 100}


VIEWS: dict[str, Callable[[RemoteMapDataset], Any]] = {
    "the dataset": lambda dataset: dataset,
    "a subset": lambda dataset: Subset(dataset, range(20)),
    "joined": lambda dataset: ConcatDataset[Any]([Rows(3), dataset]),
    "mixed": lambda dataset: Mixture([Rows(3), dataset], [1, 9]),
}


def of_an_earlier_version(state: dict[str, Any]) -> dict[str, Any]:
    """The state without digests of map datasets."""
    state = copy.deepcopy(state)
    del state["data_digest"]
    sources = (state["sampler"] or {"sampler": None})["sampler"]
    for source in sources["sources"] if isinstance(sources, dict) and "sources" in sources else ():
        source.pop("shards", None)
    return state


@pytest.mark.parametrize(("view", "seed"), [*((view, 1) for view in VIEWS), ("the dataset", None), ("joined", None)])
def test_resumed_over_other_data(view: str, seed: int | None, tmp_path: Path) -> None:
    """Is refused within an epoch. The folder may have moved; a state of an earlier version, or of an epoch's end, fits
    as it did.
    """

    def loader(folder: Path) -> DataLoader[Any]:
        data = VIEWS[view](RemoteMapDataset(f"{folder}/"))
        return DataLoader(data, batch_size=4, seed=seed, collate_fn=list)

    (tmp_path / "here").mkdir()
    write(tmp_path / "here", "jsonl")

    def numbers(batches: Iterable[Any]) -> list[list[int]]:
        return [[sample["n"] for sample in batch] for batch in batches]

    with loader(tmp_path / "here") as saving:
        batches = iter(saving)
        for _ in range(2):
            next(batches)
        state = saving.state_dict()
        rest = list(batches)
        end = saving.state_dict()
    assert json.loads(json.dumps(state)) == state
    (tmp_path / "here").rename(tmp_path / "there")
    shard = tmp_path / "there" / "s0.jsonl"
    for change in ("none", "another size"):
        if change != "none":
            shard.write_bytes(shard.read_bytes().replace(b": ", b":  "))  # the same samples
        for given in (state, of_an_earlier_version(state)):
            refused = change != "none" and given is state
            with (
                loader(tmp_path / "there") as resuming,
                pytest.raises(StateError, match=r"of other (data|shards)") if refused else nullcontext(),
            ):
                resuming.load_state_dict(given)
                assert numbers(resuming) == numbers(rest)
        if view != "mixed":  # whose order goes on
            with loader(tmp_path / "there") as resuming:
                resuming.load_state_dict(end)
                assert list(resuming)


@pytest.mark.parametrize("cached", [True, False])
def test_a_shard_that_changes(tars: Path, tmp_path: Path, cached: bool) -> None:
    """The index of the old version is not used for the new one: an error in this dataset, another index in the next."""

    async def run() -> None:
        async with serving_http() as store:
            urls = put_all(store, tars)
            options: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if cached else {}
            dataset = RemoteMapDataset(urls, **options)
            await dataset.prepare()
            store.put("s1.tar", tar(range(100, 120), size=700))
            with pytest.raises(ReadFailed, match="changed while it was read"):
                await dataset[SIZES[0] + 3]
            other = RemoteMapDataset(urls, **options)
            await other.prepare()
            assert len(other) == TOTAL - SIZES[1] + 20
            assert (await other[SIZES[0] + 3])["n"] == b"103"

    run_async(run())


@pytest.mark.parametrize("format", ["jsonl.zst", "parquet"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_shard_that_changes_once_it_is_decoded(format: str, tmp_path: Path, cached: bool) -> None:
    """What was decoded of the old version is not read in the next epoch."""
    write(tmp_path, format)

    async def run() -> None:
        async with serving_http() as store:
            urls = put_all(store, tmp_path)
            dataset = RemoteMapDataset(urls, cache_dir=tmp_path / "cache" if cached else None)
            await dataset[SIZES[0] + 3]
            await dataset[SIZES[0] + 3]
            store.put(f"s1.{format}", store.objects[f"s2.{format}"].data)
            with pytest.raises(ReadFailed, match="changed while it was read"):
                await dataset[SIZES[0] + 3]
            await dataset[0]

    run_async(run())


@pytest.mark.parametrize("format", ["tar", "jsonl", "tfrecord", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_file_that_was_replaced(format: str, epochs: int, tmp_path: Path) -> None:
    """Between the index and the first read, or after an epoch, by one of the same size: it is an error, and not
    another sample, nor one that was decoded before.
    """
    write(tmp_path, format)
    paths = sorted(tmp_path.glob(f"s*.{format}"))
    for number, path in enumerate(paths):
        os.utime(path, (1e9, 1e9 + number))

    async def run() -> None:
        dataset = RemoteMapDataset([str(path) for path in paths])
        await dataset.prepare()
        for _ in range(epochs):
            await dataset[SIZES[0] + 1]
        shutil.copy(paths[1], tmp_path / "new")
        (tmp_path / "new").replace(paths[1])
        async with dataset:
            for _ in range(2):
                with pytest.raises(ReadFailed, match="changed while it was read"):
                    await dataset[SIZES[0] + 1]
            await dataset[0]

    run_async(run())
