"""Runs the user's `decode`, which turns a sample as read into a sample as collated.

Data path: worker: fetch -> [decoding] -> collate -> codec -> ring. Also without workers.

Decoding is part of making a sample: it runs under the sample's random numbers (`sample_rng`), its errors get the same
note, and errors of reading and of decoding are handled alike.

Where samples are awaited, or fetched by threads, `decode` runs in threads of its own, so that reads go on at
the same time. For a plain blocking dataset, which could read nothing at that time, it is called inline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from time import perf_counter
from typing import Any

from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.dataset_kinds import is_awaited
from asyncloader.workers.fetch.threads import JobThreads, run_each


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

    def call_in_thread(self, sample: Any, context: Context | None = None) -> asyncio.Future[Any]:
        """Have a thread decode the sample, in a copy of `context` (default: the current one)."""
        assert self.threads is not None
        return self.threads.call(self.call, sample, context)

    async def decode_each(
        self,
        samples: Sequence[Any],
        contexts: Iterable[Context],
        took: list[float],
        *,
        until_failure: bool,
        threads: JobThreads | None = None,
    ) -> list[Any]:
        """Return for each sample, in their order, the decoded sample or a `Failure`. See `run_each`.

        Args:
            samples: as read. Each is taken out of the sequence in the thread that decodes it, which may make it.
            contexts: the context of each sample.
            took: gets the seconds of each sample, in their order.
            until_failure: begin no samples after one has failed.
            threads: used if the decoder has none.
        """

        def decode(item: int) -> Any:
            return self.call(samples[item])

        return await run_each(self.threads or threads, decode, contexts, took, until_failure=until_failure)

    async def decode(self, sample: Any, context: Context | None = None) -> Any:
        """Return the decoded sample. Runs in a copy of `context` (default: the current one)."""
        if self.threads is not None:
            return await self.call_in_thread(sample, context)
        return self.call(sample) if context is None else context.copy().run(self.call, sample)


def make_decode_threads(decode: Any, threads: int) -> JobThreads | None:
    """Make the threads that run `decode` where samples are awaited; None: it runs inline, or there is none."""
    return JobThreads(threads, "asyncloader-decode") if decode is not None and threads else None
