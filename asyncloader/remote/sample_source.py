"""Takes samples from an iterable and encodes them at once, beside the event loop.

Data path: iterable or asynchronous iterable -> [sample_source] -> encoded samples -> shard_cutting.

A plain iterable is iterated in one thread, from its beginning to its close: what it opens may belong to that thread.
Each sample is encoded before the next is asked for, so an iterable may use its buffers again. Samples that are encoded
together end with their shard: it is written while the iterable computes the next samples, which may take it hours.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from contextvars import copy_context
from functools import partial
from itertools import chain
from typing import Any, cast

from asyncloader.formats.encoder import EncodedBatch, EncodedSamples, ShardEncoder
from asyncloader.remote.shard_cutting import ShardCutter
from asyncloader.transports.blocking import BlockingPool

BATCH_BYTES = 1 << 20
"""Encoded samples are passed on when they have this size."""

BATCH_SAMPLES = 1024

Samples = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]


class SampleSource:
    """The samples of an iterable. `aclose` must be called.

    Args:
        samples: dictionaries.
    """

    length = None
    """The number of samples is not known."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._pool = BlockingPool("samples", 1)
        self._context = copy_context()
        self._iterator: Iterator[Any] | None = None
        self._async_iterator: AsyncIterator[Any] | None = None
        if isinstance(samples, AsyncIterable):
            self._async_iterator = aiter(samples)
        self._first: list[Any] = []  # the first sample, if it was looked at
        self._ended = self._stopped = False

    async def first(self) -> Any:
        """Return the first sample, which `batches` gives, too; None: there is none."""
        if self._async_iterator is not None:
            async for sample in self._async_iterator:
                self._first.append(sample)
                break
            else:
                self._ended = True
        else:
            await self._in_thread(partial(self._first.extend, self._few()))
        return self._first[0] if self._first else None

    async def batches(self, encoder: ShardEncoder, cutter: ShardCutter) -> AsyncGenerator[EncodedSamples, None]:
        """Encode all samples. Raises the errors of the iterable, after the samples before them.

        Args:
            encoder: of the samples.
            cutter: gets them; of no samples yet, as an iterable cannot begin elsewhere.
        """
        assert not cutter.samples
        if self._async_iterator is not None:
            async for encoded in self._async_batches(encoder, self._async_iterator, cutter):
                yield encoded
            return
        while not self._ended:
            encoded, error = await self._in_thread(partial(self._take, encoder, _Task(cutter)))
            yield encoded
            if error is not None:
                raise error

    async def aclose(self) -> None:
        """End the thread, after the sample that it is waiting for, and close the iterable if it is a generator."""
        self._stopped = True
        try:
            # Also if the caller is cancelled: what a generator has opened must be closed in its thread.
            await self._pool.finish(partial(self._context.run, self._close))
            close = getattr(self._async_iterator, "aclose", None)
            if close is not None:
                await close()
        finally:
            await self._pool.aclose()

    async def _in_thread(self, call: Any) -> Any:
        return await self._pool.run(partial(self._context.run, call))

    async def _async_batches(
        self, encoder: ShardEncoder, samples: AsyncIterator[Any], cutter: ShardCutter
    ) -> AsyncGenerator[EncodedSamples, None]:
        batch, task = encoder.batch(), _Task(cutter)
        while not self._ended:
            if self._first:
                sample = self._first.pop()
            else:
                try:
                    sample = await anext(samples)
                except StopAsyncIteration:
                    break
                except Exception:
                    yield await self._in_thread(batch.finish)
                    raise
            if not batch.add(sample) or task.ends(batch):
                yield await self._in_thread(batch.finish)
                batch, task = encoder.batch(), _Task(cutter)
        yield await self._in_thread(batch.finish)

    # --- in the thread

    def _take(self, encoder: ShardEncoder, task: _Task) -> tuple[EncodedSamples, Exception | None]:
        """Encode some samples; return them, and the error of the iterable that ended them."""
        batch = encoder.batch()
        try:
            for sample in chain([self._first.pop()] if self._first else [], self._iterate()):
                if not batch.add(sample) or task.ends(batch) or self._stopped:
                    break
            else:
                self._ended = True
        except Exception as error:
            return batch.finish(), error
        return batch.finish(), None

    def _few(self) -> list[Any]:
        """Return the next sample in a list; an empty list at the end."""
        for sample in self._iterate():
            return [sample]
        self._ended = True
        return []

    def _iterate(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(cast("Iterable[Any]", self._samples))
        return self._iterator

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _Task:
    """The samples that are encoded together next, given the shard that they come into."""

    def __init__(self, cutter: ShardCutter) -> None:
        self._samples = cutter.task(cutter.samples, BATCH_SAMPLES)
        self._bytes = min(BATCH_BYTES, cutter.room)

    def ends(self, batch: EncodedBatch) -> bool:
        """Whether `batch` has them all."""
        return batch.size >= self._bytes or batch.count >= self._samples
