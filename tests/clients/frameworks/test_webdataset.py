from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncloader
from tests.clients.frameworks.helping import batches_given, draws, seed_all
from tests.helpers.comparing import assert_same

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:unclosed file .*shard-:ResourceWarning"),  # webdataset closes no shard
]

STOCK: Any = torch.utils.data.DataLoader
OURS: Any = asyncloader.DataLoader


@pytest.fixture(scope="module")
def wds() -> Any:
    import_module("webdataset.compat")
    return import_module("webdataset")


@pytest.fixture
def shards(wds: Any, tmp_path: Path) -> list[str]:
    """Four tar files of ten samples each; a sample has an array and a class."""
    paths = []
    for number in range(4):
        path = tmp_path / f"shard-{number}.tar"
        with wds.TarWriter(str(path)) as tar:
            for sample in range(10 * number, 10 * number + 10):
                array = np.full((2, 3), sample, np.float32)
                tar.write({"__key__": f"{sample:04}", "npy": array, "cls": sample})
        paths.append(str(path))
    return paths


def dataset(wds: Any, shards: list[str], *, shuffled: bool = False) -> Any:
    source = wds.WebDataset(shards, shardshuffle=4 if shuffled else False, seed=5 if shuffled else None)
    return (source.shuffle(8, seed=5) if shuffled else source).decode().to_tuple("npy", "cls")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffled", [False, True], ids=["", "shuffled"])
def test_web_dataset_in_our_loader(wds: Any, shards: list[str], num_workers: int, shuffled: bool) -> None:
    """A WebDataset deals its shards out to our workers: the batches are torch's, and every sample is delivered once."""
    runs = []
    for make in (STOCK, OURS):
        seed_all()
        loader = make(dataset(wds, shards, shuffled=shuffled), batch_size=4, num_workers=num_workers)
        runs.append(([list(loader) for _ in range(2)], draws()))
    assert_same(runs[1], runs[0])
    for epoch in runs[1][0]:
        assert sorted(int(c) for _, classes in epoch for c in classes) == list(range(40))


def test_batched_by_the_dataset(wds: Any, shards: list[str]) -> None:
    """webdataset recommends this form: batches made in the dataset, and `batch_size=None` in the loader."""
    loaders = [make(dataset(wds, shards).batched(5), batch_size=None, num_workers=2) for make in (STOCK, OURS)]
    expected, got = (list(loader) for loader in loaders)
    assert len(got) == 8
    assert_same(got, expected)


def test_our_loader_as_the_source_of_a_pipeline(wds: Any, shards: list[str]) -> None:
    """`DataPipeline(DataLoader(...))` takes our loader as its first stage, and other stages follow it."""

    def run(make: Any) -> tuple[Any, list[Any]]:
        seed_all()
        loader = make(dataset(wds, shards).batched(4), batch_size=None, num_workers=2)
        pipeline = wds.DataPipeline(loader, wds.unbatched(), wds.shuffle(16, seed=1), wds.batched(8))
        return loader, [list(pipeline) for _ in range(2)]

    _, expected = run(STOCK)
    loader, got = run(OURS)
    assert [len(batch[1]) for batch in got[0]] == [8] * 5
    assert_same(got, expected)
    assert batches_given(loader) == 2 * 10


def test_web_loader_inside_install(wds: Any, shards: list[str]) -> None:
    """`WebLoader` always makes a loader by itself: inside `install` it makes ours."""
    with asyncloader.install() as installed:
        loader = wds.WebLoader(dataset(wds, shards).batched(5), batch_size=None, num_workers=2)
    inside = loader.pipeline[0]
    assert type(inside) is installed
    assert len(list(loader)) == 8
    assert batches_given(inside) == 8
