"""Runs the user's `decode`, which turns a sample as read into a sample as collated.

Data path: worker: fetch -> [decoding] -> collate -> codec -> ring. Also without workers.

Decoding is part of making a sample: it runs under the sample's random numbers (`sample_rng`), its errors get the same
note, and errors of reading and of decoding are handled alike.

Where samples are awaited, or fetched by threads, `decode` runs in threads of its own, so that reads go on meanwhile.
For a plain blocking dataset, which could read nothing meanwhile, it is called inline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

from asyncloader.workers.fetch.error_notes import add_note, describe_sample
from asyncloader.workers.fetch.seeded_fetch import fetches_batches
from asyncloader.workers.fetch.seeding import SampleSeeder
from asyncloader.workers.fetch.threads import JobThreads

__all__ = ["Chain", "DecodedMap", "Decoder", "check_decode"]


def check_decode(decode: Any, decode_threads: Any) -> None:
    """Check the options.

    Raises:
        TypeError: `decode` cannot be called, or would have to be awaited.
        ValueError: `decode_threads` is no number of threads.
    """
    if decode is not None and not callable(decode):
        raise TypeError(f"decode should be a function of one sample or None, but got decode={decode!r}")
    if inspect.iscoroutinefunction(decode) or inspect.iscoroutinefunction(getattr(decode, "__call__", None)):  # noqa: B004
        raise TypeError(
            f"decode={decode!r} is a coroutine function, but decode is called, and not awaited: it is for work that "
            "takes a CPU. Await in the dataset's own methods instead"
        )
    if not isinstance(decode_threads, int) or isinstance(decode_threads, bool) or decode_threads < 0:
        raise ValueError(
            f"decode_threads should be a number of threads, 0 to decode inline, but got {decode_threads!r}"
        )


class Chain:
    """Calls functions of one argument one after the other.

    Args:
        steps: the functions, the first of them first.
    """

    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, value: Any) -> Any:
        """Return the value after the last step."""
        for step in self.steps:
            value = step(value)
        return value


class Decoder:
    """Runs `decode` for an event loop.

    Args:
        function: the user's.
        threads: where it runs; None: inline.
    """

    __slots__ = ("function", "threads")

    def __init__(self, function: Callable[[Any], Any], threads: JobThreads | None) -> None:
        self.function = function
        self.threads = threads

    async def decode(self, sample: Any, context: Context | None = None) -> Any:
        """Return the decoded sample. Runs in a copy of `context` (default: the current one)."""
        if self.threads is not None:
            return await self.threads.call(self.function, sample, context)
        try:
            if context is not None:
                return context.copy().run(self.function, sample)
            return self.function(sample)
        except StopAsyncIteration as error:  # it would look like the end of a stream
            raise RuntimeError("decode raised StopAsyncIteration") from error


class DecodedMap:
    """Wraps a blocking map dataset: its samples come decoded. Has a `__getitems__` if the dataset's is used.

    Args:
        dataset: the dataset.
        function: the user's `decode`.
        one_by_one: whether samples are seeded, or their errors handled, one by one: then the `__getitems__` of
            torch's views is not used.
        seeder: the epoch's; it also seeds the decoding of samples that were read as one batch. None in torch mode.
        replicas: difference of the positions of neighbouring samples.
    """

    def __init__(
        self,
        dataset: Any,
        function: Callable[[Any], Any],
        *,
        one_by_one: bool,
        seeder: SampleSeeder | None = None,
        replicas: int = 1,
    ) -> None:
        self._asyncloader_decoded = dataset
        self._decode = function
        self._seeder = seeder
        self._replicas = replicas
        # In torch mode `__getitems__` may be None, as in torch.
        batches = fetches_batches(dataset) if one_by_one else getattr(dataset, "__getitems__", None)
        self.__getitems__ = self._batch if batches else None

    def __getitem__(self, index: Any) -> Any:
        return self._decode(self._asyncloader_decoded[index])

    def _batch(self, index: Any) -> list[Any]:
        decoded = []
        seeder = self._seeder
        first = 0 if seeder is None else seeder.first
        for item, sample in enumerate(self._asyncloader_decoded.__getitems__(index)):
            position = None if seeder is None else first + item * self._replicas
            try:
                if seeder is not None and position is not None:
                    seeder.sample(position)
                decoded.append(self._decode(sample))
            except Exception as error:
                try:
                    add_note(error, describe_sample(index[item], item, position))
                except Exception:  # the index is not a sequence
                    add_note(error, f"while fetching item {item} of the batch")
                raise
        return decoded
