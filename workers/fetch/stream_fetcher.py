"""Fetches batches from streams: samples are read one after the other; only decoding is concurrent.

Data path: scheduler -> worker: [stream_fetcher -> sample] -> collate -> codec -> ring.

`StreamFetcher` reads iterable datasets, blocking and asynchronous ones, by torch's rules: short last batches,
`drop_last`, the end. `WorkerStreamFetcher` reads the shards that the main process assigns to this worker.

Samples that raise fail their batch, or are handled by the `on_error` policy. In an iterable dataset a dropped sample
leaves its batch one sample short, as in a map dataset, and later batches are unaffected. In a dataset with assigned
shards it leaves no gap: every batch is full but the last of the epoch.

In seeded mode the samples of a stream are numbered as they are read. A sample that raises has no number: the next
sample, if any, gets it. Where failures are skipped or replaced, each failure takes a number, so later samples are not
affected.

With a `decode` that runs in threads, samples are decoded while later samples are read, and several of a
batch at a time; they keep their order. A sample whose decoding raises has been read: the stream goes on after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NamedTuple, Protocol

from asyncloader.errors import is_about_sample
from asyncloader.workers.fetch.data_end import EndOfData, not_the_end
from asyncloader.workers.fetch.decoding import Decoder, Failure
from asyncloader.workers.fetch.error_notes import note_stream_collation, note_stream_sample, shard_and_key
from asyncloader.workers.fetch.sample import SampleMaker, SampleRequest, run_blocking
from asyncloader.workers.fetch.sample_errors import DROPPED, NoSamples, SkippedSample
from asyncloader.workers.fetch.stream_errors import StreamErrors


class StreamFetcher:
    """Reads batches from an iterable dataset.

    Args:
        stream: the dataset's iterator.
        maker: decodes and seeds the samples, and applies the error policy.
        auto_collation: a batch is a list of samples; otherwise it is one sample.
        collate: from the list of samples, or the single sample, to the batch.
        drop_last: drop the last batch if it is short.
        read: samples that were read from the stream before.
    """

    def __init__(
        self,
        stream: Any,
        maker: SampleMaker,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        drop_last: bool = False,
        read: int = 0,
    ) -> None:
        # Names as in torch's fetcher.
        self.dataset_iter = stream
        self.collate_fn = collate
        self.ended = False
        self.samples = read
        """Samples that were read from the stream."""
        self._maker = maker
        self._auto_collation = auto_collation
        self._drop_last = drop_last and auto_collation
        self._stream_errors = StreamErrors()
        self._lock = asyncio.Lock()
        self._end = StopAsyncIteration if maker.asynchronous else StopIteration
        # Then `_torch_samples` is enough, without a coroutine for each batch.
        self._torch = maker.seeding is None and maker.decoder is None and maker.handler is None

    def fetch(self, index: Sequence[Any] | None, records: list[SkippedSample] | None = None) -> Any:
        """Return the next batch. For blocking datasets.

        Args:
            index: its length is the number of samples in a batch.
            records: gets the samples that raised.

        Raises:
            EndOfData: the stream has ended.
            NoSamples: all samples of the batch were dropped.
        """
        if self.ended:
            raise EndOfData
        first = self.samples
        data: Any
        if self._torch:
            data = self._torch_samples(index)
        else:
            size = 1 if index is None or not self._auto_collation else len(index)
            samples = run_blocking(self._batch(size, [] if records is None else records))
            if samples is None:
                raise EndOfData
            data = samples if self._auto_collation else samples[0]
        return self._collated(self.collate_fn, first, data)

    async def fetch_async(self, index: Sequence[Any] | None, records: list[SkippedSample] | None = None) -> Any:
        """Return the next batch of an asynchronous stream. See `fetch`. Several calls read one after the other, in
        their order, which a lock keeps.

        Raises:
            EndOfData: the stream has ended.
            NoSamples: all samples of the batch were dropped.
        """
        async with self._lock:
            if self.ended:
                raise EndOfData
            first = self.samples
            size = 1 if index is None or not self._auto_collation else len(index)
            samples = await self._batch(size, [] if records is None else records)
            if samples is None:
                raise EndOfData
            data = samples if self._auto_collation else samples[0]
            seeding = self._maker.seeding
            if seeding is None:
                return self._collated(self.collate_fn, first, data)
            # Seeded by the next sample's number.
            return self._collated(partial(seeding.collated, self.collate_fn, self.samples), first, data)

    def _collated(self, collate: Callable[[Any], Any], first: int, data: Any) -> Any:
        """Collate the samples from number `first` on."""
        try:
            return collate(data)
        except StopIteration as stop:  # a `for` loop would take it for the stream's end
            note_stream_collation(stop, first, self.samples, self._maker.stream, data)
            raise not_the_end(stop, "collate_fn") from stop
        except Exception as error:
            note_stream_collation(error, first, self.samples, self._maker.stream, data)
            raise

    def _torch_samples(self, index: Any) -> Any:
        """Return the samples as torch's fetcher gets them: neither seed, nor decoding, nor error policy."""
        iterator = self.dataset_iter
        data: list[Any] = []
        try:
            for _ in index if self._auto_collation else (None,):
                data.append(next(iterator))  # noqa: PERF401 - a comprehension cannot end with a StopIteration
        except StopIteration:
            self.ended = self._auto_collation  # else the iterator is asked again
        except Exception as error:
            self.samples += len(data)
            note_stream_sample(error, self.samples, self._maker.stream)
            raise
        self.samples += len(data)
        if not data or (self._drop_last and len(data) < len(index)):
            raise EndOfData
        return data if self._auto_collation else data[0]

    async def _batch(self, size: int, records: list[SkippedSample]) -> Sequence[Any] | None:
        """Return the next `size` samples; fewer where the stream ends or samples were dropped. None: it has ended.

        With an error policy, a sample that raises counts towards the size of its batch.
        """
        maker, iterator = self._maker, self.dataset_iter
        decoder, asynchronous = maker.decoder, maker.asynchronous
        seed = None if maker.seeding is None else maker.seeding.samples.sample
        data: list[Any] = []  # samples, or those to be decoded
        before = len(records)
        over = False
        try:
            for _ in range(size):
                number = self.samples
                # Before the read: the stream's own code draws from the sample's random numbers.
                if seed is not None:
                    seed(number)
                try:
                    sample = await anext(iterator) if asynchronous else next(iterator)
                # Only the end of this kind of stream: a blocking stream that raises StopAsyncIteration has failed.
                except self._end:
                    over = True
                    break
                except Exception as error:
                    if maker.handler is None or not is_about_sample(error) or self._stream_errors.failed(error, number):
                        maker.note(error, SampleRequest(None, number))
                        raise
                    # It takes a number: later samples have the same random numbers, whether it raises or not.
                    self.samples += 1
                    sample = await maker.on_error(SampleRequest(None, number), error, records)
                else:
                    self.samples += 1
                    if decoder is not None:
                        sample = await self._begin_decoding(decoder, sample, records)
                if sample is not DROPPED:
                    data.append(sample)
            if over:
                self._end_stream()
            if over and self._drop_last:
                _cancel_decoding(data)
                data = []
            elif decoder is not None and asynchronous:
                data = await self._decoded(decoder, data, records)
        # Also for a cancellation: no thread should decode for a batch that is not taken.
        except BaseException:
            _cancel_decoding(data)
            raise
        # Errors of decoding come after those of reading: sorted, the records are in the order of the stream.
        records[before:] = sorted(records[before:], key=_by_position)
        if data or not size:
            return data
        if len(records) > before or not over:
            raise NoSamples
        return None

    def _end_stream(self) -> None:
        """The iterator says that it has ended.

        Raises:
            Exception: an error ended it: a generator is over once it has raised.
        """
        # Without automatic batching a blocking iterator is asked again, as in torch.
        self.ended = self._auto_collation or self._maker.asynchronous
        dead = self._stream_errors.ended(self.samples)
        if dead is None:
            return
        # Also without automatic batching: a generator that has raised gives nothing more.
        self.ended = True
        try:
            raise dead
        finally:
            del dead  # it refers to this frame

    async def _begin_decoding(self, decoder: Decoder, sample: Any, records: list[SkippedSample]) -> Any:
        """Decode the sample that was read last; for an asynchronous stream only begin, and go on in `_decoded`."""
        request = SampleRequest(None, self.samples - 1)
        if self._maker.asynchronous:
            context = copy_context()  # holds this sample's random numbers; the next sample gets others
            if decoder.threads is not None:
                sample = decoder.call_in_thread(sample, context)
            return _ReadSample(request, sample, context)
        try:
            return decoder.call(sample)
        except Exception as error:
            return await self._maker.on_error(request, error, records)

    async def _decoded(self, decoder: Decoder, data: list[Any], records: list[SkippedSample]) -> list[Any]:
        kept: list[Any] = []
        # In the order of the stream, whichever thread is ready first.
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
                sample = await self._maker.on_error(item.request, error, records)
            if sample is not DROPPED:
                kept.append(sample)
        return kept


class _ReadSample(NamedTuple):
    """A sample that was read and is not decoded yet; if a thread decodes it, the future of the result."""

    request: SampleRequest
    sample: Any
    context: Context


def _cancel_decoding(data: list[Any]) -> None:
    """Cancel the decoding of samples that will not be used; decoding that has begun runs to its end."""
    for item in data:
        if isinstance(item, _ReadSample) and isinstance(item.sample, asyncio.Future):
            # Otherwise asyncio would log the error of a decoding that has begun, because no code asks for it.
            item.sample.add_done_callback(_retrieve_error)
            item.sample.cancel()


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _by_position(record: SkippedSample) -> int:
    return -1 if record.position is None else record.position


class WorkerStreamLike(Protocol):
    """The interface of `asyncloader.remote.worker_stream.WorkerStream`."""

    def next_batch(self) -> None:
        """Begin the next batch."""
        ...

    @property
    def gave_back(self) -> bool:
        """Whether the stream has ended and given back the samples taken or reported for the current batch."""
        ...

    async def refill(self) -> None:
        """After resuming: read the samples again that had been taken, but not returned."""
        ...

    async def take(self, size: int) -> Sequence[Any]:
        """Return the next samples; fewer than `size` only at the end of the epoch. The sequence may make each sample
        when it is asked for.
        """
        ...

    async def aclose(self) -> None:
        """Stop reading."""
        ...


class WorkerStreamFetcher(StreamFetcher):
    """Reads batches from a worker stream. Arguments as for `StreamFetcher`, and:

    Args:
        by_column: `collate` takes samples that are known by column; otherwise it gets a list.

    A transport's error is no sample's: it is raised, whatever the error policy, takes no number and loses nothing. The
    next call goes on where reading stopped.
    """

    dataset_iter: WorkerStreamLike

    def __init__(self, *args: Any, by_column: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._by_column = by_column
        self._kept: list[Any] = []

    async def _batch(self, size: int, records: list[SkippedSample]) -> Sequence[Any] | None:
        before = len(records)
        self.dataset_iter.next_batch()
        await self.dataset_iter.refill()  # an error here belongs to no sample, so no sample is dropped for it
        data = await self._filled(size, records)
        if len(data) == size or (data and not self._drop_last):
            return data
        if len(records) > before:
            raise NoSamples
        return None

    async def _filled(self, size: int, records: list[SkippedSample]) -> Sequence[Any]:
        # Samples of a batch that could not be filled, because its shard could not be read, are the next batch's.
        data, self._kept = self._kept, []
        before = len(records)
        while len(data) < size and not self.ended:
            wanted = size - len(data)
            try:
                samples = await self.dataset_iter.take(wanted)
            except StopAsyncIteration:
                self.ended = True
                if self.dataset_iter.gave_back:  # the worker that gets these samples reports their errors, too
                    data.clear()
                    del records[before:]
                break
            except Exception as error:
                number = self.samples
                # After an error that is no sample's, the shard is read again at the next call, but not the samples that
                # were read before.
                if not is_about_sample(error):
                    self._kept = data
                    self._maker.note(error, SampleRequest(None, number))
                    raise
                self.samples += 1
                sample = await self._maker.on_error(SampleRequest(None, number), error, records)
                if sample is not DROPPED:
                    data.append(sample)
                continue
            self.ended = len(samples) < wanted
            first, self.samples = self.samples, self.samples + len(samples)
            if self._maker.decoder is not None:
                await self._decode(self._maker.decoder, first, samples, data, records)
            elif self._by_column and not data and (self.ended or len(samples) == size):
                return samples
            else:
                data += samples
        return data

    async def _decode(
        self, decoder: Decoder, first: int, samples: Sequence[Any], data: list[Any], records: list[SkippedSample]
    ) -> None:
        """Decode the samples concurrently, as far as there are threads; append them in their order."""
        contexts: list[Context] = []
        for number in range(first, first + len(samples)):
            # In the current context, of which the next line takes a copy for this sample's decoding.
            self._maker.seed(number)
            contexts.append(copy_context())
        found = await decoder.decode_each(samples, contexts, until_failure=self._maker.handler is None)
        try:
            for number, result in enumerate(found, first):
                sample = result
                if isinstance(result, Failure):
                    request = SampleRequest(shard_and_key(samples[number - first]), number)
                    sample = await self._maker.on_error(request, result.error, records)
                if sample is not DROPPED:
                    data.append(sample)
        finally:
            found.clear()  # it refers to errors, whose tracebacks refer to this frame
