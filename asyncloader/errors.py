"""Defines every error that asyncloader itself raises.

    LoaderError                     root; catch this to catch all of them
    +-- WorkerDied                  a worker ended unexpectedly (also a RuntimeError, in torch's wording)
    +-- TaskQuarantined             a task killed three workers and is not retried (also a RuntimeError)
    +-- TooManySkippedSamples           more samples raised than `max_skipped_samples` allows (also a RuntimeError)
    +-- LoaderTimeout               no batch within `timeout` seconds (also a RuntimeError, in torch's wording)
    +-- LoaderClosed                the loader or iterator was closed (also a RuntimeError)
    +-- StateError                  a saved state cannot be loaded (also a ValueError)
    +-- RanksDisagree               the ranks' epochs end differently (also a RuntimeError)
    +-- RingMemoryError             not enough shared memory (also a MemoryError)
    +-- DeviceUnavailable           this process cannot use the `device` (also a RuntimeError)
    +-- PageLockError               a ring could not be page-locked for the `device` (also a MemoryError)
    +-- ShardError                  a shard is damaged or too large (also a ValueError)
    +-- ShardWriteError             a sample cannot be written to a shard (also a ValueError)
    +-- UnsupportedPlatform         this system cannot run workers (also a RuntimeError)

Errors that a user's own code raises in a worker keep their type.

Every error can be pickled: its constructor arguments are its attributes. Every error can also be made from a text
alone, as torch's `ExceptionWrapper` does to re-raise an error of another thread or process. ``str()`` is then that
text, and the attributes have their defaults: 0 for numbers (-1 for `worker_id`), empty texts and tuples, and None.

`NoEffectWarning` is a class of its own so that it can be filtered.
"""

from __future__ import annotations

import inspect
import logging
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

_log = logging.getLogger("asyncloader")

QUARANTINE_ADVICE = (
    "Load these samples in a process of their own to find the bad one, and leave it out; "
    'on_error="skip" leaves out the batch.'
)
RING_ADVICE = (
    "Make the batches smaller, lower num_workers or prefetch_factor, or set tuning=Tuning(ring_bytes=...), the most "
    "that each worker may take."
)


class LoaderError(Exception):
    """Root of the loader's own errors."""

    about_sample: bool = True
    """Whether the error says something about a sample, so that `on_error` applies. See `is_about_sample`."""

    # Not derived from `args`: torch's datapipes replace those of the errors that pass through them.
    _has_parts = False

    def __post_init__(self) -> None:
        """Tell attributes from a text, of an error that is a dataclass."""
        if len(self.args) == 1 and isinstance(self.args[0], str):
            vars(self).clear()
            return
        self.args = tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        self._has_parts = True

    def __str__(self) -> str:
        return self._sentence() if self._has_parts else super().__str__()

    def _sentence(self) -> str:
        """The text that is made from the attributes, if the error was not made from a text."""
        return super().__str__()


def is_about_sample(error: BaseException) -> bool:
    """Return whether an error is that of a sample, which `on_error` may leave out, and not that of the way to it.

    All errors are, but those by which a transport says that it could not read: a reset, a time-out, a refused
    credential would otherwise take samples out of the data that are as good as any. Nor is an ImportError: without the
    package no sample can be read. The decision is by type; each class of `LoaderError` has an attribute for it. Errors
    of a user's own clients count as the sample's: only the user knows their meaning.
    """
    return error.about_sample if isinstance(error, LoaderError) else not isinstance(error, ImportError)


def is_tried_again(error: BaseException) -> bool:
    """Return whether the batch that meets this error is made again at the next call, as a store failed: a transport's
    error that is not about a sample. Other errors of the user's code take their batch's place.
    """
    return isinstance(error, LoaderError) and not error.about_sample


def interrupts(error: BaseException) -> bool:
    """Return whether the error only interrupts reading, which goes on at the next call: a store failed, Ctrl-C
    came, or the program is to exit. Not a CancelledError (recognized by its name, without asyncio): the user's code
    raised it, for no batch is cancelled with its consumer.
    """
    return is_tried_again(error) or not (isinstance(error, Exception) or type(error).__name__ == "CancelledError")


def left_a_generator(error: BaseException) -> bool:
    """Whether the exception passed through the frame of a generator, which is finished thereby."""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        generator = code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)
        # A generator that implements `__await__`, or a generator-based coroutine, is not the stream.
        if generator and not code.co_flags & inspect.CO_ITERABLE_COROUTINE and code.co_name != "__await__":
            return True
        step = step.tb_next
    return False


def text_of(error: BaseException) -> str:
    """Return an error's text, or the name of its class where there is no text, or making it fails: a user's class may
    have a `__str__` that raises.
    """
    try:
        text = str(error).strip()
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = ""
    return text or type(error).__name__


@dataclass(eq=False, repr=False)
class WorkerDied(LoaderError, RuntimeError):
    """A worker process ended unexpectedly, and was not, or could not be, replaced.

    Attributes:
        worker_id: number of the worker, 0 to ``num_workers - 1``.
        pid: its process id; 0: it was a thread of this process; -1: it could not be started.
        exitcode: its exit code; the negative number of the signal that killed it; None if unknown.
        reason: further information, such as that the loader killed it, and after how many seconds; may be empty.
        advice: why it was not replaced, and what to do; empty if it was.
        trace: the stacks of its threads, if it could still write them (not after SIGKILL); else empty.
    """

    worker_id: int = -1
    pid: int = 0
    exitcode: int | None = None
    reason: str = ""
    advice: str = ""
    trace: str = ""

    def with_advice(self, advice: str) -> WorkerDied:
        """The same death, with this advice."""
        return WorkerDied(self.worker_id, self.pid, self.exitcode, self.reason, advice, self.trace)

    def _sentence(self) -> str:
        # The process's last output comes before the advice: users read the last line of an error.
        trace = f"\n{'What it wrote last' if self.pid else 'It was here'}:\n{self.trace}\n" if self.trace else " "
        more = " ".join(filter(None, (self.reason, self.advice)))
        if self.pid <= 0:
            what = " could not be started" if self.pid else ", a thread, is lost"
            return f"DataLoader worker {self.worker_id}{what}.{trace}{more}".rstrip()
        # The two wordings are torch's own, so that scripts that look for them keep working.
        if self.exitcode is not None and self.exitcode < 0:
            text = f"DataLoader worker (pid {self.pid}) is killed by signal: {signal_name(-self.exitcode)}.{trace}"
            text += f"It was worker {self.worker_id} of the loader"
            if -self.exitcode == signal.SIGKILL and not self.reason:
                text += "; the kernel does this when memory runs out (see dmesg)"
            return f"{text}. {more}".rstrip()
        text = f"DataLoader worker (pid(s) {self.pid}) exited unexpectedly"
        code = "unknown" if self.exitcode is None else str(self.exitcode)
        return f"{text}: worker {self.worker_id}, exit code {code}.{trace}{more}".rstrip()


@dataclass(eq=False, repr=False)
class TaskQuarantined(LoaderError, RuntimeError):
    """A task killed three workers and is not retried. The next batches still come.

    Attributes:
        indices: the sampler's item for the batch: a list of indices, or one index; None for a stream.
        deaths: worker number, pid and exit code of each worker that it killed (see `WorkerDied`).
        stderr: the last lines of the last worker's standard error, or the stack of a thread; may be empty.
        advice: further information, and what to do; empty: find the bad sample.
    """

    indices: Any = None
    deaths: Sequence[tuple[int, int, int | None]] = ()
    stderr: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        self.deaths = tuple(self.deaths)
        super().__post_init__()

    def _sentence(self) -> str:
        what = "the next batch of a stream" if self.indices is None else f"indices {shortened(self.indices)}"
        who = ", ".join(
            f"worker {worker} (pid {pid}, {ending(code)})" if pid else f"worker {worker} (a thread)"
            for worker, pid, code in self.deaths
        )
        threads = not any(pid for _, pid, _ in self.deaths)
        head = "The last was here" if threads else "The last lines of standard error"
        stderr = f"\n{head}:\n{self.stderr}\n" if self.stderr else " "
        verb = "took" if threads else "killed"
        text = f"the task for {what} {verb} {len(self.deaths)} workers and is not tried again: {who}."
        return f"{text}{stderr}{self.advice or QUARANTINE_ADVICE}"


@dataclass(eq=False, repr=False)
class TooManySkippedSamples(LoaderError, RuntimeError):
    """More samples of an epoch raised than `max_skipped_samples` allows; ``loader.skipped_samples`` has them all.

    Attributes:
        limit: `max_skipped_samples`.
        last: a description of the last sample that raised.
    """

    limit: int = 0
    last: str = ""

    def _sentence(self) -> str:
        return (
            f"more than max_skipped_samples={self.limit} samples of this epoch raised, the last one: {self.last}. "
            "Look at loader.skipped_samples, mend the dataset, or raise max_skipped_samples (None: no limit)."
        )


@dataclass(eq=False, repr=False)
class LoaderTimeout(LoaderError, RuntimeError):
    """No batch came within the loader's ``timeout``.

    Attributes:
        seconds: the ``timeout`` that passed.
    """

    seconds: float = 0.0

    def _sentence(self) -> str:
        return f"DataLoader timed out after {self.seconds} seconds"


class LoaderClosed(LoaderError, RuntimeError):
    """The loader or its iterator was closed and cannot give another batch."""


class RanksDisagree(LoaderError, RuntimeError):
    """The ranks' epochs differ in length and `on_uneven` forbids that; their shards or options differ; or another rank
    failed or left.
    """


class StateError(LoaderError, ValueError):
    """A state cannot be loaded: it is damaged, newer, of another loader, or cannot be resumed exactly."""


@dataclass(eq=False, repr=False)
class RingMemoryError(LoaderError, MemoryError):
    """There is not enough shared memory for a batch or a ring.

    Attributes:
        wanted: bytes asked for.
        limit: bytes available; None if the system does not say.
        reason: where the limit comes from.
        advice: what to do; empty: as for a ring.
    """

    wanted: int = 0
    limit: int | None = None
    reason: str = ""
    advice: str = ""

    def _sentence(self) -> str:
        limit = "an unknown limit" if self.limit is None else f"{self.limit:,} bytes"
        return (
            f"asyncloader wants {self.wanted:,} bytes of shared memory but is bounded by {limit} ({self.reason}). "
            f"{self.advice or RING_ADVICE}"
        )


@dataclass(eq=False, repr=False)
class DeviceUnavailable(LoaderError, RuntimeError):
    """The device that batches were to be copied to cannot be used.

    Attributes:
        device: as it was asked for.
        reason: why.
    """

    device: str = ""
    reason: str = ""

    def _sentence(self) -> str:
        return f"device={self.device!r} cannot be used: {self.reason}. Choose another device, or leave device= out."


@dataclass(eq=False, repr=False)
class PageLockError(LoaderError, MemoryError):
    """A ring could not be page-locked for the device. Nothing was locked, and the device keeps working.

    Attributes:
        nbytes: the ring's size.
        limit: bytes of locked memory that this process may have (``ulimit -l``), if that may be the cause; else None.
        reason: the driver's error.
    """

    nbytes: int = 0
    limit: int | None = None
    reason: str = ""

    def _sentence(self) -> str:
        text = f"a ring of {self.nbytes:,} bytes could not be page-locked: {self.reason}. "
        if self.limit is not None:
            text += (
                f"This process may lock {self.limit:,} bytes (ulimit -l; in a container also its own, docker run "
                "--ulimit memlock=-1): raise it if that is too little. "
            )
        return (
            text
            + "Lower num_workers, prefetch_factor or Tuning(ring_bytes=...), or use pin_memory=True instead of device=."
        )


class ServiceUnavailable(LoaderError, ConnectionError):
    """No node of a service gave a worker, or a batch, in time. The text has each address with its failure."""


class ShardError(LoaderError, ValueError):
    """A shard's bytes violate its format, or are larger than allowed.

    Attributes:
        url: the shard.
        offset: position of the error in bytes from the shard's beginning (decompressed bytes, in a compressed shard).
            None if the error has no single position.
        resume: if the sample can be skipped, where the next sample begins, in the units of the shard's reader (rows,
            for Parquet). None if reading cannot continue.
    """

    def __init__(self, message: str, *, url: str = "", offset: int | None = None, resume: int | None = None) -> None:
        super().__init__(message)
        self.url = url
        self.offset = offset
        self.resume = resume

    def __str__(self) -> str:
        location = "" if self.offset is None else f" at byte {self.offset:,}"
        return f"{super().__str__()} ({self.url}{location})" if self.url else super().__str__()


class ShardWriteError(LoaderError, ValueError):
    """A sample cannot be written to a shard.

    Attributes:
        number: of the sample, from 0.
        key: the sample's ``__key__``; empty without a key.
    """

    def __init__(self, message: str, *, number: int | None = None, key: str = "") -> None:
        super().__init__(message)
        self.number = number
        self.key = key

    def __str__(self) -> str:
        if self.number is None:
            return super().__str__()
        named = f" ({self.key!r})" if self.key else ""
        return f"sample {self.number:,}{named} cannot be written: {super().__str__()}"


class UnsupportedPlatform(LoaderError, RuntimeError):
    """asyncloader does not support worker processes on this system."""


NO_PROCESSES = (
    "worker processes, which need Unix sockets that pass file descriptors. Windows does not have these. Use "
    'num_workers=0 or workers="threads" (not tested on Windows itself), torch.utils.data.DataLoader, or WSL'
)
"""The end of an `UnsupportedPlatform` error's text."""


class NoEffectWarning(UserWarning):
    """An option of a loader or a dataset has no effect, because of another option or of the data."""


def warn_aside(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> Warning | None:
    """Warn while a batch is made or opened. Where warnings are errors, it goes to the log, and the batch is not lost.

    Args:
        text: the warning's.
        category: its class.
        stacklevel: as for `warnings.warn`, counted from the caller.

    Returns:
        The warning if it would have been raised, for a caller that can raise it later.
    """
    try:
        warnings.warn(text, category, stacklevel=stacklevel + 1)
    except Warning as raised:
        _log.warning("%s", text)
        return raised.with_traceback(None)
    return None


def signal_name(number: int) -> str:
    """The system's text for a signal, which torch uses, too: "Killed"."""
    return str(signal.strsignal(number))


def ending(exitcode: int | None) -> str:
    """How a process ended, in a few words."""
    if exitcode is None:
        return "exit code unknown"
    return f"killed by signal: {signal_name(-exitcode)}" if exitcode < 0 else f"exit code {exitcode}"


def shortened(value: Any, most: int = 200) -> str:
    """The value's text, cut in the middle where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]} ({len(text):,} characters)"
