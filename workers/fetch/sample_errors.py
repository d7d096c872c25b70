"""Samples that raise, and what becomes of them: left out, replaced, or substituted by others.

Data path: worker: fetch -> [bad_samples] -> collate. Only where `on_error` is not "raise"; otherwise no fetcher has a
`SampleErrorHandler`.

A fetcher tells its guard of each sample that raised, and gets a substitute, or `DROPPED`. What happened is recorded in a
list that the caller of `fetch` gave: batches that are fetched concurrently have lists of their own, and the records are
there whichever way the fetch ends. Errors of collation belong to no sample, and are not for the guard.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from asyncloader.workers.fetch.error_notes import add_note
from asyncloader.workers.fetch.seeding import derive

__all__ = [
    "ATTEMPTS",
    "DROPPED",
    "ERROR_CHARACTERS",
    "TRACEBACK_CHARACTERS",
    "BadSample",
    "ErrorPolicy",
    "NoSamples",
    "SampleErrorHandler",
    "StreamErrors",
    "dropped_count",
    "substitute_index",
]

ATTEMPTS = 16
"""Substitutes that are tried for one sample."""
MAX_CONSECUTIVE = 1000
"""Failures of a stream one after the other, after which it is given up."""
ERROR_CHARACTERS = 1000
TRACEBACK_CHARACTERS = 16_000

DROPPED: Any = object()
"""In place of a sample that is left out."""


class BadSample(NamedTuple):
    """A sample that raised, and what was done.

    Attributes:
        index: as the sampler gave it; None for a sample of an iterable dataset.
        position: its place in the epoch's order in seeded mode; its number in the worker's stream for an iterable
            dataset (both from 0); None where there is neither.
        worker: number of the worker; 0 without workers.
        pid: process id of the worker.
        error: type and text of the exception, as in ``"ValueError: bad jpeg"``; at most 1000 characters.
        traceback: the exception's, as text; the last 16000 characters at most.
        action: "skipped" (left out of its batch), "refilled" (another index took its place) or "replaced" (by what the
            `on_error` function gave). A substitute that raises, too, has a record of its own, which says "skipped":
            it had no place to lose.
        substitute: the index that took its place when it was refilled, else None.
    """

    index: Any
    position: int | None
    worker: int
    pid: int
    error: str
    traceback: str
    action: str
    substitute: Any


def dropped_count(records: Sequence[BadSample]) -> int:
    """How many samples fewer a batch has for these records of it."""
    skipped = [record.position for record in records if record.action == "skipped"]
    if None in skipped:
        return len(skipped)  # in torch mode, where no substitute is tried
    return len(set(skipped) - {record.position for record in records if record.action == "refilled"})


class ErrorPolicy(NamedTuple):
    """What workers do about samples that raise.

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
    """Every sample of the batch was left out: there is no batch, but it counts as one that was made.

    A cursor is to be taken as after a batch. At a stream's end it comes before the StopIteration if there was anything
    to be recorded, so that a StopIteration never comes with records.
    """


def substitute_index(seed: int, epoch: int, position: int, attempt: int, length: int) -> int:
    """Index of the sample that is tried in place of the one at `position`.

    A pure function of its arguments: the same for every number of workers and ranks. Uniform on ``[0, length)``, but
    for what 64 bits do not divide by `length`: no index is likelier than another by more than ``length / 2**64`` of
    its probability. Drawn with replacement: substitutes may repeat, and may be in the epoch already.
    """
    return derive(seed, "refill", epoch, position, attempt) % length


class SampleErrorHandler:
    """Applies a policy in one worker and epoch.

    Args:
        policy: what to do.
        worker: number of the worker.
        epoch: the epoch's number.
        asynchronous: whether the dataset is, so that `on_error` may be awaited.

    Raises:
        TypeError: `on_error` is a coroutine function, but the dataset is blocking.
    """

    def __init__(self, policy: ErrorPolicy, worker: int, epoch: int, *, asynchronous: bool) -> None:
        self.worker = worker
        self._ask: Callable[[Any, Exception], Any] | None = policy.on_error if callable(policy.on_error) else None
        self._seed, self._epoch, self._length = policy.seed or 0, epoch, policy.length or 0
        self._refills = policy.refill and self._ask is None and self._length > 0
        if not asynchronous and inspect.iscoroutinefunction(self._ask):
            raise _coroutine_error()

    def handle(
        self,
        index: Any,
        position: int | None,
        error: Exception,
        bad: list[BadSample],
        make: Callable[[Any], Any] | None = None,
    ) -> Any:
        """A sample raised.

        Args:
            index: as the sampler gave it.
            position: its place in the epoch's order, or its number in the stream.
            error: what it raised.
            bad: gets the records.
            make: makes the sample of another index in this place; None where that cannot be.

        Returns:
            What takes its place, or `DROPPED`.

        Raises:
            Exception: what the `on_error` function raised, with `error` as its cause.
        """
        if self._ask is not None:
            try:
                sample = self._ask(index, error)
                if inspect.isawaitable(sample):
                    if inspect.iscoroutine(sample):
                        sample.close()
                    raise _coroutine_error()
            except Exception as raised:
                _set_cause(raised, error)
                raise
            bad.append(self._record(index, position, error, "replaced"))
            return sample
        failed = []
        for substitute in self._substitutes(position, make is not None):
            assert make is not None
            try:
                sample = make(substitute)
            except Exception as another:
                failed.append(self._record(substitute, position, another, "skipped"))
                continue
            bad += [self._record(index, position, error, "refilled", substitute), *failed]
            return sample
        bad += [self._record(index, position, error, "skipped"), *failed]
        return DROPPED

    async def handle_async(
        self,
        index: Any,
        position: int | None,
        error: Exception,
        bad: list[BadSample],
        make: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> Any:
        """`handle`, where `make` and the `on_error` function are awaited."""
        if self._ask is not None:
            try:
                sample = self._ask(index, error)
                if inspect.isawaitable(sample):
                    sample = await sample
            except Exception as raised:
                _set_cause(raised, error)
                raise
            bad.append(self._record(index, position, error, "replaced"))
            return sample
        failed = []
        for substitute in self._substitutes(position, make is not None):
            assert make is not None
            try:
                sample = await make(substitute)
            except Exception as another:
                failed.append(self._record(substitute, position, another, "skipped"))
                continue
            bad += [self._record(index, position, error, "refilled", substitute), *failed]
            return sample
        bad += [self._record(index, position, error, "skipped"), *failed]
        return DROPPED

    def _substitutes(self, position: int | None, possible: bool) -> list[int]:
        if not self._refills or not possible or position is None:
            return []
        return [substitute_index(self._seed, self._epoch, position, at, self._length) for at in range(ATTEMPTS)]

    def _record(
        self, index: Any, position: int | None, error: Exception, action: str, substitute: Any = None
    ) -> BadSample:
        text, trace = _texts(error)
        return BadSample(index, position, self.worker, os.getpid(), text, trace, action, substitute)


class StreamErrors:
    """Sees to it that a stream which raises makes progress, and that its end is one.

    A generator is over once it has raised. So when an exception has come out of a generator, and the next thing is the
    stream's end, the rest of the stream was lost: that must not pass for the end. An iterator of another kind can go on
    after an exception, and may as well end.
    """

    def __init__(self) -> None:
        self._consecutive = 0
        self._next = -1  # place after the last failure
        self._generator_error: Exception | None = None

    def failed(self, error: Exception, place: int) -> bool:
        """The sample at `place` raised. Whether that is enough: raise the error then."""
        self._consecutive = self._consecutive + 1 if place == self._next else 1
        self._next = place + 1
        self._generator_error = error if _left_a_generator(error) else None
        if self._consecutive < MAX_CONSECUTIVE:
            return False
        add_note(
            error,
            f"The stream has raised {self._consecutive} times in a row, and on_error gives it up. If its iterator cannot go "
            "on after an exception, it should raise StopIteration.",
        )
        self._consecutive = 0
        return True

    def ended(self, place: int) -> Exception | None:
        """The end came where the sample at `place` should be: the exception to be raised if it is none."""
        dead, self._generator_error = self._generator_error, None
        if dead is None or place != self._next:
            return None
        add_note(
            dead,
            "The stream was over after this exception: a generator cannot go on after one, so on_error finds nothing "
            "more to read. Catch it inside the generator, or write an iterator class whose __next__ can go on.",
        )
        return dead


def _left_a_generator(error: Exception) -> bool:
    """Whether the exception went through the frame of a generator, which is thereby over."""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        generator = code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)
        # An `__await__` that is written as a generator is a coroutine's, not the stream's.
        if generator and not code.co_flags & inspect.CO_ITERABLE_COROUTINE and code.co_name != "__await__":
            return True
        step = step.tb_next
    return False


def _texts(error: Exception) -> tuple[str, str]:
    """The exception and its traceback as texts. User code runs here (`__str__`), and may raise."""
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
        raised.__cause__ = error


def _coroutine_error() -> TypeError:
    return TypeError(
        "on_error gives a coroutine, but the dataset is not asynchronous, so nobody awaits it: give a plain function, "
        "or a dataset with `async def __getitem__`"
    )
