"""What the fetchers of asynchronous streams have in common: tasks take turns, and a turn makes one batch.

Data path: scheduler -> worker: async_stream, lane_fetch -> [turn_fetch] -> collate -> codec -> ring.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from asyncloader.workers.bad_samples import BadSample
from asyncloader.workers.batching import Batching
from asyncloader.workers.error_notes import add_note, stream_collation_place

__all__ = ["TurnFetcher"]


class TurnFetcher(ABC):
    """Reads batches from a stream. Tasks of one worker read it one after the other, in their order.

    Args:
        stream: what is read; for a user's dataset its iterator.
        how: how samples become batches.
        read: samples that were read from the stream before.
    """

    def __init__(self, stream: Any, how: Batching, read: int) -> None:
        # Names as in torch's fetcher.
        self.dataset_iter = stream
        self.collate_fn = how.collate
        self.ended = False
        self._how = how
        self.samples = read
        """Samples that were read from the stream."""
        self._turn = asyncio.Lock()

    async def fetch(self, index: Sequence[Any] | None, bad: list[BadSample] | None = None) -> Any:
        """The next batch. `bad` gets records of samples that raised.

        Raises:
            StopAsyncIteration: the stream is over.
            NoSamples: the guard left all samples of the batch out.
        """
        async with self._turn:
            if self.ended:
                raise StopAsyncIteration
            first, size = self.samples, 1
            if self._how.auto_collation:
                assert index is not None
                size = len(index)
            samples = await self._batch(size, [] if bad is None else bad)
            data = samples if self._how.auto_collation else samples[0]
            try:
                if self._how.seeding is None:
                    return self.collate_fn(data)
                return self._how.seeding.collated(self.collate_fn, self._seeds_drawn(), data)
            except Exception as error:
                add_note(error, stream_collation_place(first, self.samples, self._how.worker))
                raise

    @abstractmethod
    async def _batch(self, size: int, bad: list[BadSample]) -> list[Any]:
        """The next samples, `size` at most, fewer only where the stream ends; sets `ended` then. Errors as `fetch`."""

    def _seeds_drawn(self) -> int:
        """The number of samples that had random numbers of their own so far: collation gets the next ones."""
        return self.samples
