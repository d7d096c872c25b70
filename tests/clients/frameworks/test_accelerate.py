from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.tracking import GeneralTracker

import asyncloader
from asyncloader.integrations.accelerate import log_stats, prepare
from tests.clients.frameworks.accelerate_runs import OURS, OWN, STOCK, accelerator, both, epochs, prepared
from tests.clients.frameworks.helping import Line, Rows, RowStream, batches_given, seed_all
from tests.helpers.comparing import assert_same

pytestmark = pytest.mark.usefixtures("accelerate_state")

# -------------------------------------------------------------------------------------------- prepare


def test_prepare_keeps_the_wrapper_and_puts_our_loader_inside() -> None:
    """Accelerate's `DataLoaderShard` stays; the loader in it is of our class, with its own options."""
    dataset = Rows(20)
    shard = prepared(OURS(dataset, 8, num_workers=2, prefetch_factor=3, persistent_workers=True, **OWN))
    assert type(shard).__name__ == DataLoaderShard.__name__
    assert isinstance(shard, STOCK)
    inside = shard.base_dataloader
    assert type(inside) is OURS
    assert (inside.dataset, inside.tuning.ring_bytes, inside.snapshot_every_n_steps) == (dataset, 1 << 20, 3)
    assert (inside.num_workers, inside.prefetch_factor, inside.persistent_workers) == (2, 3, True)
    assert len(shard) == 3
    assert shard.total_batch_size == 8
    assert shard.total_dataset_length == 20


def test_prepare_keeps_a_subclass() -> None:
    """The loader inside is of the class of the user's loader."""

    class Mine(asyncloader.DataLoader[Any]):
        pass

    assert type(prepared(Mine(Rows(8), 4)).base_dataloader) is Mine


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_stock_accelerate(num_workers: int, shuffle: bool) -> None:
    """The same seed gives the batches and generator states of a stock loader that Accelerate prepared."""
    stock, ours = both(Rows(36), batch_size=8, shuffle=shuffle, num_workers=num_workers)
    assert_same(epochs(ours), epochs(stock))
    assert batches_given(ours.base_dataloader) == 10


@pytest.mark.parametrize(
    ("dispatch", "wrapper"), [(None, DataLoaderDispatcher), (False, DataLoaderShard)], ids=["dispatcher", "shard"]
)
def test_streams(dispatch: Any, wrapper: type) -> None:
    """An iterable dataset, which Accelerate dispatches from the main process unless configured otherwise."""
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    stock, ours = both(RowStream(40), config=config, batch_size=8, num_workers=2)
    assert type(ours).__name__ == wrapper.__name__
    assert_same(epochs(ours), epochs(stock))
    assert batches_given(ours.base_dataloader) == 12


def test_prepare_several_objects() -> None:
    """All objects come back in their order; only our loaders are touched."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    objects = prepare(accelerator(), OURS(Rows(8), 4), model, STOCK(Rows(8), 4), optimizer, scheduler, OURS(Rows(8), 2))
    assert [type(x).__name__ for x in objects] == [
        "DataLoaderShard",
        "Line",
        "DataLoaderShard",
        "AcceleratedOptimizer",
        "AcceleratedScheduler",
        "DataLoaderShard",
    ]
    assert [type(objects[i].base_dataloader) for i in (0, 2, 5)] == [OURS, STOCK, OURS]
    assert [len(objects[i]) for i in (0, 2, 5)] == [2, 2, 4]


# -------------------------------------------------------------------------------------------- gradient state


def test_gradient_state_is_fed() -> None:
    """`end_of_dataloader` turns true on the last batch alone, and `remainder` is the size of the last batch."""
    seen = []
    for make in (STOCK, OURS):
        running = accelerator()
        loader: Any = make(Rows(21), 8, num_workers=2)
        loader = prepare(running, loader) if make is OURS else running.prepare(loader)
        seen.append(
            [
                (running.gradient_state.end_of_dataloader, running.gradient_state.remainder)
                for _ in range(2)
                for _ in loader
            ]
        )
    assert seen[1] == seen[0]
    assert [end for end, _ in seen[1]] == [False, False, True] * 2
    assert seen[1][0][1] == 5


def test_training_gives_the_weights_of_stock_accelerate() -> None:
    """Two epochs with accumulation end in the very same weights."""
    weights = []
    for make in (STOCK, OURS):
        seed_all()
        running = accelerator(gradient_accumulation_steps=2)
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = make(Rows(40), 8, shuffle=True, num_workers=2)
        bring = running.prepare if make is STOCK else lambda *objects, running=running: prepare(running, *objects)
        model, optimizer, loader = bring(model, optimizer, loader)
        for _ in range(2):
            for batch in loader:
                with running.accumulate(model):
                    running.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
        weights.append(model.state_dict())
    assert_same(weights[1], weights[0])


# -------------------------------------------------------------------------------------------- trackers


class Logged(GeneralTracker):  # type: ignore[misc]
    """A tracker that keeps what it is given."""

    name = "logged"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> Any:
        return self.values

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.values.append((values, step))


def test_statistics_reach_the_trackers() -> None:
    """A prepared loader's figures are logged with their step, in total or since the last time; a stock loader is
    refused.
    """
    logged = Logged()
    run = accelerator(log_with=[logged])
    run.init_trackers("project")
    loader = prepare(run, OURS(Rows(24), 8))
    for step in (3, 6):
        assert sum(1 for _ in loader) == 3
        log_stats(run, loader, step, "train/", interval=True)
    log_stats(run, loader.base_dataloader, 7)
    assert [(step, values.get("train/data/batches")) for values, step in logged.values] == [(3, 3), (6, 3), (7, None)]
    assert logged.values[-1][0]["data/batches"] == 6
    with pytest.raises(
        TypeError, match=r"^log_stats takes a loader of asyncloader, but got a DataLoader; see prepare$"
    ):
        log_stats(run, run.prepare(STOCK(Rows(4))), 1)
