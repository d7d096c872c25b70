"""Fetchers of seeded mode: each sample is made under random numbers of its own.

Data path: scheduler -> worker: [seeded_fetch] -> collate -> codec -> ring. The asynchronous ones are in `fetch.py`.

A dataset's own `__getitems__`, and the user's `collate_fn`, make a batch at once: they are seeded once a batch, by the
position of its first sample. torch's `Subset` and `StackDataset` have a `__getitems__` that only passes indices on;
they are read sample by sample, unless what they pass them to has one of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from torch.utils.data import StackDataset, Subset

from asyncloader.workers.seeding import SampleSeeder

__all__ = ["SeededAsyncIterator", "SeededIterator", "SeededMapFetcher", "fetches_batches"]


def fetches_batches(dataset: Any) -> bool:
    """Whether the dataset has a `__getitems__` of its own, beyond those of torch's views."""
    if type(dataset) is Subset:
        return fetches_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(fetches_batches, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


class SeededMapFetcher:
    """Fetches ``(position, index)`` from a blocking map dataset.

    Args:
        dataset: the dataset.
        auto_collation: whether an index is a list of them.
        collate: from the list of samples, or the one sample, to the batch.
        seeder: of the epoch.
        replicas: difference of the positions of neighbouring samples.
        seed_collate: whether `collate` may draw random numbers.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        seeder: SampleSeeder,
        replicas: int,
        seed_collate: bool,
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._collate = collate
        self._seeder = seeder
        self._replicas = replicas
        self._seed_collate = seed_collate
        self._whole = auto_collation and fetches_batches(dataset)

    def fetch(self, possibly_batched_index: Any) -> Any:
        """The batch."""
        first, index = possibly_batched_index
        seeder, dataset = self._seeder, self._dataset
        data: Any
        if not self._auto_collation:
            seeder.sample(first)
            data = dataset[index]
        elif self._whole:
            seeder.batch(first)
            data = dataset.__getitems__(index)
        else:
            data = []
            position = first
            for one in index:
                seeder.sample(position)
                data.append(dataset[one])
                position += self._replicas
        if self._seed_collate:
            seeder.collation(first)
        return self._collate(data)


class SeededIterator:
    """A stream's iterator, whose samples are made under random numbers by their numbers in the stream.

    Args:
        iterator: the dataset's.
        seeder: of the epoch and this stream.
        samples: how many were read before.
    """

    def __init__(self, iterator: Iterator[Any], seeder: SampleSeeder, samples: int) -> None:
        self._iterator = iterator
        self._seeder = seeder
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._seeder.sample(self.samples)
        sample = next(self._iterator)
        self.samples += 1
        return sample


class SeededAsyncIterator:
    """`SeededIterator` for ``async for``."""

    def __init__(self, iterator: AsyncIterator[Any], seeder: SampleSeeder, samples: int) -> None:
        self._iterator = iterator
        self._seeder = seeder
        self.samples = samples

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        self._seeder.sample(self.samples)
        sample = await anext(self._iterator)
        self.samples += 1
        return sample
