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

A batch that is interrupted, by a store that failed or by Ctrl-C, keeps the samples that were read for it: the next call
goes on with them.

With a `decode` that runs in threads, samples are decoded while later samples are read, and several of a batch at a
time; they keep their order. A sample whose decoding raises has been read: the stream goes on after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from itertools import pairwise, repeat
from time import perf_counter
from typing import Any, NamedTuple

from asyncloader.base.events import SkippedSample
from asyncloader.base.shielding import retrieve_error
from asyncloader.errors import is_about_sample, is_tried_again, left_a_generator
from asyncloader.telemetry.slow_samples import CHEAP_S
from asyncloader.workers.fetch.data_end import EndOfData, StreamErrors, not_the_end, over_after
from asyncloader.workers.fetch.error_notes import note_stream_collation, note_stream_sample, shard_and_key
from asyncloader.workers.fetch.sample import SampleMaker, SampleRequest, run_blocking
from asyncloader.workers.fetch.sample_errors import DROPPED, NoSamples
from asyncloader.workers.fetch.threads import Failure, run_each

_OVER: Any = object()


class _Undecoded(NamedTuple):
    """Samples that were read and are not decoded yet, or the `Failure` of reading one: the number of the first, and the
    results that threads are making of them, if these have begun.
    """

    first: int
    samples: Any
    begun: list[asyncio.Future[Any]]

    def cancel(self) -> _Undecoded:
        """Decode no more of them; a call that has begun runs to its end. Returns them, not begun."""
        for future in self.begun:
            future.add_done_callback(retrieve_error)
            future.cancel()
        return _Undecoded(self.first, self.samples, [])


def _outcome(result: asyncio.Future[Any]) -> Any:
    error = result.exception()
    return Failure(error) if isinstance(error, Exception) else result.result()  # which raises what ends a process


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
        self.interrupts: Callable[[BaseException], bool] = is_tried_again
        """Whether an error only interrupts its batch, which keeps its samples. In a worker Ctrl-C does not come."""
        self.keeps = False
        """Whether a batch that was returned may be interrupted later: until `taken` the next call returns it again."""
        self.broken: tuple[int, str] | None = None
        """Where what interrupted a batch passed through a generator, which is over thereby, and the error's name."""
        # Of the batch that is made: its samples, how many it has with those that were dropped, the sample that was read
        # and is not decoded (one at most), and the records of a call that was interrupted.
        self._data: list[Any] = []
        self._count = 0
        self._read: list[Any] = []
        self._undecoded: _Undecoded | None = None
        self._records: list[SkippedSample] = []
        self._maker = maker
        self._auto_collation = auto_collation
        self._drop_last = drop_last and auto_collation
        self._stream_errors = StreamErrors()
        self._lock = asyncio.Lock()
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
        if self.ended and not self._count:
            raise EndOfData
        data: Any
        try:
            if self._torch:
                data = self._torch_samples(index)
            else:
                size = 1 if index is None or not self._auto_collation else len(index)
                samples = run_blocking(self._batch(size, [] if records is None else records))
                if samples is None:
                    raise EndOfData
                data = samples if self._auto_collation else samples[0]
            batch = self._collated(self.collate_fn, data)
        except BaseException as error:
            self._failed(error)
            raise
        if not self.keeps:
            self._end_batch()
        return batch

    def taken(self) -> None:
        """The consumer has the batch, or an error in its place."""
        if self.keeps:
            self._data, self._count = [], 0

    def _end_batch(self) -> None:
        self._data, self._count, self._undecoded = [], 0, None

    def _failed(self, error: BaseException) -> None:
        """Keep the batch's samples, if it is tried again."""
        if not self.interrupts(error):
            self.samples += len(self._read)
            self._read = []
            # For a package that is missing no sample is left out either.
            kept, undecoded = ([], None) if is_about_sample(error) else (self._data, self._undecoded)
            self._end_batch()
            self._data, self._undecoded = kept, undecoded
            self._count = len(kept) + (0 if undecoded is None else len(undecoded.samples))
        elif left_a_generator(error):
            self.broken = self.samples, type(error).__name__

    def _check_end(self, number: int) -> None:
        """The stream says that it has ended, where sample `number` was expected."""
        if self.broken is not None and self.broken[0] == number:
            raise over_after("the dataset's iterator", self.broken[1])

    async def fetch_async(self, index: Sequence[Any] | None, records: list[SkippedSample] | None = None) -> Any:
        """Return the next batch of an asynchronous stream. See `fetch`. Several calls read one after the other, in
        their order, which a lock keeps.

        Raises:
            EndOfData: the stream has ended.
            NoSamples: all samples of the batch were dropped.
        """
        async with self._lock:
            if self.ended and not self._count:
                raise EndOfData
            size = 1 if index is None or not self._auto_collation else len(index)
            try:
                samples = await self._batch(size, [] if records is None else records)
                if samples is None:
                    raise EndOfData
                data, collate = samples if self._auto_collation else samples[0], self.collate_fn
                if self._maker.seeding is not None:
                    # Seeded by the next sample's number.
                    collate = partial(self._maker.seeding.collated, collate, self.samples)
                batch = self._collated(collate, data)
            except BaseException as error:
                self._failed(error)
                raise
            self._end_batch()
            return batch

    def _collated(self, collate: Callable[[Any], Any], data: Any) -> Any:
        try:
            return collate(data)
        except Exception as error:
            note_stream_collation(error, self.samples - self._count, self.samples, self._maker.stream)
            if isinstance(error, StopIteration):  # a `for` loop would take it for the stream's end
                raise not_the_end(error, "collate_fn") from error
            raise

    def _torch_samples(self, index: Any) -> Any:
        """Return the samples as torch's fetcher gets them: neither seed, nor decoding, nor error policy."""
        data, size = self._data, len(index) if self._auto_collation else 1
        slow, ends = self._maker.slow, [perf_counter()]
        timing, had = slow.fetched_s >= CHEAP_S * slow.fetched, len(data)
        try:
            while timing and not self.ended and len(data) < size:
                data.extend(map(next, (self.dataset_iter,)))
                if len(data) < had + len(ends):
                    break
                ends.append(perf_counter())
            if not self.ended and not timing:
                # One call into C moves all samples, so Ctrl-C cannot lose one, except in the stream's own code. Not
                # `islice`, which would call `iter` again.
                data.extend(map(next, repeat(self.dataset_iter, size - len(data))))
        except Exception as error:
            note_stream_sample(error, self.samples + len(data) - self._count, self._maker.stream)
            raise
        finally:
            self.samples, self._count = self.samples + len(data) - self._count, len(data)
        if timing:
            self._note(ends, self.samples - len(ends) + 1, data[had:])
        else:
            slow.passed(len(data) - had, perf_counter() - ends[0])
        if len(data) < size:
            self._check_end(self.samples)
            self.ended = self._auto_collation  # else the iterator is asked again
        if not data or (self._drop_last and len(data) < size):
            raise EndOfData
        return data if self._auto_collation else data[0]

    def _note(self, ends: Sequence[float], first: int, samples: Sequence[Any]) -> None:
        """Count samples that were read, and perhaps decoded, one after the other: when each ended, first, when the
        first began; their numbers in the stream.
        """
        took = [after - before for before, after in pairwise(ends)]
        self._maker.slow.note(took, partial(self._name, first, samples), ends[-1] - ends[0])

    def _name(self, first: int, samples: Sequence[Any], item: int) -> str:
        """The name of a sample in a list of the slowest."""
        where, stream = shard_and_key(samples[item]), self._maker.stream
        if where is not None:
            key, _, url = where.rpartition(" of ")
            return f"{key} of {url[1:-1].rpartition('/')[2]}"
        return f"sample {first + item}" + (f" of {stream}" if stream else "")

    async def _batch(self, size: int, records: list[SkippedSample]) -> Sequence[Any] | None:
        """Return the next `size` samples; fewer where the stream ends or samples were dropped. None: it has ended.

        With an error policy, a sample that raises counts towards the size of its batch.
        """
        maker, iterator = self._maker, self.dataset_iter
        decoder, asynchronous = maker.decoder, maker.asynchronous
        later = asynchronous and decoder is not None and decoder.threads is not None
        seed = None if maker.seeding is None else maker.seeding.samples.sample
        data, read = self._data, self._read
        before = len(records)
        records += self._records
        self._records = []
        over = self.ended
        began, ends, made = self.samples, [perf_counter()], list[Any]()
        try:
            again, self._undecoded = self._undecoded, None
            if again is not None:
                for number, sample in enumerate(again.samples, again.first):
                    maker.seed(number)
                    self._decode_later(number, sample)
            while self._count < size and not over:
                number = self.samples
                # Before the read: the stream's own code draws from the sample's random numbers.
                if seed is not None:
                    seed(number)
                try:
                    if not read:
                        # A single call into C moves the sample, so Ctrl-C cannot lose it, except in the stream's own
                        # code. Only the end of this kind of stream: a blocking stream that raises StopAsyncIteration
                        # has failed.
                        read.extend((await anext(iterator, _OVER),) if asynchronous else map(next, (iterator,)))
                    over = not read or read[0] is _OVER
                    if over:
                        break
                    sample = read[0]
                    if later:
                        sample = self._decode_later(number, sample)
                except Exception as error:
                    if maker.handler is None or not is_about_sample(error) or self._stream_errors.failed(error, number):
                        maker.note(error, SampleRequest(None, number))
                        raise
                    # It takes a number: later samples have the same random numbers, whether it raises or not.
                    self.samples = number + 1
                    if later:
                        sample = self._decode_later(number, Failure(error))
                    else:
                        sample = await maker.on_error(SampleRequest(None, number), error, records)
                else:
                    if decoder is not None and not later:
                        try:
                            sample = decoder.call(sample)
                        except Exception as error:
                            sample = await maker.on_error(SampleRequest(None, number), error, records)
                made += read[:1] or [None]
                ends.append(perf_counter())
                # No calls from here on, so that Ctrl-C cannot interrupt it halfway.
                if sample is not DROPPED:
                    data += [sample]
                del read[:]
                self.samples, self._count = number + 1, self._count + 1
            self._note(ends, began, made)
            if over:
                del read[:]
                self._check_end(self.samples)
                self._end_stream()
            if over and self._drop_last:
                data = []
            else:
                await self._decode(data, records)
        except BaseException as error:
            if self._undecoded is not None:
                self._undecoded = self._undecoded.cancel()
            if self.interrupts(error):
                self._records = records[before:]
                del records[before:]
            raise
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

    def _decode_later(self, number: int, sample: Any) -> Any:
        """Add a sample of an asynchronous stream, or a `Failure`, to those that `_decode` decodes. Returns `DROPPED`:
        it is no sample of the batch yet.
        """
        if self._undecoded is None:
            self._undecoded = _Undecoded(number, [], [])
        decoder = self._maker.decoder
        assert decoder is not None
        assert decoder.threads is not None
        if type(sample) is Failure:
            result = asyncio.get_running_loop().create_future()
            result.set_result(sample)
        else:
            # Begun while later samples are read, in a copy of this context, which has the sample's random numbers.
            result = decoder.threads.call(decoder.call, sample)
        self._undecoded.samples.append(sample)
        self._undecoded.begun.append(result)
        return DROPPED

    async def _decode(self, data: list[Any], records: list[SkippedSample]) -> None:
        """Decode the samples that were read, concurrently, as far as there are threads; append them in their order."""
        if self._undecoded is None:
            return
        (first, samples, begun), maker = self._undecoded, self._maker
        found: list[Any]
        if begun:
            await asyncio.wait(begun)
            found = list(map(_outcome, begun))
        else:
            assert maker.decoder is not None
            call, contexts = maker.decoder.call, list[Context]()
            for number in range(first, first + len(samples)):
                # In the current context, of which the next line takes a copy for this sample's decoding.
                maker.seed(number)
                contexts.append(copy_context())

            def decoded(item: int) -> Any:
                return call(samples[item])

            start, took, ends = perf_counter(), list[float](), maker.handler is None
            found = await run_each(maker.decoder.threads, decoded, contexts, took, until_failure=ends)
            maker.slow.note(took, partial(self._name, first, samples), perf_counter() - start)
        try:
            for at, result in enumerate(found):
                sample = result
                if isinstance(result, Failure):
                    # The rest is decoded anew, should this be interrupted.
                    left = [samples[behind] for behind in range(at, len(samples))]
                    self._undecoded = _Undecoded(first + at, left, [])
                    request = SampleRequest(shard_and_key(samples[at]), first + at)
                    sample = await maker.on_error(request, result.error, records)
                if sample is not DROPPED:
                    data.append(sample)
            self._undecoded = None
        finally:
            found.clear()  # it refers to errors, whose tracebacks refer to this frame


class WorkerStreamFetcher(StreamFetcher):
    """Reads batches from a worker stream. Arguments as for `StreamFetcher`, and:

    Args:
        by_column: `collate` takes samples that are known by column; otherwise it gets a list.

    A transport's error is no sample's: it is raised, whatever the error policy, takes no number and loses nothing. The
    next call goes on where reading stopped.
    """

    dataset_iter: Any  # a `remote.worker_stream.WorkerStream`

    def __init__(self, *args: Any, by_column: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._by_column = by_column
        self._begun = False

    async def _batch(self, size: int, records: list[SkippedSample]) -> Sequence[Any] | None:
        before = len(records)
        self.dataset_iter.next_batch(again=self._begun)
        self._begun = True
        await self.dataset_iter.refill()  # an error here belongs to no sample, so no sample is dropped for it
        records += self._records
        self._records = []
        try:
            data = await self._filled(size, records)
        except BaseException as error:
            if self.interrupts(error):
                self._records = records[before:]
                del records[before:]
            else:
                self._undecoded = None
            raise
        if len(data) == size or (data and not self._drop_last):
            return data
        if len(records) > before:
            raise NoSamples
        return None

    def _end_batch(self) -> None:
        super()._end_batch()
        self._begun = False

    async def _filled(self, size: int, records: list[SkippedSample]) -> Sequence[Any]:
        # It has the samples of a call that was interrupted.
        data = self._data
        before = len(records)
        await self._decode(data, records)
        while len(data) < size and not self.ended:
            wanted = size - len(data)
            try:
                samples: Sequence[Any] = await self.dataset_iter.take(wanted)
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
                    self._maker.note(error, SampleRequest(None, number))
                    raise
                self.samples, self._count = number + 1, self._count + 1
                sample = await self._maker.on_error(SampleRequest(None, number), error, records)
                if sample is not DROPPED:
                    data.append(sample)
                continue
            self.ended = len(samples) < wanted
            first, self.samples = self.samples, self.samples + len(samples)
            self._count += len(samples)
            if self._maker.decoder is not None:
                self._undecoded = _Undecoded(first, samples, [])
                await self._decode(data, records)
            elif self._by_column and not data and (self.ended or len(samples) == size):
                return samples
            else:
                data += samples
        return data
