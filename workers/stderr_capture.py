"""Captures the standard error of a suspected task, to be read if the worker dies over it again.

Data path: beside a task that has killed a worker before. Other tasks write to their process's standard error as usual,
and nothing is captured.

The main process creates a file in memory and sends its descriptor before the task. While the task runs, that file is
the worker's descriptor 2, for C libraries as for Python; afterwards the worker copies the text to the real standard
error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator

from asyncloader.workers.memory import segment

_TAIL = 16 << 10


def make_capture_file() -> int:
    """Create an empty file in memory; the caller owns its descriptor."""
    return segment.create(0)


@contextlib.contextmanager
def captured_stderr(fd: int) -> Generator[None]:
    """Context in which descriptor 2 is the file `fd`. Takes ownership of the descriptor."""
    # Text from before the task goes where it was meant to go.
    _flush()
    try:
        real = os.dup(2)
    except OSError:  # standard error is closed: nothing to capture
        os.close(fd)
        yield
        return
    try:
        os.dup2(fd, 2)
        try:
            yield
        finally:
            # Text that Python still buffers goes to the file, too: it is the task's.
            _flush()
            os.dup2(real, 2)
            with contextlib.suppress(OSError):  # no process reads it any more
                _pass_on(fd, real)
    finally:
        os.close(real)
        os.close(fd)


def read_tail(fd: int, lines: int = 20) -> str:
    """Return the last lines that were written, decoded as far as possible. Closes the descriptor."""
    try:
        text = _read(fd).decode(errors="replace")
    finally:
        os.close(fd)
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _pass_on(fd: int, real: int) -> None:
    passed = 0
    # With an offset of its own: the descriptor's offset is where the task's last write ended.
    while data := os.pread(fd, _TAIL, passed):
        passed += os.write(real, data)


def _read(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, _TAIL, max(0, size - _TAIL))


def _flush() -> None:
    with contextlib.suppress(Exception):  # the user may have replaced it by anything
        sys.stderr.flush()
