"""Fetches batches from asynchronous streams: samples are read one after the other; only decoding is concurrent.

Data path: scheduler -> worker: [stream_async] -> collate -> codec -> ring. Map datasets are fetched in `map_async.py`.

Tasks of one worker read its stream one at a time, in their order, and each makes one batch (`SerializedFetcher`). Two
kinds of streams are read so: asynchronous iterable datasets, and datasets whose shards the main process assigns to the
workers.

Samples that raise fail their batch, or are handled by the `on_error` policy. In an iterable dataset a dropped sample
leaves its batch one sample short, as in `factory.py`. In a dataset with assigned shards it leaves no gap: every batch
is full but the last one of the epoch.

With a `decode` that runs in threads, samples are decoded while the next ones are read, and those of a batch
concurrently; they keep their order. A sample whose decoding raises has been read: the stream goes on after it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextvars import Context, copy_context
from typing import Any, NamedTuple, Protocol

from asyncloader.workers.fetch.batching import Batching
from asyncloader.workers.fetch.decoding import Decoder
from asyncloader.workers.fetch.error_notes import add_note, describe_stream_collation, describe_stream_sample
from asyncloader.workers.fetch.sample_errors import DROPPED, BadSample, NoSamples, SampleErrorHandler, StreamErrors
from asyncloader.workers.fetch.seeded_fetch import SeededAsyncIterator

__all__ = [
    "AsyncStreamFetcher",
    "SerializedFetcher",
    "WorkerStreamFetcher",
    "WorkerStreamLike",
]


class SerializedFetcher(ABC):
    """Reads batches from a stream. A lock has the tasks of one worker read it one at a time, in their order.

    Args:
        stream: the stream; for an iterable dataset its iterator.
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
        self._lock = asyncio.Lock()

    async def fetch(self, index: Sequence[Any] | None, bad: list[BadSample] | None = None) -> Any:
        """The next batch. `bad` gets records of samples that raised.

        Raises:
            StopAsyncIteration: the stream is over.
            NoSamples: the guard dropped all samples of the batch.
        """
        async with self._lock:
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
                add_note(error, describe_stream_collation(first, self.samples, self._how.worker))
                raise

    @abstractmethod
    async def _batch(self, size: int, bad: list[BadSample]) -> list[Any]:
        """Return the next `size` samples; fewer, and sets `ended`, where the stream ends. Raises as `fetch` does."""

    def _seeds_drawn(self) -> int:
        """Number of sample seeds used so far; collation is seeded by the next one."""
        return self.samples


class _ReadSample(NamedTuple):
    """A sample that was read and is not decoded yet; if a thread decodes it, the future of the result."""

    number: int
    sample: Any
    context: Context


class AsyncStreamFetcher(SerializedFetcher):
    """Reads an asynchronous iterable dataset; `stream` is its iterator. Arguments as for `SerializedFetcher`."""

    def __init__(self, stream: AsyncIterator[Any], how: Batching, read: int) -> None:
        super().__init__(stream, how, read)
        self._stream_errors = StreamErrors()

    def _seeds_drawn(self) -> int:
        return int(getattr(self.dataset_iter, "samples", 0))

    async def _batch(self, size: int, bad: list[BadSample]) -> list[Any]:
        """As in `factory.py`: with an error handler, a sample that raises counts towards the size of its batch."""
        data: list[Any] = []  # samples; with a decoder, those to be decoded
        before = len(bad)
        try:
            for _ in range(size):
                try:
                    sample = await anext(self.dataset_iter)
                except StopAsyncIteration:
                    self.ended = True
                    break
                except Exception as error:
                    number = self.samples
                    if self._how.handler is None or self._stream_errors.failed(error, number):
                        add_note(error, describe_stream_sample(number, self._how.worker))
                        raise
                    self.samples += 1
                    sample = await self._on_sample_error(self._how.handler, number, error, bad, read=False)
                    if sample is not DROPPED:
                        data.append(sample)
                else:
                    self.samples += 1
                    data.append(
                        sample if self._how.decoder is None else self._begin_decoding(self._how.decoder, sample)
                    )
            dead = self._stream_errors.ended(self.samples) if self.ended else None
            if dead is not None:
                try:
                    raise dead
                finally:
                    del dead  # it refers to this frame
            if self.ended and len(data) < size and self._how.drop_last:
                _cancel_decoding(data)
                data = []
            elif self._how.decoder is not None:
                data = await self._decoded(self._how.decoder, data, bad)
        except BaseException:
            _cancel_decoding(data)
            raise
        bad[before:] = sorted(bad[before:], key=_by_position)
        if data or not size:
            return data
        if len(bad) > before or not self.ended:
            raise NoSamples
        raise StopAsyncIteration

    def _begin_decoding(self, decoder: Decoder, sample: Any) -> _ReadSample:
        context = copy_context()  # holds this sample's random numbers; the next sample gets others
        if decoder.threads is not None:
            sample = decoder.threads.call(decoder.function, sample, context)
        return _ReadSample(self.samples - 1, sample, context)

    async def _decoded(self, decoder: Decoder, data: list[Any], bad: list[BadSample]) -> list[Any]:
        kept: list[Any] = []
        for item in data:
            if not isinstance(item, _ReadSample):
                kept.append(item)  # the substitute from `on_error` for a sample that could not be read
                continue
            try:
                if decoder.threads is not None:
                    sample = await item.sample
                else:
                    sample = await decoder.decode(item.sample, item.context)
            except Exception as error:
                if self._how.handler is None:
                    add_note(error, describe_stream_sample(item.number, self._how.worker))
                    raise
                sample = await self._on_sample_error(self._how.handler, item.number, error, bad, read=True)
            if sample is not DROPPED:
                kept.append(sample)
        return kept

    async def _on_sample_error(
        self, handler: SampleErrorHandler, number: int, error: Exception, bad: list[BadSample], *, read: bool
    ) -> Any:
        """`read`: it had its number in the stream already."""
        if isinstance(self.dataset_iter, SeededAsyncIterator):
            if read:
                self.dataset_iter.again(self.samples - number)
            else:
                self.dataset_iter.lose()
        try:
            return await handler.handle_async(None, number, error, bad)
        except Exception as raised:
            add_note(raised, describe_stream_sample(number, self._how.worker))
            raise


def _cancel_decoding(data: list[Any]) -> None:
    """Cancel the decoding of samples that will not be used; decoding that has begun runs to its end."""
    for item in data:
        if isinstance(item, _ReadSample) and isinstance(item.sample, asyncio.Future):
            item.sample.add_done_callback(_retrieve_error)
            item.sample.cancel()


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _by_position(record: BadSample) -> int:
    return -1 if record.position is None else record.position


class WorkerStreamLike(Protocol):
    """The interface of `asyncloader.remote.worker_stream.WorkerStream`."""

    def next_batch(self) -> None:
        """Begin the next batch."""
        ...

    @property
    def gave_back(self) -> bool:
        """Whether the stream has ended and given back what was taken or reported for the current batch."""
        ...

    async def refill(self) -> None:
        """After resuming: read the samples again that had been taken, but not returned."""
        ...

    async def take(self, size: int) -> list[Any]:
        """Return the next samples; fewer than `size` only at the end of the epoch."""
        ...

    async def aclose(self) -> None:
        """Stop reading."""
        ...


class WorkerStreamFetcher(SerializedFetcher):
    """Reads batches from a worker stream. Arguments as for `SerializedFetcher`."""

    dataset_iter: WorkerStreamLike

    async def _batch(self, size: int, bad: list[BadSample]) -> list[Any]:
        before = len(bad)
        self.dataset_iter.next_batch()
        await self.dataset_iter.refill()  # an error here belongs to no sample, so no sample is dropped for it
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
                if self.dataset_iter.gave_back:  # the worker that gets these samples reports their errors, too
                    data.clear()
                    del bad[before:]
                break
            except Exception as error:
                await self._on_error(error, data, bad)
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
        """Decode the samples concurrently, as far as there are threads; append them in their order."""
        decoding: list[asyncio.Task[Any]] = []
        for number, sample in enumerate(samples, first):
            self._how.seed_sample(number)
            decoding.append(asyncio.ensure_future(decoder.decode(sample, copy_context())))
        try:
            for number, task in enumerate(decoding, first):
                try:
                    data.append(await task)
                except Exception as error:
                    await self._on_error(error, data, bad, number)
        finally:
            for task in decoding:
                task.cancel()
            await asyncio.gather(*decoding, return_exceptions=True)

    async def _on_error(
        self, error: Exception, data: list[Any], bad: list[BadSample], number: int | None = None
    ) -> None:
        """Handle a sample that raised: re-raise, drop it, or append a substitute.

        `number`: the sample's number in the stream if it has been read, else None.
        """
        if number is None:
            number, self.samples = self.samples, self.samples + 1
        try:
            if self._how.handler is None:
                raise error
            self._how.seed_sample(number)
            sample = await self._how.handler.handle_async(None, number, error, bad)
        except Exception as raised:
            add_note(raised, describe_stream_sample(number, self._how.worker))
            raise
        if sample is not DROPPED:
            data.append(sample)
