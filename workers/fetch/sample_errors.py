"""Handles samples that raise: drops them, replaces them, or substitutes other samples.

Data path: worker: fetch -> [sample_errors] -> collate. Only with an `on_error` other than "raise"; without one,
fetchers have no `SampleErrorHandler`.

A fetcher passes each sample that raised to the handler, and gets a substitute or `DROPPED`. Records of what happened go
to a list that the caller of `fetch` provides: batches that are fetched concurrently have separate lists, and the
records are kept even if the fetch raises. Errors of collation belong to no sample and are not handled here.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncloader.base.events import SkippedSample
from asyncloader.errors import is_about_sample
from asyncloader.workers.fetch.dataset_kinds import is_awaited
from asyncloader.workers.fetch.seeding import derive

ATTEMPTS = 16
"""Number of substitutes that are tried for one sample."""
ERROR_CHARACTERS = 1000
TRACEBACK_CHARACTERS = 16_000

DROPPED: Any = object()
"""Stands for a sample that is dropped from its batch."""


class MissingSample(NamedTuple):
    """Stands for a sample that raised, where `collate_fn` expects it: an `on_error` that returns it replaces nothing,
    so it leaves no record.
    """

    error: Any


def dropped_count(records: Sequence[SkippedSample]) -> int:
    """Return the number of samples that a batch lacks, given its records."""
    skipped = [record.position for record in records if record.action == "skipped"]
    if None in skipped:
        return len(skipped)  # torch mode, where no substitutes are tried
    return len(set(skipped) - {record.position for record in records if record.action == "refilled"})


class ErrorPolicy(NamedTuple):
    """The `on_error` options: what workers do about samples that raise.

    Attributes:
        on_error: "skip", or a function of (index, exception) that gives a substitute, or raises. For an asynchronous
            dataset it may be a coroutine function.
        refill: substitute skipped samples by others: seeded mode and map datasets.
        length: of the dataset, for `refill`.
        seed: the loader's, for `refill`.
    """

    on_error: Any = "skip"
    refill: bool = False
    length: int | None = None
    seed: int | None = None


class NoSamples(Exception):
    """Every sample of a batch was dropped: there is no batch, but the task counts as done.

    The caller takes a cursor as after a batch. At the end of a stream this is raised before `EndOfData` if there are
    records, so that the end never has any.
    """


def substitute_index(seed: int, epoch: int, position: int, attempt: int, length: int) -> int:
    """Return the index of the substitute to try for the sample at `position`.

    A pure function of its arguments: the same for every number of workers and ranks. Uniform on ``[0, length)`` up to a
    relative deviation of ``length / 2**64``. Drawn with replacement: substitutes may repeat, and may be in the epoch
    already.
    """
    return derive(seed, "refill", epoch, position, attempt) % length


class SampleErrorHandler:
    """Applies an error policy in one worker and epoch.

    Args:
        policy: the policy.
        worker: number of the worker.
        epoch: the epoch's number.
        asynchronous: whether the dataset is asynchronous, so that `on_error` may be awaited.

    Raises:
        TypeError: `on_error` is a coroutine function, but the dataset is blocking.
    """

    def __init__(self, policy: ErrorPolicy, worker: int, epoch: int, *, asynchronous: bool) -> None:
        self.worker = worker
        self._asynchronous = asynchronous
        self._function: Callable[[Any, Exception], Any] | None = policy.on_error if callable(policy.on_error) else None
        self._seed, self._epoch, self._length = policy.seed or 0, epoch, policy.length or 0
        self._refills = policy.refill and self._function is None and self._length > 0
        if not asynchronous and is_awaited(self._function):
            raise _coroutine_error()

    async def handle(
        self,
        index: Any,
        position: int | None,
        error: Exception,
        records: list[SkippedSample],
        make: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Handle a sample that raised. For a blocking dataset this never suspends.

        Args:
            index: as the sampler gave it.
            position: its position in the epoch's order, or its number in the stream.
            error: the exception, which is the sample's.
            records: gets the records.
            make: makes the sample of another index at this position; awaited for an asynchronous dataset. None where
                that is not possible.

        Returns:
            A substitute, or `DROPPED`.

        Raises:
            Exception: the error of the `on_error` function, with `error` as its cause; or a substitute's error that is
                not the sample's (`is_about_sample`).
        """
        if self._function is not None:
            try:
                sample = await self._answer(self._function(index, error))
            except Exception as raised:
                _set_cause(raised, error)
                raise
            if type(sample) is not MissingSample:
                records.append(self._record(index, position, error, "replaced"))
            return sample
        failed = []
        for substitute in self._substitutes(position, make is not None):
            assert make is not None
            try:
                sample = make(substitute)
                if self._asynchronous:
                    sample = await sample
            except Exception as another:
                # A transport's error is no fault of the substitute.
                if not is_about_sample(another):
                    raise
                failed.append(self._record(substitute, position, another, "skipped"))
                continue
            records += [self._record(index, position, error, "refilled", substitute), *failed]
            return sample
        records += [self._record(index, position, error, "skipped"), *failed]
        return DROPPED

    async def _answer(self, sample: Any) -> Any:
        """Return the value of the user's function, awaited if the dataset is asynchronous."""
        if not inspect.isawaitable(sample):
            return sample
        if self._asynchronous:
            return await sample
        if inspect.iscoroutine(sample):
            # Otherwise Python would warn that it was never awaited.
            sample.close()
        raise _coroutine_error()

    def _substitutes(self, position: int | None, possible: bool) -> list[int]:
        if not self._refills or not possible or position is None:
            return []
        return [substitute_index(self._seed, self._epoch, position, at, self._length) for at in range(ATTEMPTS)]

    def _record(
        self, index: Any, position: int | None, error: Exception, action: str, substitute: Any = None
    ) -> SkippedSample:
        # As texts, because the user's exception may not pickle, and keeps the frames of its traceback alive.
        text, trace = _texts(error)
        return SkippedSample(index, position, self.worker, os.getpid(), text, trace, action, substitute)


def _texts(error: Exception) -> tuple[str, str]:
    """Return the exception and its traceback as texts. User code (`__str__`) runs here and may raise."""
    name = type(error).__name__
    try:
        text = str(error)
        text = f"{name}: {text}" if text else name
    except Exception as another:
        text = f"{name}: <its text raised {type(another).__name__}>"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception as another:
        trace = f"<the traceback's text raised {type(another).__name__}>"
    return text[:ERROR_CHARACTERS], trace[-TRACEBACK_CHARACTERS:]


def _set_cause(raised: Exception, error: Exception) -> None:
    if raised is not error and raised.__cause__ is None:
        BaseException.__setattr__(raised, "__cause__", error)  # not the class's own, which may refuse


def _coroutine_error() -> TypeError:
    return TypeError(
        "on_error gives a coroutine, but the dataset is not asynchronous, so it is never awaited: give a plain "
        "function, or a dataset with `async def __getitem__`"
    )
