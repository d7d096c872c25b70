"""Fetches from blocking map datasets in threads: many reads in flight, results in the order of the indices.

Data path: scheduler -> worker: [map_threads -> sample] -> collate -> codec -> ring. Without workers it runs beside the
consumer.

The threads take samples of the oldest batch first, so a slow sample occupies one thread while later ones start and
finish. A dataset's own `__getitems__` makes a batch in one thread. Each sample, or batch, is made in a context of its
own: context variables that it sets are not seen by others.

A thread cannot be interrupted. When a sample of a batch raises, or the batch is cancelled, its samples that have not
begun are skipped; those that have begun run to their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.workers.fetch.error_notes import add_note, describe_batch
from asyncloader.workers.fetch.map_fetcher import MapFetcher
from asyncloader.workers.fetch.sample import SampleMaker, run_blocking
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.fetch.seeding import BatchPosition
from asyncloader.workers.fetch.threads import Failure, JobThreads, run_each


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
                add_note(samples.error, describe_batch(index))
                raise samples.error
            finally:
                del samples  # it refers to an error, whose traceback refers to this frame
        decoder = self._maker.decoder
        if decoder is None:
            return samples
        return await self._decode_batch(decoder, index, first, list(samples), self._threads)

    async def _each(
        self,
        indices: Sequence[Any],
        first: BatchPosition | None,
        failure: Exception | None,
        records: list[SkippedSample],
    ) -> list[Any]:
        maker, decoder = self._maker, self._maker.decoder
        # A sample is read by one thread and decoded by another, if decoding has threads of its own.
        decoding = None if decoder is None else decoder.threads
        make = maker.make if decoding is None else maker.get
        # A list for each sample, because threads append to them: joined in the end, the records are in the order of the
        # batch.
        found: list[list[SkippedSample]] = [[] for _ in indices]
        handled: set[int] = set()  # whose substitutes are decoded already

        def handle(item: int, error: Exception) -> Any:
            handled.add(item)
            try:
                return run_blocking(maker.on_error(self._request(indices, first, item), error, found[item]))
            finally:
                del error  # it refers to this frame

        def read(item: int) -> Any:
            if failure is not None:
                return handle(item, failure)
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
                    raise  # not through a coroutine, which cannot raise StopIteration
                return handle(item, error)

        contexts, took, began = [copy_context() for _ in indices], list[float](), perf_counter()
        try:
            samples = await run_each(self._threads, read, contexts, took, until_failure=True)
            self._raise_failure(samples, indices, first)
            if decoding is not None:
                # In the same contexts, so that decoding goes on with the random numbers of the samples.
                samples = await run_each(decoding, decode, contexts, took, until_failure=True)
                self._raise_failure(samples, indices, first)
        finally:
            failure = None  # it refers to this frame
            # Also when an error is raised: records of the samples that were handled before it go along.
            for one in found:
                records += one
        maker.slow.note(took, partial(self._name, indices), perf_counter() - began)
        return samples
