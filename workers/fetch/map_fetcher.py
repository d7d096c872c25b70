"""Fetches batches from map datasets: the rules of a batch, and how a blocking dataset is fetched, also by threads.

Data path: scheduler -> worker: [map_fetcher -> sample] -> collate -> codec -> ring. Samples that are awaited are
fetched by `map_async.py`.

Without an error policy and without a seed a batch is made as torch makes it: the same calls of `__getitems__` or
`__getitem__`, in the same order. In addition errors get a note that says which sample raised.

In seeded mode each sample has the random numbers of its position. A dataset's own `__getitems__` and the user's
`collate_fn` make a whole batch: they are seeded once per batch, by the position of its first sample. torch's `Subset`
and `StackDataset` are read sample by sample, unless the underlying dataset has a `__getitems__` of its own.

If a dataset's own `__getitems__` raises, the sample that raised is unknown. With an error policy the batch is then
fetched again, sample by sample with `__getitem__`, if it has one; in seeded mode each sample then has the random
numbers of its own position instead of the batch's.

Threads take samples of the oldest batch first, so a slow sample occupies one thread while later ones start and finish.
A thread cannot be interrupted: when a sample of a batch raises, or the batch is cancelled, its samples that have not
begun are skipped, and those that have begun run to their end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from itertools import count, pairwise, repeat
from time import perf_counter
from typing import Any

from asyncloader.base.events import SkippedSample
from asyncloader.errors import is_about_sample
from asyncloader.telemetry.slow_samples import CHEAP_S
from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.dataset_kinds import fetches_batches
from asyncloader.workers.fetch.error_notes import (
    add_note,
    describe_batch,
    describe_sample,
    index_text,
    note_collation,
    note_shard,
)
from asyncloader.workers.fetch.sample import Decoder, SampleMaker, SampleRequest, run_blocking
from asyncloader.workers.fetch.sample_errors import DROPPED, NoSamples
from asyncloader.workers.fetch.seeding import BatchPosition
from asyncloader.workers.fetch.threads import Failure, JobThreads, run_each


class MapFetcher:
    """Fetches from a blocking map dataset, one sample after the other. Subclasses have many samples in flight.

    Args:
        maker: makes the samples.
        auto_collation: a batch is a list of samples, an index a list of indices; otherwise it is one sample.
        collate: from the list of samples, or the single sample, to the batch.
    """

    def __init__(self, maker: SampleMaker, auto_collation: bool, collate: Callable[[Any], Any]) -> None:
        self._maker = maker
        self._auto_collation = auto_collation
        self._collate = collate
        # Not by `hasattr`: torch's `Subset` and `StackDataset` have a `__getitems__` that only passes indices on.
        self._batched_get = auto_collation and fetches_batches(maker.dataset)

    def fetch(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return the batch of an index; in seeded mode ``(position, index)``. For blocking datasets without threads.

        Args:
            index: from the sampler.
            records: gets the samples that raised.

        Raises:
            NoSamples: all of them were dropped.
        """
        if self._maker.handler is not None:
            return self.collated(index, run_blocking(self.samples(index, records)))
        if self._maker.seeding is not None:
            return self.collated(index, self._seeded_samples(*index))
        samples = self._torch_samples(index)
        try:
            return self._collate(samples)
        except Exception as error:
            note_collation(error, index, batched=self._auto_collation)
            raise

    async def fetch_async(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return the batch of an index, for asynchronous datasets and threads. See `fetch`. Several calls may be in
        progress at a time.
        """
        samples = await self.samples(index, records)
        try:
            return self.collated(index, samples)
        except StopIteration as stop:  # a coroutine cannot raise it
            raise not_the_end(stop, "collate_fn") from stop

    async def samples(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return what `collated` makes the batch of.

        Raises:
            NoSamples: all of them were dropped.
        """
        maker = self._maker
        first: BatchPosition | None = None
        if maker.seeding is not None:
            first, index = index
        records = [] if records is None else records
        if not self._auto_collation:
            (sample,) = await self._each([index], first, records)
            if sample is DROPPED:
                raise NoSamples
            return sample
        indices = index if isinstance(index, (list, tuple)) else list(index)
        if self._batched_get:
            try:
                # The index as the sampler gave it, unless it was an iterator: `list` has used that up.
                return await self._batch(indices if isinstance(index, Iterator) else index, first)
            except Exception as error:
                # Without a `__getitem__` the sample that raised cannot be found, and fails its batch.
                if maker.handler is None or not maker.one_by_one or not is_about_sample(error):
                    raise
        samples = await self._each(indices, first, records)
        if maker.handler is None:
            return samples
        kept = [sample for sample in samples if sample is not DROPPED]
        if samples and not kept:
            raise NoSamples
        return kept

    def collated(self, index: Any, samples: Any) -> Any:
        """Collate what `samples` returned for this index."""
        seeding = self._maker.seeding
        first: BatchPosition = 0
        if seeding is not None:
            first, index = index
        try:
            return self._collate(samples) if seeding is None else seeding.collated(self._collate, first, samples)
        except Exception as error:
            note_collation(error, index, batched=self._auto_collation)
            raise

    # -------------------------------------------------------------------------------- how samples are made: one by one

    async def _batch(self, index: Any, first: BatchPosition | None) -> Any:
        """Return the samples of a batch, decoded, by the dataset's `__getitems__`."""
        samples = self._get_batch(index, first)
        return samples if self._maker.decoder is None else self._decoded(index, first, samples)

    async def _each(
        self, indices: Sequence[Any], first: BatchPosition | None, records: list[SkippedSample]
    ) -> list[Any]:
        """Return the samples in the order of the indices, with `DROPPED` for those that were dropped.

        Args:
            indices: one of each sample.
            first: position of the first sample, or of each; None in torch mode.
            records: gets the samples that raised, in their order.
        """
        if self._maker.handler is None:
            return await self._make_each(indices, first, [])
        # A list for each sample, because several may be made at a time.
        found: list[list[SkippedSample]] = [[] for _ in indices]
        try:
            return await self._make_each(indices, first, found)
        finally:
            # Also when an error is raised: records of the samples that were handled before it go along.
            for one in found:
                records += one

    async def _make_each(
        self, indices: Sequence[Any], first: BatchPosition | None, records: list[list[SkippedSample]]
    ) -> list[Any]:
        maker, samples, ends = self._maker, list[Any](), [perf_counter()]
        for item, index in enumerate(indices):
            try:
                sample = maker.make(index, maker.position(first, item))
            except Exception as error:
                sample = await maker.on_error(self._request(indices, first, item), error, records[item])
            samples.append(sample)
            ends.append(perf_counter())
        self._note(indices, ends)
        return samples

    def _request(self, indices: Any, first: BatchPosition | None, item: int) -> SampleRequest:
        """Describe the sample that is this item of a batch."""
        try:
            index = indices[item]
        except Exception:  # not a sequence
            index = None
        return SampleRequest(index, self._maker.position(first, item), item if self._auto_collation else None)

    def _get_batch(self, index: Any, first: BatchPosition | None) -> Any:
        self._maker.seed_batch(first)
        try:
            samples = self._maker.dataset.__getitems__(index)
            # Else `collate_fn` gets just that, as in torch: a list, an array, a generator.
            one_by_one = self._maker.decoder is not None or self._maker.handler is not None
            return list(samples) if one_by_one and isinstance(samples, Iterator) else samples
        except Exception as error:
            add_note(error, describe_batch(index))
            raise

    def _note(self, indices: Sequence[Any], ends: Sequence[float]) -> None:
        """Count samples that were made one after the other. `ends`: of each; first, when the first began."""
        if self._maker.slow.timing:
            took = [after - before for before, after in pairwise(ends)]
            self._maker.slow.note(took, partial(self._name, indices), ends[-1] - ends[0])
        else:
            self._maker.slow.passed(len(ends) - 1, ends[-1] - ends[0])

    def _name(self, indices: Any, item: int) -> str:
        """The name of a batch's sample in a list of the slowest; empty where the indices are used up."""
        index = self._request(indices, None, item).index
        return "" if index is None else f"index {index_text(index)}"

    def _decoded(self, indices: Any, first: BatchPosition | None, samples: Any) -> list[Any]:
        decoded, ends = list[Any](), [perf_counter()]
        for item, sample in enumerate(samples):
            try:
                decoded.append(self._maker.decode(sample, self._maker.position(first, item)))
                ends.append(perf_counter())
            except Exception as error:
                self._maker.note(error, self._request(indices, first, item))
                raise
        self._note(indices, ends)
        return decoded

    async def _decode_batch(
        self,
        decoder: Decoder,
        index: Any,
        first: BatchPosition | None,
        samples: Sequence[Any],
        threads: JobThreads | None = None,
    ) -> list[Any]:
        """Decode the samples of a whole batch concurrently, in the decoder's threads or else in these."""
        contexts, took, began = self._maker.contexts(first, len(samples)), list[float](), perf_counter()
        threads = decoder.threads or threads
        found = await run_each(threads, lambda item: decoder.call(samples[item]), contexts, took, until_failure=True)
        self._raise_failure(found, index, first, samples)
        self._maker.slow.note(took, partial(self._name, index), perf_counter() - began)
        return found

    def _raise_failure(
        self, found: list[Any], indices: Any, first: BatchPosition | None, samples: Sequence[Any] = ()
    ) -> None:
        """Raise the first of the errors that these results have, if any, with notes of its sample."""
        failed = next((item for item, result in enumerate(found) if type(result) is Failure), None)
        if failed is None:
            return
        try:
            self._maker.note(found[failed].error, self._request(indices, first, failed))
            if samples:
                note_shard(found[failed].error, samples[failed])
            raise found[failed].error
        finally:
            found.clear()  # it refers to errors, whose tracebacks refer to this frame

    # ------------------------------------------------------------------------------------ fast paths: no error policy

    def _torch_samples(self, index: Any) -> Any:
        """Return the samples as torch's fetcher gets them."""
        dataset, decoder, slow = self._maker.dataset, self._maker.decoder, self._maker.slow
        if not self._auto_collation:
            return self._one_by_one([index], [None])[0]
        if getattr(dataset, "__getitems__", None):  # as in torch, it may be None
            samples = self._get_batch(index, None)
            return samples if decoder is None else self._decoded(index, None, samples)
        if slow.fetched_s >= CHEAP_S * slow.fetched:  # `slow.timing`, inlined
            return self._one_by_one(index, repeat(None))
        indices, began = iter(index), perf_counter()
        try:
            # Nothing counts the samples here, which would cost time for each: `_describe_last` finds the one that
            # raised by the length that is left of the iterator.
            if decoder is None:
                samples = [dataset[one] for one in indices]
            else:
                samples = [decoder.call(dataset[one]) for one in indices]
        except Exception as error:
            add_note(error, _describe_last(index, indices))
            raise
        slow.fetched += len(samples)
        slow.fetched_s += perf_counter() - began
        return samples

    def _seeded_samples(self, first: BatchPosition, index: Any) -> Any:
        maker, slow = self._maker, self._maker.slow
        if not self._auto_collation:
            return self._one_by_one([index], [maker.position(first, 0)])[0]
        if self._batched_get:
            samples = self._get_batch(index, first)
            return samples if maker.decoder is None else self._decoded(index, first, samples)
        assert maker.seeding is not None
        if isinstance(first, tuple):
            return self._one_by_one(index, first)
        if slow.fetched_s >= CHEAP_S * slow.fetched:  # `slow.timing`, inlined
            return self._one_by_one(index, count(first, maker.seeding.replicas))
        # `maker.make`, inlined: this runs once per sample.
        dataset, decoder, samples, began = maker.dataset, maker.decoder, list[Any](), perf_counter()
        for one, position in zip(index, maker.seeding.samples.each(first, maker.seeding.replicas), strict=False):
            try:
                sample = dataset[one]
                samples.append(sample if decoder is None else decoder.call(sample))
            except Exception as error:
                add_note(error, describe_sample(one, len(samples), position))
                raise
        slow.passed(len(samples), perf_counter() - began)
        return samples

    def _one_by_one(self, index: Iterable[Any], positions: Iterable[int | None]) -> list[Any]:
        """Return the samples of these indices, which are timed."""
        made, samples, ends = list[Any](), list[Any](), [perf_counter()]
        for one, position in zip(index, positions, strict=False):
            try:
                samples.append(self._maker.make(one, position))
            except Exception as error:
                add_note(error, describe_sample(one, len(made) if self._auto_collation else None, position))
                raise
            ends.append(perf_counter())
            made.append(one)
        self._note(made, ends)
        return samples


class ThreadMapFetcher(MapFetcher):
    """Fetches from a blocking map dataset, whose methods are called by several threads.

    Args:
        maker, auto_collation, collate: as for `MapFetcher`. A decoder without threads of its own runs where the sample
            was read.
        threads: the threads.
    """

    def __init__(
        self, maker: SampleMaker, auto_collation: bool, collate: Callable[[Any], Any], threads: JobThreads
    ) -> None:
        super().__init__(maker, auto_collation, collate)
        self._threads = threads

    async def _batch(self, index: Any, first: BatchPosition | None) -> Any:
        def get(_: int) -> Any:
            return self._get_batch(index, first)

        (samples,) = await run_each(self._threads, get, [copy_context()], [], until_failure=True)
        if type(samples) is Failure:
            try:
                raise samples.error  # with its note
            finally:
                del samples  # it refers to an error, whose traceback refers to this frame
        decoder = self._maker.decoder
        if decoder is None:
            return samples
        return await self._decode_batch(decoder, index, first, list(samples), self._threads)

    async def _make_each(
        self, indices: Sequence[Any], first: BatchPosition | None, records: list[list[SkippedSample]]
    ) -> list[Any]:
        maker, decoder = self._maker, self._maker.decoder
        # A sample is read by one thread and decoded by another, if decoding has threads of its own.
        decoding = None if decoder is None else decoder.threads
        make = maker.make if decoding is None else maker.get
        handled: set[int] = set()  # whose substitutes are decoded already

        def handle(item: int, error: Exception) -> Any:
            handled.add(item)
            try:
                return run_blocking(maker.on_error(self._request(indices, first, item), error, records[item]))
            finally:
                del error  # it refers to this frame

        def read(item: int) -> Any:
            try:
                return make(indices[item], maker.position(first, item))
            except Exception as error:
                if maker.handler is None:
                    raise  # not through a coroutine, which cannot raise StopIteration
                return handle(item, error)

        def decode(item: int) -> Any:
            if item in handled:
                return samples[item]
            assert decoder is not None
            try:
                return decoder.call(samples[item])
            except Exception as error:
                if maker.handler is None:
                    raise  # ditto
                return handle(item, error)

        contexts, took, began = [copy_context() for _ in indices], list[float](), perf_counter()
        samples = await run_each(self._threads, read, contexts, took, until_failure=True)
        self._raise_failure(samples, indices, first)
        if decoding is not None:
            # In the same contexts, so that decoding goes on with the random numbers of the samples.
            samples = await run_each(decoding, decode, contexts, took, until_failure=True)
            self._raise_failure(samples, indices, first)
        maker.slow.note(took, partial(self._name, indices), perf_counter() - began)
        return samples


def _describe_last(index: Any, indices: Iterator[Any]) -> str:
    """Describe the sample that was fetched last, from the length left in the iterator, which may be unknown."""
    try:
        item = len(index) - operator.length_hint(indices, len(index)) - 1
        return describe_sample(index[item], item) if item >= 0 else describe_batch(index)
    except Exception:
        return describe_batch(index)
