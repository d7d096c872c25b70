"""How samples become batches, for the fetchers that have several of them in progress.

Data path: scheduler -> worker: async_fetch, thread_fetch, async_stream, lane_fetch -> [batching] -> codec -> ring.
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
    """Seeded mode for samples that are made concurrently: each has its own generators, the global ones are watched.

    Args:
        samples: seeds samples in their contexts.
        collate: seeds the user's collation, which is not concurrent, with the global generators; None: leave it alone.
        replicas: difference of the positions of neighbouring samples.
        watch: warns when samples draw from the global generators; None where others draw from them, too.
    """

    def __init__(
        self, samples: SampleSeeder, collate: SampleSeeder | None, replicas: int, watch: GlobalDrawCheck | None
    ) -> None:
        self.samples = samples
        self.replicas = replicas
        self._collate = collate
        self._watch = watch

    def collated(self, collate: Callable[[Any], Any], first: int, samples: Any) -> Any:
        """The batch of these samples, the first of which has position `first`."""
        if self._watch is not None:
            self._watch.look()
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
    """What the options say of it.

    Attributes:
        auto_collation: a batch is a list of samples, an index a list of indices; otherwise it is one sample.
        collate: from the list of samples, or the one sample, to the batch.
        drop_last: leave out a stream's last batch if it is short.
        seeding: of the epoch, a map dataset's index is ``(position, index)`` then; None in torch mode.
        handler: what becomes of samples that raise; None: the first one fails its batch.
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
        """The batch of a map dataset's samples, whose index this is."""
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
        """The position of a batch's sample, where the batch's first one is known: in seeded mode."""
        return None if first is None or self.seeding is None else first + item * self.seeding.replicas

    def seed_sample(self, position: int | None) -> None:
        """In seeded mode: give the sample at this position its own random numbers, in the context that runs this."""
        if self.seeding is not None and position is not None:
            self.seeding.samples.sample(position)

    def seed_batch(self, first: int | None) -> None:
        """The same for what makes a whole batch at once, whose first position this is."""
        if self.seeding is not None and first is not None:
            self.seeding.samples.batch(first)
