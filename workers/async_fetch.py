"""Fetching from asynchronous map datasets: samples are awaited concurrently, and put back in the order of the indices.

Data path: scheduler -> worker: [async_fetch] -> collate -> codec -> ring. The blocking fetchers are in `fetch.py` and
`seeded_fetch.py`, streams in `async_stream.py`. How many are in flight, over all batches, is `flights.py`'s.

Samples that raise, where they do not fail their batch, are dealt with as in `guarded_fetch.py`. Records are put in the
order of the batch, whichever sample raised first.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

from asyncloader.workers.bad_samples import LOST, BadSample, Guard, NoSamples
from asyncloader.workers.batching import Batching
from asyncloader.workers.error_notes import add_note, batch_place, sample_place
from asyncloader.workers.flights import Flights
from asyncloader.workers.guarded_fetch import fetches_single
from asyncloader.workers.seeded_fetch import fetches_batches

__all__ = ["AsyncMapFetcher"]


class AsyncMapFetcher:
    """Fetches from a map dataset.

    Args:
        dataset: the dataset.
        how: how samples become batches.
        concurrency: samples that are awaited at a time, over all batches.
    """

    def __init__(self, dataset: Any, how: Batching, concurrency: int) -> None:
        self._dataset = dataset
        self._how = how
        self._flights = Flights(concurrency)
        self._whole = how.auto_collation and fetches_batches(dataset)
        self._single = fetches_single(dataset)
        # Its coroutine can be a sample's task as it is: none of its code runs before that task does.
        self._bare = how.decoder is None and inspect.iscoroutinefunction(getattr(type(dataset), "__getitem__", None))

    async def fetch(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """The batch. `bad` gets records of samples that raised.

        Raises:
            NoSamples: the guard left all of them out.
        """
        return self.collated(index, await self.samples(index, bad))

    async def samples(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """What `collated` makes the batch of. Several calls may be in progress at a time.

        Raises:
            NoSamples: the guard left all of them out.
        """
        first: int | None = None
        if self._how.seeding is not None:
            first, index = index
        if self._how.guard is not None:
            return await self._guarded(self._how.guard, first, index, [] if bad is None else bad)
        if self._how.auto_collation:
            return await (self._at_once if self._whole else self._one_by_one)(first, index)
        (sample,) = await self._flights.fly(
            lambda _, context: self._start(index, first, context),
            1,
            lambda _, error: add_note(error, sample_place(index, None, first)),
        )
        return sample

    def collated(self, index: Any, samples: Any) -> Any:
        """The batch of what `samples` gave for this index."""
        return self._how.collated(index, samples)

    async def _at_once(self, first: int | None, index: Any) -> Any:
        """What `__getitems__` gives."""
        (samples,) = await self._flights.fly(
            lambda _, __: self._make_batch(index, first), 1, lambda _, error: add_note(error, batch_place(index))
        )
        if self._how.decoder is None and not (self._how.seeding is None and any(map(inspect.isawaitable, samples))):
            return samples
        pending = list(samples)
        try:
            return await self._flights.fly(
                lambda item, _: self._settle(pending[item], self._how.position(first, item)),
                len(pending),
                lambda item, error: _note_item(error, index, item, self._how.position(first, item)),
            )
        finally:
            for sample in pending:
                if inspect.iscoroutine(sample):
                    sample.close()  # those that an error kept from being awaited; a no-op for the others

    async def _make_batch(self, index: Any, first: int | None) -> Any:
        self._how.seed_batch(first)
        samples = self._dataset.__getitems__(index)
        return await samples if inspect.isawaitable(samples) else samples

    async def _settle(self, sample: Any, position: int | None) -> Any:
        if inspect.isawaitable(sample):
            sample = await sample
        if self._how.decoder is None:
            return sample
        self._how.seed_sample(position)
        return await self._how.decoder.decode(sample)

    async def _one_by_one(self, first: int | None, index: Any) -> list[Any]:
        places = index if isinstance(index, (list, tuple)) else list(index)
        return await self._flights.fly(
            lambda item, context: self._start(places[item], self._how.position(first, item), context),
            len(places),
            lambda item, error: _note_item(error, places, item, self._how.position(first, item)),
        )

    def _start(self, index: Any, position: int | None, context: Context) -> Coroutine[Any, Any, Any]:
        """The coroutine that makes a sample, and that will run in `context`."""
        if not self._bare:
            return self._make(index, position)
        if self._how.seeding is not None:
            context.run(self._how.seed_sample, position)
        coroutine: Coroutine[Any, Any, Any] = self._dataset[index]
        return coroutine

    async def _make(self, index: Any, position: int | None) -> Any:
        self._how.seed_sample(position)  # in this sample's own task, hence in a context of its own
        sample = self._dataset[index]
        if inspect.isawaitable(sample):
            sample = await sample
        return sample if self._how.decoder is None else await self._how.decoder.decode(sample)

    # ------------------------------------------------------------------------------------- past samples that raise

    async def _guarded(self, guard: Guard, first: int | None, index: Any, bad: list[BadSample]) -> Any:
        if not self._how.auto_collation:
            (sample,) = await self._flights.fly(lambda _, __: self._guarded_one(guard, index, first, None, bad), 1)
            if sample is LOST:
                raise NoSamples
            return sample
        failure: Exception | None = None
        if self._whole:
            try:
                return await self._at_once(first, index)
            except Exception as error:
                if not self._single:
                    failure = error
        places = index if isinstance(index, (list, tuple)) else list(index)
        found: list[list[BadSample]] = [[] for _ in places]

        def one(item: int, _: Context) -> Coroutine[Any, Any, Any]:
            position = self._how.position(first, item)
            if failure is not None:
                return self._lost(guard, places[item], position, item, failure, found[item])
            return self._guarded_one(guard, places[item], position, item, found[item])

        try:
            samples = await self._flights.fly(one, len(places))
        finally:
            failure = None  # it refers to this frame
            for records in found:
                bad += records
        kept = [sample for sample in samples if sample is not LOST]
        if not kept and samples:
            raise NoSamples
        return kept

    async def _guarded_one(
        self, guard: Guard, index: Any, position: int | None, item: int | None, bad: list[BadSample]
    ) -> Any:
        try:
            return await self._make(index, position)
        except Exception as error:
            return await self._lost(guard, index, position, item, error, bad)

    async def _lost(
        self,
        guard: Guard,
        index: Any,
        position: int | None,
        item: int | None,
        error: Exception,
        bad: list[BadSample],
    ) -> Any:
        self._how.seed_sample(position)  # for what `on_error` draws
        make = (lambda another: self._make(another, position)) if self._single else None
        try:
            return await guard.lost_async(index, position, error, bad, make)
        except Exception as raised:
            add_note(raised, sample_place(index, item, position))
            raise


def _note_item(error: BaseException, index: Any, item: int, position: int | None) -> None:
    try:
        add_note(error, sample_place(index[item], item, position))
    except Exception:  # an index that is no sequence
        add_note(error, f"while fetching item {item} of the batch")
