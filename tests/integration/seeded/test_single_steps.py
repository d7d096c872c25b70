"""Single steps of an epoch: made again alone, and left out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, WeightedRandomSampler

from asyncloader import (
    AsyncDataLoader,
    BucketBatchSampler,
    DataLoader,
    MixtureSampler,
    RemoteIterableDataset,
    StatefulDataLoader,
)
from tests.helpers.comparing import assert_same
from tests.helpers.running import run_async
from tests.helpers.seeded_datasets import AllDraws, AwaitedDraws, Lists, Rows, Threaded, WholeDraws, draw_and_collate
from tests.helpers.seeded_runs import Stepwise
from tests.helpers.shards_of_formats import SIZES, write
from tests.service import definitions
from tests.service.definitions import fields_of
from tests.service.serving import serving

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE, RANKS = 47, 3


def batch_of(run: Stepwise, step: int, **where: Any) -> Any:
    """The batch of a step, from either kind of loader."""
    if isinstance(run.loader, DataLoader):
        return run.loader.batch_at(step, **where)

    async def awaited() -> Any:
        return await run.loader.batch_at(step, **where)

    assert run._runner is not None
    return run._runner.run(awaited())


def global_state() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1, SIZE + 1).double().tolist(), SIZE)


def run_of(kind: str, dataset: Any, **options: Any) -> Stepwise:
    made = {name: options[name]() for name in ("sampler", "batch_sampler") if name in options}
    return Stepwise(kind, dataset, **options | made)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {  # samplers are made for each loader
    "processes": (AllDraws, {"shuffle": True, "batch_size": 4, "num_workers": 2}),
    "persistent processes": (
        AllDraws,
        {"shuffle": True, "batch_size": 4, "num_workers": 1, "persistent_workers": True},
    ),
    "threads": (Rows, {"shuffle": True, "batch_size": 4, "num_workers": 2, "workers": "threads"}),
    "no workers": (AllDraws, {"shuffle": True, "batch_size": 4}),
    "in order": (AllDraws, {"batch_size": 4}),
    "awaited": (AwaitedDraws, {"shuffle": True, "batch_size": 4, "num_workers": 2}),
    "in threads": (Threaded, {"shuffle": True, "batch_size": 4, "concurrency": 2}),
    "whole batches": (WholeDraws, {"shuffle": True, "batch_size": 4}),
    "drawing collation": (AllDraws, {"shuffle": True, "batch_size": 4, "collate_fn": draw_and_collate}),
    "single samples": (AllDraws, {"shuffle": True, "batch_size": None}),
    "padded": (AllDraws, {"shuffle": True, "batch_size": 4, "on_uneven": "pad"}),
    "weighted": (AllDraws, {"sampler": weighted, "batch_size": 4}),
    "mixed": (AllDraws, {"sampler": lambda: MixtureSampler([range(20), range(27)], [1, 2], 4), "batch_size": 4}),
    "by length": (AllDraws, {"batch_sampler": lambda: BucketBatchSampler([1 + i % 7 for i in range(SIZE)], 4, 6)}),
    "listed": (AllDraws, {"sampler": lambda: [*range(SIZE)][::-1], "batch_size": 4}),
}


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
@pytest.mark.parametrize("case", CASES)
def test_each_step_again(kind: str, case: str) -> None:
    """Of two epochs and of another rank, while the loader stands elsewhere; nothing else changes."""
    make, options = CASES[case]
    options = {"seed": 11, "rank": 1, "world_size": RANKS, **options}
    with run_of(kind, make(SIZE), **options) as run, run_of(kind, make(SIZE), **options | {"rank": 2}) as other:
        epochs = run.epoch(), run.epoch()
        elsewhere = other.epoch()
        run.begin()
        begun = run.take(2)
        before, position = global_state(), run.loader.state_dict()
        for epoch, batches in enumerate(epochs):
            for step in random.Random(epoch).sample(range(len(batches)), k=min(3, len(batches))):
                assert_same(batch_of(run, step, epoch=epoch), batches[step])
        assert_same(batch_of(run, len(elsewhere) - 1, epoch=0, rank=2), elsewhere[-1])
        assert_same([batch_of(run, 0), batch_of(run, 1)], begun)  # of the present epoch
        assert (run.loader.state_dict(), global_state()) == (position, before)
        with pytest.raises(IndexError, match=f"epoch 0 has no step {len(epochs[0])}"):
            batch_of(run, len(epochs[0]), epoch=0)
        rest = run.rest()
    with run_of(kind, make(SIZE), **options) as undisturbed:
        undisturbed.loader.set_epoch(2)
        assert_same([*begun, *rest], undisturbed.epoch())


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
@pytest.mark.parametrize("case", CASES)
def test_steps_left_out(kind: str, case: str) -> None:
    """Of the epoch that is resumed, and of the next; a state of a run that leaves steps out leaves them out, too."""
    make, options = CASES[case]
    options = {"seed": 11, "rank": 1, "world_size": RANKS, **options}
    with run_of(kind, make(SIZE), **options) as run, run_of(kind, make(SIZE), **options) as resumed:
        batches = run.epoch()
        later = run.epoch()
        with run_of(kind, make(SIZE), **options) as first:
            first.begin()
            start = first.take(1)
            first.loader.skip([1, 3])
            first.begin()
            start += first.take(1)
            resumed.loader.load_state_dict(first.loader.state_dict())
            expected = [batch for step, batch in enumerate(batches) if step not in (1, 3)]
            assert_same([*start, *first.rest()], expected)
        resumed.begin()
        assert_same([*start, *resumed.rest()], expected)
        assert resumed.loader.epoch == 1
        resumed.loader.skip([0, len(later) - 1])
        assert_same(resumed.epoch(), later[1:-1])
        assert resumed.loader.epoch == 2


class BadRows(Rows):
    """The samples of the second batch raise."""

    def __getitem__(self, index: int) -> Any:
        if 4 <= index < 8:
            raise ValueError(f"no sample {index}")
        return super().__getitem__(index)


def test_a_batch_that_raises() -> None:
    """Raises again; with its samples skipped there is no batch, rather than another."""
    with DataLoader(BadRows(20), batch_size=4, seed=1) as loader:
        with pytest.raises(ValueError, match="no sample 4"):
            loader.batch_at(1)
        assert loader.batch_at(2).tolist() == [8, 9, 10, 11]
    skipping = DataLoader(BadRows(20), batch_size=4, seed=1, on_error="skip")
    with skipping, pytest.raises(LookupError, match="step 1 of epoch 0 has no batch: all of its samples were skipped"):
        skipping.batch_at(1)


class EpochRows(Rows):
    """Knows the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, self.epoch])


def test_a_dataset_that_knows_the_epoch() -> None:
    """It is in the epoch asked for, and then again in the loader's."""
    dataset = EpochRows(6)
    with DataLoader(dataset, batch_size=2, seed=1) as loader:
        running = iter(loader)
        assert next(running)[:, 1].tolist() == [0, 0]
        assert loader.batch_at(2, epoch=7)[:, 1].tolist() == [7, 7]
        assert [batch[:, 1].tolist() for batch in running] == [[0, 0]] * 2
        loader.batch_at(2, epoch=7)
        assert dataset.epoch == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_fixed_streams(tmp_path: Path, ranks: int) -> None:
    """Their steps are reached, and left out; their samples have no indices."""
    write(tmp_path, "tar")
    dataset = RemoteIterableDataset(f"{tmp_path}/", shuffle_buffer=5, streams=2)
    given: dict[str, Any] = {"world_size": ranks, "rank": ranks - 1}
    with DataLoader(dataset, batch_size=6 // ranks, seed=3, decode=fields_of, num_workers=2, **given) as loader:
        batches = [[numbers.tolist() for numbers, _ in loader] for _ in range(2)]
        assert sum(map(len, batches[0])) * ranks == sum(SIZES) - sum(SIZES) % ranks
        for step in (0, 3, len(batches[1]) - 1):
            assert loader.batch_at(step, epoch=1)[0].tolist() == batches[1][step]
        loader.set_epoch(0)
        loader.skip([2])
        assert [numbers.tolist() for numbers, _ in loader] == [*batches[0][:2], *batches[0][3:]]
    with DataLoader(dataset, batch_size=6 // ranks, seed=3, decode=fields_of, **given) as loader:
        loader.skip([0, 100])  # the samples are counted later
        with pytest.raises(IndexError, match=f"epoch 0 has no step 100: it has {len(batches[0])} batches"):
            next(iter(loader))


def test_of_a_service(tmp_path: Path) -> None:
    """One of its workers makes the batch."""
    with serving(tmp_path, ["drawn"]) as node:
        given: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 2, "shuffle": True, "workers": node.tcp}
        with DataLoader[Any](definitions.drawn(), **given) as loader:
            batches = list(loader)
            assert_same(loader.batch_at(5, epoch=0), batches[5])
            loader.set_epoch(0)
            loader.skip([0, 2])
            assert_same(list(loader), [batches[1], *batches[3:]])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class Stateful(Rows):
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


async def _awaited_indices() -> Any:
    yield 1


class AwaitedIndices:
    """An async sampler."""

    def __aiter__(self) -> Any:
        return _awaited_indices()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: DataLoader(Rows(9), shuffle=True), "no seed="),
        (lambda: StatefulDataLoader(Rows(9)), "no seed="),
        (lambda: DataLoader(Stream(), seed=1), "the dataset is iterated"),
        (lambda: DataLoader(RemoteIterableDataset(["/nowhere/a.tar"]), seed=1), "needs streams="),
        (lambda: DataLoader(Stateful(9), seed=1), "the dataset has a state"),
        (lambda: DataLoader(Rows(9), seed=1, batch_sampler=Lists([[1], [2]])), r"Lists has no iter_from\(start\)"),
        (lambda: AsyncDataLoader(Rows(9), seed=1, sampler=AwaitedIndices()), "the sampler is async"),
    ],
)
def test_refused(make: Any, why: str) -> None:
    """Where a batch does not follow from its step, with the reason."""
    loader: Any = make()
    calls: list[Any] = [lambda: loader.skip([1]), lambda: loader.batch_at(1)]
    if isinstance(loader, AsyncDataLoader):
        calls[1] = lambda: run_async(loader.batch_at(1))
    for call in calls:
        with pytest.raises(ValueError, match=f"single steps cannot be addressed: .*{why}"):
            call()
    loader.close()


def test_wrong_arguments() -> None:
    """Each names its value."""
    with DataLoader(Rows(9), seed=1, rank=0, world_size=2) as loader:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"step": -1}, "step should be an integer from 0 on, but got -1"),
            ({"step": 1, "epoch": 1.5}, "epoch should be an integer from 0 on, but got 1.5"),
            ({"step": torch.tensor(1.5)}, r"step should be an integer from 0 on, but got tensor\(1\.5"),
            ({"step": 1, "rank": 2}, "rank should be between 0 and 1, but got rank=2"),
            ({"step": 1, "epoch": 1 << 63}, r"epoch should be below 2\*\*63"),
        ]
        for given, text in cases:
            with pytest.raises(ValueError, match=text):
                loader.batch_at(**given)
