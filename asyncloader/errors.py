"""Every error that asyncloader raises by itself, by meaning.

    LoaderError                     root; catch this to catch all of them
    +-- WorkerDied                  the world ended a worker (also a RuntimeError, in torch's wording)
    +-- LoaderTimeout               no batch within `timeout` seconds (also a RuntimeError, in torch's wording)
    +-- LoaderClosed                we ended it: the loader or iterator was closed (also a RuntimeError)
    +-- StateError                  a saved state cannot be loaded (also a ValueError)
    +-- RanksDisagree               the ranks' epochs end differently (also a RuntimeError)
    +-- RingMemoryError             not enough shared memory (also a MemoryError)
    +-- UnsupportedPlatform         this system cannot run workers (also a RuntimeError)

Errors that a user's own code raises in a worker keep their own type and are none of these.
Each error pickles: its constructor arguments are its attributes. One warning has a class of its own, so that it can be
filtered: `NeverIteratedWarning`.
"""

from __future__ import annotations

import signal

__all__ = [
    "LoaderClosed",
    "LoaderError",
    "LoaderTimeout",
    "NeverIteratedWarning",
    "RanksDisagree",
    "RingMemoryError",
    "StateError",
    "UnsupportedPlatform",
    "WorkerDied",
]


class LoaderError(Exception):
    """Root of the loader's own errors."""


class WorkerDied(LoaderError, RuntimeError):
    """A worker process ended although nobody asked it to.

    Attributes:
        worker_id: number of the worker, 0 to ``num_workers - 1``.
        pid: its process id.
        exitcode: its exit code; negative for the signal that killed it; None when nobody could tell.
    """

    def __init__(self, worker_id: int, pid: int, exitcode: int | None) -> None:
        super().__init__(worker_id, pid, exitcode)
        self.worker_id = worker_id
        self.pid = pid
        self.exitcode = exitcode

    def __str__(self) -> str:
        # The two wordings are torch's own, so that scripts which look for them go on working.
        if self.exitcode is not None and self.exitcode < 0:
            number = -self.exitcode
            text = f"DataLoader worker (pid {self.pid}) is killed by signal: {signal.strsignal(number)}. "
            if number == signal.SIGKILL:
                text += "It was worker {} of the loader; the kernel does this when memory runs out (see dmesg). "
            else:
                text += "It was worker {} of the loader. "
            return text.format(self.worker_id)
        text = f"DataLoader worker (pid(s) {self.pid}) exited unexpectedly"
        code = "unknown" if self.exitcode is None else str(self.exitcode)
        return f"{text}: worker {self.worker_id}, exit code {code}"


class LoaderTimeout(LoaderError, RuntimeError):
    """No batch came within the loader's ``timeout``.

    Attributes:
        seconds: the ``timeout`` that passed.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return f"DataLoader timed out after {self.seconds} seconds"


class LoaderClosed(LoaderError, RuntimeError):
    """The loader or its iterator was closed and cannot give another batch."""


class RanksDisagree(LoaderError, RuntimeError):
    """The ranks' epochs end differently, which the loader was told not to even out; or one of them failed or left."""


class StateError(LoaderError, ValueError):
    """A state cannot be loaded: it is broken, newer, of another loader, or cannot be resumed from exactly."""


class RingMemoryError(LoaderError, MemoryError):
    """Shared memory for a batch or a ring could not be had.

    Attributes:
        wanted: bytes asked for.
        limit: bytes that can be had, None when the system did not say.
        reason: where the limit comes from.
    """

    def __init__(self, wanted: int, limit: int | None, reason: str) -> None:
        super().__init__(wanted, limit, reason)
        self.wanted = wanted
        self.limit = limit
        self.reason = reason

    def __str__(self) -> str:
        limit = "an unknown limit" if self.limit is None else f"{self.limit:,} bytes"
        return (
            f"asyncloader wants {self.wanted:,} bytes of shared memory but is bounded by {limit} ({self.reason}). "
            "Make the batches smaller, lower num_workers or prefetch_factor, or set ring_bytes (bytes a worker)."
        )


class UnsupportedPlatform(LoaderError, RuntimeError):
    """Worker processes need a system that asyncloader does not support yet."""


class NeverIteratedWarning(UserWarning):
    """A `DataLoader` was collected without having been iterated: a framework may have replaced it by a stock one."""
