"""Fetching from asynchronous map datasets: samples are awaited concurrently, and put back in the order of the indices.

Data path: scheduler -> worker: [async_fetch] -> collate -> codec -> ring. The blocking fetchers are in `fetch.py` and
`seeded_fetch.py`, streams in `async_stream.py`. How many are in flight, over all batches, is `flights.py`'s.

Samples that raise, where they do not fail their batch, are dealt with as in `guarded_fetch.py`. Records are put in the
order of the batch, whichever sample raised first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from asyncloader.workers.bad_samples import LOST, BadSample, Guard, NoSamples
from asyncloader.workers.decoding import Decoder
from asyncloader.workers.error_notes import add_note, batch_place, collation_place, sample_place
from asyncloader.workers.flights import Flights
from asyncloader.workers.guarded_fetch import fetches_single
from asyncloader.workers.seeded_fetch import fetches_batches
from asyncloader.workers.seeding import GlobalWatch, SampleSeeder, global_generators_kept

__all__ = ["AsyncMapFetcher", "AsyncSeeding", "collate_samples"]


class AsyncSeeding:
    """Seeded mode for samples that are made concurrently: each has its own generators, the global ones are watched.

    Args:
        samples: seeds samples in their contexts.
        collate: seeds the user's collation, which is not concurrent, with the global generators; None: leave it alone.
        replicas: difference of the positions of neighbouring samples.
        watch: warns when samples draw from the global generators; None where others draw from them, too.
    """

    def __init__(
        self, samples: SampleSeeder, collate: SampleSeeder | None, replicas: int, watch: GlobalWatch | None
    ) -> None:
        self.samples = samples
        self.replicas = replicas
        self._collate = collate
        self._watch = watch

    def collated(self, collate: Callable[[Any], Any], first: int, samples: Any) -> Any:
        """The batch of these samples, the first of which has position `first`."""
        if self._watch is not None:
            self._watch.look()
        if self._collate is None:
            return collate(samples)
        if self._watch is None:
            with global_generators_kept():
                self._collate.collation(first)
                return collate(samples)
        self._collate.collation(first)
        try:
            return collate(samples)
        finally:
            self._watch.rebase()


class AsyncMapFetcher:
    """Fetches from a map dataset.

    Args:
        dataset: the dataset.
        auto_collation: whether an index is a list of them.
        collate: from the list of samples, or the one sample, to the batch.
        concurrency: samples that are awaited at a time, over all batches.
        seeding: of the epoch, an index is ``(position, index)`` then; None in torch mode.
        guard: what becomes of samples that raise; None: the first one fails its batch.
        decoder: the user's `decode`; None: samples are collated as they are read.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        concurrency: int,
        seeding: AsyncSeeding | None,
        guard: Guard | None,
        decoder: Decoder | None = None,
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._collate = collate
        self._flights = Flights(concurrency)
        self._seeding = seeding
        self._replicas = 1 if seeding is None else seeding.replicas
        self._guard = guard
        self._decoder = decoder
        self._whole = auto_collation and fetches_batches(dataset)
        self._single = fetches_single(dataset)
        # Its coroutine can be a sample's task as it is: none of its code runs before that task does.
        self._bare = decoder is None and inspect.iscoroutinefunction(getattr(type(dataset), "__getitem__", None))

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
        if self._seeding is not None:
            first, index = index
        if self._guard is not None:
            return await self._guarded(self._guard, first, index, [] if bad is None else bad)
        if self._auto_collation:
            return await (self._at_once if self._whole else self._one_by_one)(first, index)
        (sample,) = await self._flights.fly(
            lambda _, context: self._start(index, first, context),
            1,
            lambda _, error: add_note(error, sample_place(index, None, first)),
        )
        return sample

    def collated(self, index: Any, samples: Any) -> Any:
        """The batch of what `samples` gave for this index."""
        return collate_samples(self._seeding, self._collate, index, samples, batched=self._auto_collation)

    async def _at_once(self, first: int | None, index: Any) -> Any:
        """What `__getitems__` gives."""
        (samples,) = await self._flights.fly(
            lambda _, __: self._make_batch(index, first), 1, lambda _, error: add_note(error, batch_place(index))
        )
        if self._decoder is None and not (self._seeding is None and any(map(inspect.isawaitable, samples))):
            return samples
        pending = list(samples)
        try:
            return await self._flights.fly(
                lambda item, _: self._settle(pending[item], self._position(first, item)),
                len(pending),
                lambda item, error: _note_item(error, index, item, self._position(first, item)),
            )
        finally:
            for sample in pending:
                if inspect.iscoroutine(sample):
                    sample.close()  # those that an error kept from being awaited; a no-op for the others

    async def _make_batch(self, index: Any, first: int | None) -> Any:
        if self._seeding is not None and first is not None:
            self._seeding.samples.batch(first)
        samples = self._dataset.__getitems__(index)
        return await samples if inspect.isawaitable(samples) else samples

    async def _settle(self, sample: Any, position: int | None) -> Any:
        if inspect.isawaitable(sample):
            sample = await sample
        if self._decoder is None:
            return sample
        if self._seeding is not None and position is not None:
            self._seeding.samples.sample(position)
        return await self._decoder.decode(sample)

    async def _one_by_one(self, first: int | None, index: Any) -> list[Any]:
        places = index if isinstance(index, (list, tuple)) else list(index)
        return await self._flights.fly(
            lambda item, context: self._start(places[item], self._position(first, item), context),
            len(places),
            lambda item, error: _note_item(error, places, item, self._position(first, item)),
        )

    def _position(self, first: int | None, item: int) -> int | None:
        return None if first is None else first + item * self._replicas

    def _start(self, index: Any, position: int | None, context: Context) -> Coroutine[Any, Any, Any]:
        """The coroutine that makes a sample, and that will run in `context`."""
        if not self._bare:
            return self._make(index, position)
        if self._seeding is not None and position is not None:
            context.run(self._seeding.samples.sample, position)
        coroutine: Coroutine[Any, Any, Any] = self._dataset[index]
        return coroutine

    async def _make(self, index: Any, position: int | None) -> Any:
        if self._seeding is not None and position is not None:
            # In this sample's own task, hence in a context of its own.
            self._seeding.samples.sample(position)
        sample = self._dataset[index]
        if inspect.isawaitable(sample):
            sample = await sample
        return sample if self._decoder is None else await self._decoder.decode(sample)

    # ------------------------------------------------------------------------------------- past samples that raise

    async def _guarded(self, guard: Guard, first: int | None, index: Any, bad: list[BadSample]) -> Any:
        if not self._auto_collation:
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
            position = self._position(first, item)
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
        if self._seeding is not None and position is not None:
            self._seeding.samples.sample(position)  # for what `on_error` draws
        make = (lambda another: self._make(another, position)) if self._single else None
        try:
            return await guard.lost_async(index, position, error, bad, make)
        except Exception as raised:
            add_note(raised, sample_place(index, item, position))
            raise


def collate_samples(
    seeding: AsyncSeeding | None, collate: Callable[[Any], Any], index: Any, samples: Any, *, batched: bool
) -> Any:
    """The batch of these samples; with `seeding`, of an index with its position."""
    first: int | None = None
    if seeding is not None:
        first, index = index
    try:
        if seeding is not None and first is not None:
            return seeding.collated(collate, first, samples)
        return collate(samples)
    except Exception as error:
        add_note(error, collation_place(index, batched=batched))
        raise


def _note_item(error: BaseException, index: Any, item: int, position: int | None) -> None:
    try:
        add_note(error, sample_place(index[item], item, position))
    except Exception:  # an index that is no sequence
        add_note(error, f"while fetching item {item} of the batch")
