"""Fetches in seeded mode: each sample is made under random numbers of its own.

Data path: scheduler -> worker: [seeded_fetch] -> collate -> codec -> ring. Asynchronous fetchers are in `map_async.py`.

A dataset's own `__getitems__` and the user's `collate_fn` make a whole batch: they are seeded once per batch, by the
position of its first sample. torch's `Subset` and `StackDataset` have a `__getitems__` that only passes indices on;
they are read sample by sample, unless the underlying dataset has a `__getitems__` of its own.

The samples of a stream are numbered as they are read. A sample that raises has no number, and the next one, if any,
gets it. Where failures are skipped or replaced, each failure takes a number, so later samples are not affected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from torch.utils.data import StackDataset, Subset

from asyncloader.workers.fetch.error_notes import add_note, describe_batch, describe_collation, describe_sample
from asyncloader.workers.fetch.guarded_fetch import TolerantMap
from asyncloader.workers.fetch.sample_errors import BadSample, SampleErrorHandler
from asyncloader.workers.fetch.seeding import SampleSeeder

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
        handler: handles samples that raise; None: they fail their batch.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        seeder: SampleSeeder,
        replicas: int,
        seed_collate: bool,
        handler: SampleErrorHandler | None = None,
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._collate = collate
        self._seeder = seeder
        self._replicas = replicas
        self._seed_collate = seed_collate
        self._batched_get = auto_collation and fetches_batches(dataset)
        self._tolerant = None if handler is None else TolerantMap(dataset, handler, seeder, replicas)

    def fetch(self, possibly_batched_index: Any, bad: list[BadSample] | None = None) -> Any:
        """The batch. `bad` gets records of samples that raised.

        Raises:
            NoSamples: all of them were dropped.
        """
        first, index = possibly_batched_index
        data: Any
        if self._tolerant is not None:
            bad = [] if bad is None else bad
            if self._auto_collation:
                data = self._tolerant.samples(index, first, bad, batched=self._batched_get)
            else:
                data = self._tolerant.sample(index, first, bad)
        elif not self._auto_collation:
            self._seeder.sample(first)
            try:
                data = self._dataset[index]
            except Exception as error:
                add_note(error, describe_sample(index, None, first))
                raise
        elif self._batched_get:
            self._seeder.batch(first)
            try:
                data = self._dataset.__getitems__(index)
            except Exception as error:
                add_note(error, describe_batch(index))
                raise
        else:
            data = self._samples(first, index)
        if self._seed_collate:
            self._seeder.collation(first)
        try:
            return self._collate(data)
        except Exception as error:
            add_note(error, describe_collation(index, batched=self._auto_collation))
            raise

    def _samples(self, first: int, index: Any) -> list[Any]:
        seeder, dataset = self._seeder, self._dataset
        data: list[Any] = []
        position = first
        for one in index:
            seeder.sample(position)
            try:
                data.append(dataset[one])
            except Exception as error:
                add_note(error, describe_sample(one, len(data), position))
                raise
            position += self._replicas
        return data


class SeededIterator:
    """Wraps the iterator of a stream: seeds each sample by its number in the stream.

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

    def lose(self) -> None:
        """Count the sample that raised, and seed the code that makes its substitute."""
        self._seeder.sample(self.samples)
        self.samples += 1

    def again(self) -> None:
        """Seed the code that makes a substitute for the sample that was read last."""
        self._seeder.sample(self.samples - 1)


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

    def lose(self) -> None:
        """`SeededIterator.lose`."""
        self._seeder.sample(self.samples)
        self.samples += 1

    def again(self, back: int) -> None:
        """Seed the code that makes a substitute for the sample read `back` samples ago."""
        self._seeder.sample(self.samples - back)
