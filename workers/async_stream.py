"""Fetching from asynchronous streams: one sample after the other, as they come; only decoding is concurrent.

Data path: scheduler -> worker: [async_stream] -> collate -> codec -> ring. Map datasets are `async_fetch.py`'s.

Samples that raise, where they do not fail their batch, are dealt with as in `fetch.py`: each takes a place in its
batch. With a `decode` that runs in threads, samples are decoded while the next ones are read, and a batch's samples
beside one another; they keep their order. A sample that does not decode was read: the stream goes on behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import Context, copy_context
from typing import Any, NamedTuple

from asyncloader.workers.bad_samples import LOST, BadSample, Guard, NoSamples, StreamGuard
from asyncloader.workers.batching import Batching
from asyncloader.workers.decoding import Decoder
from asyncloader.workers.error_notes import add_note, stream_place
from asyncloader.workers.seeded_fetch import SeededAsyncIterator
from asyncloader.workers.turn_fetch import TurnFetcher

__all__ = ["AsyncStreamFetcher"]


class _Read(NamedTuple):
    """A sample that was read, and is not decoded yet: a future of the decoded one where a thread is at it."""

    place: int
    sample: Any
    context: Context


class AsyncStreamFetcher(TurnFetcher):
    """Reads an asynchronous iterable dataset, which `stream` is the iterator of. The arguments are `TurnFetcher`'s."""

    def __init__(self, stream: AsyncIterator[Any], how: Batching, read: int) -> None:
        super().__init__(stream, how, read)
        self._progress = StreamGuard()

    def _seeds_drawn(self) -> int:
        return int(getattr(self.dataset_iter, "samples", 0))

    async def _batch(self, size: int, bad: list[BadSample]) -> list[Any]:
        """As in `fetch.py`: a sample that raises takes a place in its batch, if there is a guard."""
        data: list[Any] = []  # samples; with a decoder what is to be decoded
        before = len(bad)
        try:
            for _ in range(size):
                try:
                    sample = await anext(self.dataset_iter)
                except StopAsyncIteration:
                    self.ended = True
                    break
                except Exception as error:
                    place = self.samples
                    if self._how.guard is None or self._progress.failed(error, place):
                        add_note(error, stream_place(place, self._how.worker))
                        raise
                    self.samples += 1
                    sample = await self._lost(self._how.guard, place, error, bad, read=False)
                    if sample is not LOST:
                        data.append(sample)
                else:
                    self.samples += 1
                    data.append(
                        sample if self._how.decoder is None else self._begin_decoding(self._how.decoder, sample)
                    )
            dead = self._progress.ended(self.samples) if self.ended else None
            if dead is not None:
                try:
                    raise dead
                finally:
                    del dead  # it refers to this frame
            if self.ended and len(data) < size and self._how.drop_last:
                _give_up(data)
                data = []
            elif self._how.decoder is not None:
                data = await self._decoded(self._how.decoder, data, bad)
        except BaseException:
            _give_up(data)
            raise
        bad[before:] = sorted(bad[before:], key=_by_place)
        if data or not size:
            return data
        if len(bad) > before or not self.ended:
            raise NoSamples
        raise StopAsyncIteration

    def _begin_decoding(self, decoder: Decoder, sample: Any) -> _Read:
        context = copy_context()  # with the sample's random numbers: the next one gets others
        if decoder.threads is not None:
            sample = decoder.threads.call(decoder.function, sample, context)
        return _Read(self.samples - 1, sample, context)

    async def _decoded(self, decoder: Decoder, data: list[Any], bad: list[BadSample]) -> list[Any]:
        kept: list[Any] = []
        for item in data:
            if not isinstance(item, _Read):
                kept.append(item)  # what `on_error` gave for a sample that could not be read
                continue
            try:
                if decoder.threads is not None:
                    sample = await item.sample
                else:
                    sample = await decoder.decode(item.sample, item.context)
            except Exception as error:
                if self._how.guard is None:
                    add_note(error, stream_place(item.place, self._how.worker))
                    raise
                sample = await self._lost(self._how.guard, item.place, error, bad, read=True)
            if sample is not LOST:
                kept.append(sample)
        return kept

    async def _lost(self, guard: Guard, place: int, error: Exception, bad: list[BadSample], *, read: bool) -> Any:
        """`read`: it had its number in the stream already."""
        if isinstance(self.dataset_iter, SeededAsyncIterator):
            if read:
                self.dataset_iter.again(self.samples - place)
            else:
                self.dataset_iter.lose()
        try:
            return await guard.lost_async(None, place, error, bad)
        except Exception as raised:
            add_note(raised, stream_place(place, self._how.worker))
            raise


def _give_up(data: list[Any]) -> None:
    """What is being decoded will not be used: what has not begun need not."""
    for item in data:
        if isinstance(item, _Read) and isinstance(item.sample, asyncio.Future):
            item.sample.add_done_callback(_heard)
            item.sample.cancel()


def _heard(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _by_place(record: BadSample) -> int:
    return -1 if record.position is None else record.position
