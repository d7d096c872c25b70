"""Describes how samples become batches, for the fetchers that have several samples in progress.

Data path: scheduler -> worker: map_async, map_threads, stream_async -> [batching] -> codec -> ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncloader.workers.fetch.decoding import Decoder
from asyncloader.workers.fetch.error_notes import add_note, describe_collation
from asyncloader.workers.fetch.sample_errors import SampleErrorHandler
from asyncloader.workers.fetch.seeding import GlobalDrawCheck, SampleSeeder, global_generators_kept

__all__ = ["AsyncSeeding", "Batching"]


class AsyncSeeding:
    """Seeds samples that are made concurrently: each gets generators of its own.

    Args:
        samples: seeds samples in their contexts.
        collate: seeds the global generators for the user's collation, which is not concurrent; None: it is not seeded.
        replicas: difference of the positions of neighbouring samples.
        watch: warns when samples draw from the global generators; None where other code draws from them, too.
    """

    def __init__(
        self, samples: SampleSeeder, collate: SampleSeeder | None, replicas: int, watch: GlobalDrawCheck | None
    ) -> None:
        self.samples = samples
        self.replicas = replicas
        self._collate = collate
        self._watch = watch

    def collated(self, collate: Callable[[Any], Any], first: int, samples: Any) -> Any:
        """Collate these samples; the first one has position `first`."""
        if self._watch is not None:
            self._watch.check()
        if self._collate is None:
            return collate(samples)
        if self._watch is None:
            with global_generators_kept():
                self._collate.collation(first)
                return collate(samples)
        self._collate.collation(first)
        try:
            return collate(samples)
        finally:
            self._watch.rebase()


@dataclass(frozen=True, slots=True)
class Batching:
    """The options by which samples become batches.

    Attributes:
        auto_collation: a batch is a list of samples, an index a list of indices; otherwise it is one sample.
        collate: from the list of samples, or the one sample, to the batch.
        drop_last: drop a stream's last batch if it is short.
        seeding: the epoch's seeding; a map dataset's index is ``(position, index)`` then. None in torch mode.
        handler: handles samples that raise; None: the first one fails its batch.
        decoder: the user's `decode`; None: samples are collated as they are read.
        worker: number of the worker, for the text of errors.
    """

    auto_collation: bool
    collate: Callable[[Any], Any]
    drop_last: bool = False
    seeding: AsyncSeeding | None = None
    handler: SampleErrorHandler | None = None
    decoder: Decoder | None = None
    worker: int = 0

    def collated(self, index: Any, samples: Any) -> Any:
        """Collate the samples of a map dataset's batch with this index."""
        first: int | None = None
        if self.seeding is not None:
            first, index = index
        try:
            if self.seeding is not None and first is not None:
                return self.seeding.collated(self.collate, first, samples)
            return self.collate(samples)
        except Exception as error:
            add_note(error, describe_collation(index, batched=self.auto_collation))
            raise

    def position(self, first: int | None, item: int) -> int | None:
        """Return the position of a batch's sample, given the position of the first one; None in torch mode."""
        return None if first is None or self.seeding is None else first + item * self.seeding.replicas

    def seed_sample(self, position: int | None) -> None:
        """In seeded mode: give the sample at this position its own random numbers, in the current context."""
        if self.seeding is not None and position is not None:
            self.seeding.samples.sample(position)

    def seed_batch(self, first: int | None) -> None:
        """In seeded mode: seed the code that makes a whole batch, by the position of its first sample."""
        if self.seeding is not None and first is not None:
            self.seeding.samples.batch(first)
