"""Fetching from asynchronous streams: one sample after the other, as they come; only decoding is concurrent.

Data path: scheduler -> worker: [async_stream] -> collate -> codec -> ring. Map datasets are `async_fetch.py`'s.

Samples that raise, where they do not fail their batch, are dealt with as in `fetch.py`: each takes a place in its
batch. With a `decode` that runs in threads, samples are decoded while the next ones are read, and a batch's samples
beside one another; they keep their order. A sample that does not decode was read: the stream goes on behind it.

Fetching from a dataset whose shards the main process assigns. Data path: worker_stream -> [stream_async] -> collate.

Every batch is full but the last of the epoch: a sample that raises, where it does not fail its batch, leaves no gap.

What the fetchers of asynchronous streams have in common: tasks take turns, and a turn makes one batch.

Data path: scheduler -> worker: async_stream, lane_fetch -> [turn_fetch] -> collate -> codec -> ring.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextvars import Context, copy_context
from typing import Any, NamedTuple, Protocol

from asyncloader.workers.fetch.batching import Batching
from asyncloader.workers.fetch.decoding import Decoder
from asyncloader.workers.fetch.error_notes import add_note, stream_collation_place, stream_place
from asyncloader.workers.fetch.sample_errors import LOST, BadSample, Guard, NoSamples, StreamGuard
from asyncloader.workers.fetch.seeded_fetch import SeededAsyncIterator

__all__ = [
    "AsyncStreamFetcher",
    "TurnFetcher",
    "WorkerStreamFetcher",
    "WorkerStreamLike",
]


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


class WorkerStreamLike(Protocol):
    """The interface of `asyncloader.remote.worker_stream.WorkerStream`."""

    def next_batch(self) -> None:
        """The next batch begins."""
        ...

    @property
    def gave_back(self) -> bool:
        """Whether the stream has ended and given back what was taken or reported for the current batch."""
        ...

    async def refill(self) -> None:
        """After resuming: read the samples again that had been taken, but not returned."""
        ...

    async def take(self, size: int) -> list[Any]:
        """Its samples, fewer only where the epoch ends."""
        ...

    async def aclose(self) -> None:
        """Stop reading."""
        ...


class WorkerStreamFetcher(TurnFetcher):
    """Reads batches from a worker stream, which stands for `dataset_iter`. The arguments are `TurnFetcher`'s."""

    dataset_iter: WorkerStreamLike

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
