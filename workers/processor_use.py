"""Measures a worker's use of the CPUs: the time that it computes, and the time that it waits for a CPU.

Data path: beside the worker's tasks. The figures go into its `Recorder`, for the verdict on what bounds a run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from asyncloader.telemetry.counters import Recorder

_SCHEDULING = "/proc/thread-self/schedstat"


def thread_delay() -> float:
    """Seconds that this thread was ready to run so far and waited for a CPU; 0 where the kernel does not count them."""
    try:
        fd = os.open(_SCHEDULING, os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return _read_delay(fd)
    finally:
        os.close(fd)


def _read_delay(fd: int) -> float:
    if fd < 0:  # Windows has no `pread` either
        return 0.0
    try:
        return int(os.pread(fd, 64, 0).split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


class ProcessorUse:
    """Measures this process, or this thread, from now on.

    Args:
        recorder: gets the CPU seconds, and the seconds that the calling thread was ready to run and waited for a CPU,
            where the kernel counts these.
        clock: `time.process_time`: the CPU seconds of all threads; `time.thread_time`: of the calling thread.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._recorder, self._clock = recorder, clock
        self._begun = clock()
        self._fd = -1
        with contextlib.suppress(OSError):
            # The path names the thread that opens it, and the open file stays that thread's, whichever thread reads it.
            self._fd = os.open(_SCHEDULING, os.O_RDONLY)
        self._delayed = _read_delay(self._fd)

    def record(self) -> None:
        """Write the current figures."""
        self._recorder.put("cpu_s", self._clock() - self._begun)
        self._recorder.put("delayed_s", _read_delay(self._fd) - self._delayed)

    def close(self) -> None:
        """Record nothing any more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
