"""Fetching from a dataset whose parts the main process leases out. Data path: lane -> [lane_fetch] -> collate.

Every batch is full but the last of the epoch: a sample that raises, where it does not fail its batch, leaves no gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, Protocol

from asyncloader.workers.async_fetch import AsyncSeeding
from asyncloader.workers.bad_samples import LOST, BadSample, Guard, NoSamples
from asyncloader.workers.decoding import Decoder
from asyncloader.workers.error_notes import add_note, stream_collation_place, stream_place

__all__ = ["LaneFetcher", "LaneLike"]


class LaneLike(Protocol):
    """What is asked of a lane: see `asyncloader.remote.lane.Lane`."""

    def next_batch(self) -> None:
        """The next batch begins."""
        ...

    async def take(self, size: int) -> list[Any]:
        """Its samples, fewer only where the epoch ends."""
        ...

    async def aclose(self) -> None:
        """Stop reading."""
        ...


class LaneFetcher:
    """Reads batches from a lane. Tasks of one worker read it one after the other, in their order.

    Args:
        lane: the worker's.
        auto_collation: whether a batch is a list of samples.
        collate: from the list of samples, or the one sample, to the batch.
        drop_last: leave out the last batch if it is short.
        seeding: of the epoch; None in torch mode.
        guard: what becomes of samples that raise; None: they fail their batch.
        worker: number of the worker.
        samples: samples that were read from the lane before.
        decoder: of samples that were read; None: they are collated as they are.
    """

    def __init__(
        self,
        lane: LaneLike,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        drop_last: bool,
        seeding: AsyncSeeding | None,
        guard: Guard | None,
        worker: int,
        samples: int,
        decoder: Decoder | None = None,
    ) -> None:
        # Names as in torch's fetcher.
        self.dataset_iter = lane
        self.collate_fn = collate
        self.ended = False
        self.samples = samples
        """Samples that were read from the lane."""
        self._decoder = decoder
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._seeding = seeding
        self._guard = guard
        self._worker = worker
        self._turn = asyncio.Lock()

    async def fetch(self, index: Sequence[Any] | None, bad: list[BadSample] | None = None) -> Any:
        """The next batch. `bad` gets records of samples that raised.

        Raises:
            StopAsyncIteration: the stream is over.
            NoSamples: the guard left out what there was.
        """
        async with self._turn:
            if self.ended:
                raise StopAsyncIteration
            first = self.samples
            records = [] if bad is None else bad
            before = len(records)
            size = len(index) if self._auto_collation and index is not None else 1
            self.dataset_iter.next_batch()
            data = await self._filled(size, records)
            if len(data) < size and (not data or self._drop_last):
                if len(records) > before:
                    raise NoSamples
                raise StopAsyncIteration
            try:
                batch = data if self._auto_collation else data[0]
                if self._seeding is None:
                    return self.collate_fn(batch)
                return self._seeding.collated(self.collate_fn, self.samples, batch)
            except Exception as error:
                add_note(error, stream_collation_place(first, self.samples, self._worker))
                raise

    async def _filled(self, size: int, bad: list[BadSample]) -> list[Any]:
        data: list[Any] = []
        while len(data) < size and not self.ended:
            wanted = size - len(data)
            try:
                samples = await self.dataset_iter.take(wanted)
            except StopAsyncIteration:
                self.ended = True
                break
            except Exception as error:
                await self._bad(error, data, bad)
                continue
            self.ended = len(samples) < wanted
            first, self.samples = self.samples, self.samples + len(samples)
            if self._decoder is None:
                data += samples
            else:
                await self._decode(self._decoder, first, samples, data, bad)
        return data

    async def _decode(
        self, decoder: Decoder, first: int, samples: list[Any], data: list[Any], bad: list[BadSample]
    ) -> None:
        """All of them at a time, as far as there are threads; in order."""
        decoding: list[asyncio.Task[Any]] = []
        for place, sample in enumerate(samples, first):
            if self._seeding is not None:
                self._seeding.samples.sample(place)
            decoding.append(asyncio.ensure_future(decoder.decode(sample, copy_context())))
        try:
            for place, task in enumerate(decoding, first):
                try:
                    data.append(await task)
                except Exception as error:
                    await self._bad(error, data, bad, place)
        finally:
            for task in decoding:
                task.cancel()
            await asyncio.gather(*decoding, return_exceptions=True)

    async def _bad(self, error: Exception, data: list[Any], bad: list[BadSample], place: int | None = None) -> None:
        """A sample raised: fail with it, or leave it out, or take a substitute. `place`: of one that was read."""
        if place is None:
            place, self.samples = self.samples, self.samples + 1
        try:
            if self._guard is None:
                raise error
            if self._seeding is not None:
                self._seeding.samples.sample(place)
            sample = await self._guard.lost_async(None, place, error, bad)
        except Exception as raised:
            add_note(raised, stream_place(place, self._worker))
            raise
        if sample is not LOST:
            data.append(sample)
