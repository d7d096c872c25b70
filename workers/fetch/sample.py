"""Makes one sample: seeds it, gets it from the dataset, decodes it, and applies the `on_error` policy if that raises.

Data path: scheduler -> worker: fetcher -> [sample] -> fetcher -> collate -> codec -> ring.

`SampleMaker` serves all fetchers, blocking and asynchronous, in torch mode and in seeded mode. In seeded mode the
random numbers of a sample are those of its position, whatever happened to other samples; so are those of its substitute
and of the user's `on_error` function.

The user's `decode` is part of making a sample: it draws from the sample's random numbers, and its errors go the same
way as those of reading. Where samples are awaited, or fetched by threads, it runs in threads of its own, so that reads
go on at the same time; for a plain blocking dataset, which could read nothing then, it is called inline.

Rules that blocking and asynchronous fetching share are written once, as coroutines. Blocking fetchers run them with
`run_blocking`: nothing that they await suspends.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from asyncloader.base.events import SkippedSample
from asyncloader.errors import is_about_sample
from asyncloader.telemetry.slow_samples import SlowSamples
from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.dataset_kinds import fetches_samples, is_awaited
from asyncloader.workers.fetch.error_notes import add_note, describe_sample, note_shard, note_stream_sample
from asyncloader.workers.fetch.sample_errors import SampleErrorHandler
from asyncloader.workers.fetch.seeding import BatchPosition, EpochSeeding
from asyncloader.workers.fetch.threads import JobThreads

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result.

    Raises:
        RuntimeError: it suspended.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        # If it suspended, its `finally` blocks run here, and not in the collector.
        coroutine.close()
    raise RuntimeError("asynchronous code suspended where a blocking dataset is fetched")


def check_decode(decode: Any, decode_threads: Any) -> None:
    """Check the options.

    Raises:
        TypeError: `decode` cannot be called, or would have to be awaited.
        ValueError: `decode_threads` is no number of threads.
    """
    if decode is not None and not callable(decode):
        raise TypeError(f"decode should be a function of one sample or None, but got decode={decode!r}")
    if is_awaited(decode):
        raise TypeError(
            f"decode={decode!r} is a coroutine function, but decode is called, and not awaited: it is for work that "
            "takes a CPU. Await in the dataset's own methods instead"
        )
    if not isinstance(decode_threads, int) or isinstance(decode_threads, bool) or decode_threads < 0:
        raise ValueError(
            f"decode_threads should be a number of threads, 0 to decode inline, but got {decode_threads!r}"
        )


class Decoder:
    """Runs `decode`.

    Args:
        function: the user's.
        threads: where `decode` runs it for an event loop; None: inline.
    """

    __slots__ = ("_durations", "function", "threads")

    def __init__(self, function: Callable[[Any], Any], threads: JobThreads | None) -> None:
        self.function = function
        self.threads = threads
        # Not a sum: threads that add to it at the same time would lose each other's seconds.
        self._durations: deque[float] = deque()

    def call(self, sample: Any) -> Any:
        """Return the decoded sample, made inline."""
        began = perf_counter()
        try:
            return self.function(sample)
        except (StopIteration, StopAsyncIteration) as error:
            raise not_the_end(error, "decode") from error
        finally:
            self._durations.append(perf_counter() - began)

    def take_seconds(self) -> float:
        """Return the seconds of the calls, in all threads, that have ended since this method was called last."""
        seconds = 0.0
        while self._durations:
            seconds += self._durations.popleft()
        return seconds

    async def decode(self, sample: Any) -> Any:
        """Return the decoded sample. Runs in a copy of the current context."""
        return self.call(sample) if self.threads is None else await self.threads.call(self.call, sample)


class SampleRequest(NamedTuple):
    """A sample to be made.

    Attributes:
        index: as the sampler gave it; for a stream None, or `shard_and_key` of a sample from a shard.
        position: in the epoch's order; None in torch mode. For a stream: the sample's number in it.
        item: its index in the batch, from 0; None without automatic batching, and for a stream.
    """

    index: Any
    position: int | None
    item: int | None = None


class SampleMaker:
    """Makes the samples of one epoch.

    Args:
        dataset: a map dataset; None for a stream, whose fetcher reads the samples.
        seeding: of the epoch; None in torch mode.
        decoder: runs the user's `decode`; None: samples are collated as they are read.
        handler: handles samples that raise; None: they fail their batch.
        slow: gets the times of single samples. None: they are not kept.
        stream: the stream in words, for the text of its errors; None for the only one, without workers.
        asynchronous: whether samples are awaited.
    """

    def __init__(
        self,
        dataset: Any,
        seeding: EpochSeeding | None = None,
        decoder: Decoder | None = None,
        handler: SampleErrorHandler | None = None,
        *,
        slow: SlowSamples | None = None,
        stream: str | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.dataset = dataset
        self.seeding = seeding
        self.decoder = decoder
        self.handler = handler
        self.slow = SlowSamples() if slow is None else slow
        self.stream = stream
        self.asynchronous = asynchronous
        self.one_by_one = dataset is not None and fetches_samples(dataset)
        """Whether a sample can be made alone: to find which one of a batch raises, and to substitute another."""

    # ------------------------------------------------------------------------------------------------- seeding

    def position(self, first: BatchPosition | None, item: int) -> int | None:
        """Return the position of a batch's sample, given that of its first sample; None in torch mode."""
        if first is None or self.seeding is None:
            return None
        return first[item] if isinstance(first, tuple) else first + item * self.seeding.replicas

    def seed(self, position: int | None) -> None:
        """In seeded mode: give the sample at this position its own random numbers, in the current context."""
        if self.seeding is not None and position is not None:
            self.seeding.samples.sample(position)

    def contexts(self, first: BatchPosition | None, count: int) -> list[Context]:
        """Return a context for each of a batch's samples, which are decoded concurrently: copies of the current one, in
        seeded mode with the sample's own random numbers.
        """
        found = []
        for item in range(count):
            self.seed(self.position(first, item))
            found.append(copy_context())
        return found

    def seed_batch(self, first: BatchPosition | None) -> None:
        """In seeded mode: seed the code that makes a whole batch, by the position of its first sample."""
        if self.seeding is not None and first is not None:
            self.seeding.samples.batch(first[0] if isinstance(first, tuple) else first)

    # -------------------------------------------------------------------------------------------------- making

    def get(self, index: Any, position: int | None) -> Any:
        """Return the sample of an index as a blocking dataset gives it, to be decoded elsewhere."""
        self.seed(position)
        return self.dataset[index]

    def make(self, index: Any, position: int | None) -> Any:
        """Return the sample of an index, from a blocking dataset."""
        if self.seeding is not None:  # asked here, too: in torch mode this saves a call per sample
            self.seed(position)
        sample = self.dataset[index]
        return sample if self.decoder is None else self.decoder.call(sample)

    async def make_async(self, index: Any, position: int | None) -> Any:
        """Make a sample of an asynchronous dataset, as `make`. Call it in a task, and so a context, of its own."""
        sample = await self.get_async(index, position)
        return sample if self.decoder is None else await self.decode_async(self.decoder, sample)

    async def get_async(self, index: Any, position: int | None) -> Any:
        """Return the sample of an index as an asynchronous dataset gives it. In a task of its own, as `make_async`."""
        self.seed(position)
        sample = self.dataset[index]
        return await sample if inspect.isawaitable(sample) else sample

    async def decode_async(self, decoder: Decoder, sample: Any) -> Any:
        """Decode a sample, and note on an error which one of a shard it is."""
        try:
            return await decoder.decode(sample)
        except Exception as error:
            note_shard(error, sample)
            raise

    def decode(self, sample: Any, position: int | None) -> Any:
        """Decode a sample that was read with others of its batch."""
        assert self.decoder is not None
        self.seed(position)
        return self.decoder.call(sample)

    # -------------------------------------------------------------------------------------------------- errors

    async def on_error(self, request: SampleRequest, error: Exception, records: list[SkippedSample]) -> Any:
        """Apply the error policy to a sample that raised. Never suspends for a blocking dataset.

        Args:
            request: the sample.
            error: the exception.
            records: gets the record of the sample.

        Returns:
            A substitute, or `DROPPED`.

        Raises:
            Exception: `error` without a policy, or if it is not the sample's (`is_about_sample`); or the error of the
                user's `on_error` function.
        """
        index, position, _ = request
        try:
            if self.handler is None or not is_about_sample(error):
                raise error
            self.seed(position)  # for random numbers that `on_error` draws
            return await self.handler.handle(index, position, error, records, self._substitute_maker(position))
        except Exception as raised:
            self.note(raised, request)
            raise
        finally:
            del error  # it refers to this frame

    def _substitute_maker(self, position: int | None) -> Callable[[Any], Any] | None:
        """Return the function that makes the sample of another index at this position; None if that is not possible."""
        if not self.one_by_one:
            return None
        make = self.make_async if self.asynchronous else self.make
        return lambda index: make(index, position)

    def note(self, error: BaseException, request: SampleRequest) -> None:
        """Note on an error which sample raised it."""
        if self.dataset is None:
            note_stream_sample(error, request.position or 0, self.stream, request.index)
        else:
            add_note(error, describe_sample(request.index, request.item, request.position))
