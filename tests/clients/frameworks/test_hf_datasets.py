from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import asyncloader
from tests.clients.frameworks.helping import batches_given, draws, seed_all
from tests.helpers.comparing import assert_same

pytestmark = pytest.mark.clients

STOCK: Any = torch.utils.data.DataLoader
OURS: Any = asyncloader.DataLoader


@pytest.fixture(scope="module")
def datasets() -> Any:
    import_module("tqdm").tqdm.monitor_interval = 0  # or its first progress bar, even a hidden bar, starts a thread
    return import_module("datasets")


def rows(datasets: Any, n: int = 40) -> Any:
    columns = {
        "id": list(range(n)),
        "vector": [[float(i), i / 2] for i in range(n)],
        "text": [f"row {i}" for i in range(n)],
    }
    return datasets.Dataset.from_dict(columns)


def epochs(loader: Any, number: int = 2) -> tuple[list[list[Any]], Any]:
    seed_all()
    return [list(loader) for _ in range(number)], draws()


def ids(epoch: list[Any]) -> list[int]:
    return [int(i) for batch in epoch for i in batch["id"]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_map_dataset(datasets: Any, form: str | None, num_workers: int) -> None:
    """A map dataset in each of its formats gives torch's batches."""
    dataset = rows(datasets).with_format(form)
    stock, ours = (make(dataset, 8, shuffle=True, num_workers=num_workers) for make in (STOCK, OURS))
    assert_same(epochs(ours), epochs(stock))
    assert batches_given(ours) == 10


@pytest.mark.parametrize("num_workers", [0, 2])
def test_map_dataset_is_asked_for_whole_batches(datasets: Any, num_workers: int) -> None:
    """`Dataset.__getitems__` gets a batch's indices at once: a transform sees whole batches."""

    def transform(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"id": batch["id"], "rows": [len(batch["id"])] * len(batch["id"])}

    dataset = rows(datasets).with_transform(transform)
    sizes = [batch["rows"].tolist() for batch in OURS(dataset, 16, num_workers=num_workers)]
    assert sizes == [[16] * 16, [16] * 16, [8] * 8]


def test_iterable_dataset_over_shards(datasets: Any) -> None:
    """A stream deals its shards out to the workers: torch's batches, each row once."""
    dataset = rows(datasets).to_iterable_dataset(num_shards=4).with_format("torch")
    stock, ours = (make(dataset, 8, num_workers=2) for make in (STOCK, OURS))
    expected, got = epochs(stock), epochs(ours)
    assert_same(got, expected)
    assert sorted(ids(got[0][0])) == list(range(40))


def test_epoch_reaches_persistent_workers(datasets: Any) -> None:
    """`set_epoch` in the main process changes the order in two workers that live on: `_epoch` stays shared memory."""
    got: list[list[Any]] = []
    expected: list[list[Any]] = []
    for make, found in ((STOCK, expected), (OURS, got)):
        dataset = rows(datasets).to_iterable_dataset(num_shards=4).shuffle(seed=42, buffer_size=20).with_format("torch")
        loader = make(dataset, 8, num_workers=2, persistent_workers=True)
        pids = set()
        for epoch in (0, 1, 2, 0):
            dataset.set_epoch(epoch)
            found.append(list(loader))
            pids.add(tuple(worker.pid for worker in loader._iterator._workers))
        assert len(pids) == 1
        assert dataset._epoch.is_shared()
    assert_same(got, expected)
    orders = [ids(epoch) for epoch in got]
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(40)) for order in orders)
