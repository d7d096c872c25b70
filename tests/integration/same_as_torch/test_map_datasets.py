"""Map-style datasets: torch's batches bit for bit, and the global generators in the state that torch leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.helpers.comparing import assert_same, same
from tests.helpers.datasets import Augmented, Images, Numbers, WholeBatches, identity
from tests.helpers.running import BOTH, KINDS, assert_like_torch, collect, fresh, run_loader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(99)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 4},
    "shuffle": {"batch_size": 4, "shuffle": True},
    "drop_last": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "weighted": {
        "batch_size": 3,
        "sampler": fresh(lambda: WeightedRandomSampler([1.0, 5.0, 2.0] * 7, 17, replacement=True)),
    },
    "subset sampler": {"batch_size": 3, "sampler": fresh(lambda: SubsetRandomSampler(range(3, 15)))},
    "list as sampler": {"batch_size": 3, "sampler": [5, 1, 1, 0, 20]},
    "batch sampler": {"batch_sampler": [[0, 1, 2], [20], [3, 3]]},
    "torch's batch sampler": {"batch_sampler": fresh(lambda: BatchSampler(range(11), 4, drop_last=True))},
    "batch_size None": {"batch_size": None},
    "batch_size None, shuffled": {"batch_size": None, "shuffle": True},
    "generator": {"batch_size": 4, "shuffle": True, "generator": fresh(_generator)},
    "no samples": {"batch_size": 4, "sampler": []},
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", OPTIONS)
def test_same_batches_as_torch(kind: str, name: str) -> None:
    """Every way to choose samples gives torch's batches, with random augmentation, and torch's generator states."""
    assert_like_torch(kind, Augmented(21), num_workers=2, **OPTIONS[name])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_same_batches_for_every_number_of_workers(kind: str, workers: int) -> None:
    """Shuffled and augmented from global generators: torch's batches in each of three epochs."""
    run = assert_like_torch(kind, Augmented(23), epochs=3, num_workers=workers, batch_size=4, shuffle=True)
    assert not same(run.epochs[0], run.epochs[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_same_batches_with_persistent_workers(kind: str, workers: int) -> None:
    """Persistent workers continue their random numbers: each epoch's batches are torch's, whose workers do the same."""
    assert_like_torch(
        kind,
        Augmented(23),
        epochs=3,
        num_workers=workers,
        batch_size=4,
        shuffle=True,
        persistent_workers=True,
    )


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("prefetch_factor", [1, 5])
def test_prefetch_factor_changes_no_batch(kind: str, prefetch_factor: int) -> None:
    """The distance by which workers run ahead changes no batch and no generator."""
    assert_like_torch(kind, Augmented(40), num_workers=2, prefetch_factor=prefetch_factor, batch_size=3, shuffle=True)


@pytest.mark.thorough
@pytest.mark.spawns
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_same_batches_for_every_start_method(kind: str, method: str) -> None:
    """Spawned workers get the dataset by pickle and give torch's batches."""
    assert_like_torch(
        kind,
        Augmented(15),
        epochs=2,
        num_workers=2,
        batch_size=4,
        shuffle=True,
        multiprocessing_context=method,
        persistent_workers=True,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_type_of_default_collate(kind: str, workers: int) -> None:
    """Tensors, arrays, numbers, strings, bytes, named tuples and nests of them are delivered as by torch."""
    assert_like_torch(kind, Images(10), num_workers=workers, batch_size=4)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_without_batches(kind: str, workers: int) -> None:
    """With batch_size=None each sample goes through `default_convert` alone."""
    assert_like_torch(kind, Images(7), num_workers=workers, batch_size=None)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_getitems_gets_the_whole_batch(kind: str, workers: int) -> None:
    """`__getitems__` is called with all indices of a batch, also through a Subset."""
    for dataset in (WholeBatches(10), Subset(WholeBatches(10), [9, 2, 4, 4, 0])):
        run = assert_like_torch(kind, dataset, num_workers=workers, batch_size=4)
        assert float(run.epochs[0][0][0, 2]) % 4 == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_torchs_own_datasets(kind: str) -> None:
    """TensorDataset, StackDataset, ConcatDataset and Subset work unchanged."""
    tensors = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    stacked: StackDataset[Any] = StackDataset(x=Numbers(6), y=Numbers(6, 1))
    datasets: list[Any] = [tensors, stacked, ConcatDataset([Numbers(3), Numbers(4)]), Subset(tensors, [5, 1])]
    for dataset in datasets:
        assert_like_torch(kind, dataset, num_workers=2, batch_size=4, shuffle=True)


@pytest.mark.parametrize("kind", BOTH)
def test_indices_may_be_tensors(kind: str) -> None:
    """The sampler's index reaches the dataset unchanged, here as a zero-dimensional tensor."""
    order = torch.tensor([3, 0, 2])
    expected = collect("torch", torch.arange(8).reshape(4, 2), sampler=order, batch_size=2)
    assert_same(collect(kind, torch.arange(8).reshape(4, 2), sampler=order, batch_size=2, num_workers=2), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_any_object_with_getitem_and_len(kind: str) -> None:
    """A list, an array and a tensor are datasets."""
    datasets: list[Any] = [[1, 2, 3, 4, 5], np.arange(10).reshape(5, 2), torch.arange(10).reshape(5, 2)]
    for dataset in datasets:
        assert_like_torch(kind, dataset, num_workers=2, batch_size=2)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_order_gives_the_same_samples(kind: str) -> None:
    """With in_order=False every batch is delivered exactly once."""
    run = run_loader(kind, Numbers(50), num_workers=3, batch_size=4, in_order=False)
    firsts = sorted(float(batch[0, 0]) for batch in run.epochs[0])
    assert firsts == [400.0 * i for i in range(13)]


@pytest.mark.parametrize("kind", BOTH)
def test_one_worker_out_of_order_is_torchs(kind: str) -> None:
    """A single worker has one order, whatever in_order is."""
    assert_like_torch(kind, Augmented(20), num_workers=1, batch_size=3, in_order=False, shuffle=True)


@pytest.mark.parametrize("kind", BOTH)
def test_custom_collate_sees_the_samples_of_a_batch(kind: str) -> None:
    """collate_fn gets the list of samples, and its result is delivered unchanged: here uncollated lists."""
    run = assert_like_torch(kind, Augmented(9), num_workers=2, batch_size=4, collate_fn=identity)
    assert [len(batch) for batch in run.epochs[0]] == [4, 4, 1]
