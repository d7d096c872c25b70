"""Fetching from a dataset whose parts the main process leases out. Data path: lane -> [lane_fetch] -> collate.

Every batch is full but the last of the epoch: a sample that raises, where it does not fail its batch, leaves no gap.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import Any, Protocol

from asyncloader.workers.bad_samples import LOST, BadSample, NoSamples
from asyncloader.workers.decoding import Decoder
from asyncloader.workers.error_notes import add_note, stream_place
from asyncloader.workers.turn_fetch import TurnFetcher

__all__ = ["LaneFetcher", "LaneLike"]


class LaneLike(Protocol):
    """What is asked of a lane: see `asyncloader.remote.lane.Lane`."""

    def next_batch(self) -> None:
        """The next batch begins."""
        ...

    @property
    def gave_back(self) -> bool:
        """The stream has ended, and what it gave and told of for the present batch is another lane's."""
        ...

    async def refill(self) -> None:
        """Take again what was taken already where the lane goes on from a state."""
        ...

    async def take(self, size: int) -> list[Any]:
        """Its samples, fewer only where the epoch ends."""
        ...

    async def aclose(self) -> None:
        """Stop reading."""
        ...


class LaneFetcher(TurnFetcher):
    """Reads batches from a lane, which stands for `dataset_iter`. The arguments are `TurnFetcher`'s."""

    dataset_iter: LaneLike

    async def _batch(self, size: int, bad: list[BadSample]) -> list[Any]:
        before = len(bad)
        self.dataset_iter.next_batch()
        await self.dataset_iter.refill()  # an error is no sample's: there is no place behind it
        data = await self._filled(size, bad)
        if len(data) < size and (not data or self._how.drop_last):
            if len(bad) > before:
                raise NoSamples
            raise StopAsyncIteration
        return data

    async def _filled(self, size: int, bad: list[BadSample]) -> list[Any]:
        data: list[Any] = []
        before = len(bad)
        while len(data) < size and not self.ended:
            wanted = size - len(data)
            try:
                samples = await self.dataset_iter.take(wanted)
            except StopAsyncIteration:
                self.ended = True
                if self.dataset_iter.gave_back:  # with what was bad: who gets it is told of that, too
                    data.clear()
                    del bad[before:]
                break
            except Exception as error:
                await self._bad(error, data, bad)
                continue
            self.ended = len(samples) < wanted
            first, self.samples = self.samples, self.samples + len(samples)
            if self._how.decoder is None:
                data += samples
            else:
                await self._decode(self._how.decoder, first, samples, data, bad)
        return data

    async def _decode(
        self, decoder: Decoder, first: int, samples: list[Any], data: list[Any], bad: list[BadSample]
    ) -> None:
        """All of them at a time, as far as there are threads; in order."""
        decoding: list[asyncio.Task[Any]] = []
        for place, sample in enumerate(samples, first):
            self._how.seed_sample(place)
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
            if self._how.guard is None:
                raise error
            self._how.seed_sample(place)
            sample = await self._how.guard.lost_async(None, place, error, bad)
        except Exception as raised:
            add_note(raised, stream_place(place, self._how.worker))
            raise
        if sample is not LOST:
            data.append(sample)
