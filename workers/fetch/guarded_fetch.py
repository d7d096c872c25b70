"""Fetches from blocking map datasets whose samples may raise, and goes on after those that do.

Data path: scheduler -> worker: [guarded_fetch] -> collate -> codec -> ring. Only with an `on_error` other than "raise".

It serves torch mode and seeded mode. In seeded mode the random numbers of a sample are those of its position, whatever
happened to other samples; so are those of its substitute and of the user's `on_error` function.

If a dataset's own `__getitems__` raises, the sample that raised is unknown. The batch is then fetched again, sample by
sample with `__getitem__`; in seeded mode each sample then has the random numbers of its own position instead of the
batch's. Without a `__getitem__` all samples of the batch count as bad. torch's `Subset` and `StackDataset` are read
sample by sample to begin with, unless the underlying dataset has a `__getitems__`.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from asyncloader.workers.fetch.error_notes import add_note, describe_sample
from asyncloader.workers.fetch.sample_errors import DROPPED, BadSample, NoSamples, SampleErrorHandler
from asyncloader.workers.fetch.seeding import SampleSeeder

__all__ = ["TolerantMap", "fetches_single"]


def fetches_single(dataset: Any) -> bool:
    """Whether the dataset has a `__getitem__` of its own, beyond those of torch's views and `Dataset`."""
    decoded = getattr(dataset, "_asyncloader_decoded", None)
    if decoded is not None:
        return fetches_single(decoded)
    if type(dataset) is Subset:
        return fetches_single(dataset.dataset)
    if type(dataset) is StackDataset:
        parts: Any = dataset.datasets
        return all(map(fetches_single, parts.values() if isinstance(parts, dict) else parts))
    if type(dataset) is ConcatDataset:
        return all(map(fetches_single, dataset.datasets))
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not Dataset.__getitem__


class TolerantMap:
    """Fetches samples of a blocking map dataset, past those that raise.

    Args:
        dataset: the dataset.
        handler: handles samples that raise.
        seeder: of the epoch; None in torch mode.
        replicas: difference of the positions of neighbouring samples.
    """

    def __init__(
        self, dataset: Any, handler: SampleErrorHandler, seeder: SampleSeeder | None = None, replicas: int = 1
    ) -> None:
        self._dataset = dataset
        self._handler = handler
        self._seeder = seeder
        self._replicas = replicas
        self._single = fetches_single(dataset)

    def sample(self, index: Any, position: int | None, bad: list[BadSample]) -> Any:
        """Return the sample of an index. In torch mode there is no position.

        Raises:
            NoSamples: it was dropped.
        """
        try:
            return self._make(index, position)
        except Exception as error:
            sample = self._on_sample_error(index, position, None, error, bad)
        if sample is DROPPED:
            raise NoSamples
        return sample

    def samples(self, index: Any, first: int | None, bad: list[BadSample], *, batched: bool) -> Any:
        """Return the samples of a batch of indices, without those that were dropped.

        Args:
            index: the indices.
            first: position of the first; None in torch mode.
            bad: gets the records.
            batched: try the dataset's `__getitems__` first.

        Raises:
            NoSamples: all were dropped.
        """
        failure: Exception | None = None
        if batched:
            if self._seeder is not None and first is not None:
                self._seeder.batch(first)
            try:
                return self._dataset.__getitems__(index)
            except Exception as error:
                if not self._single:
                    failure = error
        try:
            return self._one_by_one(index, first, failure, bad)
        finally:
            failure = None  # it refers to this frame

    def _one_by_one(self, index: Any, first: int | None, failure: Exception | None, bad: list[BadSample]) -> list[Any]:
        """`failure` is the error of the whole batch, if the sample that raised it is unknown."""
        dataset, seeder = self._dataset, self._seeder
        kept: list[Any] = []
        position, item = first, -1
        for item, one in enumerate(index):
            if failure is not None:
                sample = self._on_sample_error(one, position, item, failure, bad)
            else:
                try:
                    if seeder is not None and position is not None:
                        seeder.sample(position)
                    sample = dataset[one]
                except Exception as error:
                    sample = self._on_sample_error(one, position, item, error, bad)
            if sample is not DROPPED:
                kept.append(sample)
            if position is not None:
                position += self._replicas
        if not kept and item >= 0:
            raise NoSamples
        return kept

    def _make(self, index: Any, position: int | None) -> Any:
        if self._seeder is not None and position is not None:
            self._seeder.sample(position)
        return self._dataset[index]

    def _on_sample_error(
        self, index: Any, position: int | None, item: int | None, error: Exception, bad: list[BadSample]
    ) -> Any:
        make = (lambda another: self._make(another, position)) if self._single else None
        if self._seeder is not None and position is not None:
            self._seeder.sample(position)
        try:
            return self._handler.handle(index, position, error, bad, make)
        except Exception as raised:
            add_note(raised, describe_sample(index, item, position))
            raise
