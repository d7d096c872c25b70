"""Gets the Python stacks of a worker's threads, even if it is stuck in C code that holds the GIL.

Data path: none; used for the report before a time-out is raised, and for the error of a crash.

There is one pipe per worker. In the worker `faulthandler` writes into it: at a fatal signal (segmentation fault, abort,
bus error), and whenever a signal arrives that is otherwise unused. Its handlers are C, need no GIL and take no lock, so
they also answer for a process whose Python code cannot run any more. The main process reads.

- A signal is sent only to a worker that has announced a handler for it (the first line in the pipe names the signal)
  and that, where /proc can be read, still has it.
- A worker that is stopped (SIGSTOP), or waits for a disk that does not answer, gives no stack: its report says so.

Handlers are installed in workers only; the main process's own `faulthandler` and handlers are unchanged. A call in C
that the signal interrupts, and that is not one of those that the kernel restarts (``nanosleep``, ``poll``), returns
early with ``EINTR``, as with any signal; Python's own calls go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import re
import select
import signal
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

_KEPT_BYTES = 64 << 10
_READS_AT_ONCE = 16  # bounds one `read` if a worker writes as fast as we read
_QUIET = 0.1  # seconds without another byte after which a stack counts as complete; it has no end mark
_GREETING = re.compile(rb"stacks on signal (\d+)\n")

# ------------------------------------------------------------------------------------------------ in the worker


def install(fd: int) -> int | None:
    """Have the stacks of all threads written to `fd` at a fatal signal, and at one signal that is unused.

    Args:
        fd: the write end of `stack_pipe`. It must stay open as long as this process lives.

    Returns:
        The signal's number, which is also written to the pipe for the main process; None if no signal is unused.
    """
    # The main process reads only when it asks for stacks: a full pipe must not stop this process.
    os.set_blocking(fd, False)
    # Disable first: if it was enabled before the fork, it would restore handlers that have been replaced since.
    faulthandler.disable()
    faulthandler.enable(file=fd, all_threads=True)
    number = _free_signal()
    if number is None:
        return None
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    with contextlib.suppress(OSError):  # the main process has closed its end, and will not ask for stacks
        os.write(fd, b"stacks on signal %d\n" % number)
    return number


def _free_signal() -> int | None:
    candidates = (
        # Without the first and last few: libraries that use a real-time signal tend to take one of those.
        list(range(signal.SIGRTMAX - 3, signal.SIGRTMIN + 3, -1)) if hasattr(signal, "SIGRTMAX") else [signal.SIGUSR2]
    )
    for number in candidates:
        # Python knows only its own handlers; the kernel also knows those of C libraries and of `faulthandler`.
        if signal.getsignal(number) is signal.SIG_DFL and _catches(os.getpid(), number) is not True:
            return number
    return None


# ------------------------------------------------------------------------------------------- in the main process


class StackReader:
    """The read end of a worker's pipe: keeps the last 64 KiB that the worker wrote, without the greeting."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._kept = bytearray()
        self.signal: int | None = None
        """The signal that the worker handles, once its greeting was read."""
        self.ended = False
        """Whether the write end is closed."""

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._fd

    def read(self) -> int:
        """Read the pipe until it is empty, without blocking. Returns the number of bytes."""
        came = 0
        for _ in range(_READS_AT_ONCE if self._fd >= 0 else 0):
            try:
                data = os.read(self._fd, _KEPT_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                break
            came += len(data)
            self._keep(data)
        return came

    def _keep(self, data: bytes) -> None:
        self._kept += data
        # Searched in all that was kept, because the greeting may come in two reads.
        if self.signal is None and (greeting := _GREETING.search(self._kept)) is not None:
            self.signal = int(greeting[1])
            del self._kept[greeting.start() : greeting.end()]
        del self._kept[:-_KEPT_BYTES]

    def text(self) -> str:
        """Return the text that was read since `clear`, at most the last 64 KiB."""
        return self._kept.decode(errors="replace")

    def clear(self) -> None:
        """Forget the text."""
        self._kept.clear()

    def close(self) -> None:
        """Close the descriptor; the text stays. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"<StackReader fd={self._fd} signal={self.signal} {len(self._kept)} bytes>"


def stack_pipe() -> tuple[StackReader, int]:
    """Create the pipe of one worker. Returns the reader and the write end, which the caller passes on and closes.

    Raises:
        OSError: no descriptors are left.
    """
    read_fd, write_fd = os.pipe()  # both close-on-exec
    os.set_blocking(write_fd, False)
    return StackReader(read_fd), write_fd


class Target(NamedTuple):
    """A worker to ask. The loop's thread may close its reader during `ask`."""

    pid: int
    death_fd: int
    """Readable once the process has ended. While it is not, `pid` is still this worker's."""
    reader: StackReader


class Report(NamedTuple):
    """What one worker was doing."""

    state: str
    """`process_state` when the worker was asked."""
    text: str
    """The stacks of all its threads, or a sentence that says why they could not be had."""


async def ask(targets: Sequence[Target], seconds: float) -> list[Report]:
    """Ask all workers for their stacks at once, and wait for the answers without blocking the loop.

    An answer is complete when nothing came for 0.1 s. Text that a reader held before is discarded.

    Args:
        targets: the workers.
        seconds: time limit for all of them together.

    Returns:
        One report per target, in their order.
    """
    states = [process_state(target.pid) for target in targets]
    refusals = [_send(target, state) for target, state in zip(targets, states, strict=True)]
    left = [target.reader for target, refusal in zip(targets, refusals, strict=True) if not refusal]
    until = monotonic() + seconds
    while left and (remaining := until - monotonic()) > 0:
        await asyncio.sleep(min(_QUIET, remaining))
        # A worker may be replaced meanwhile, and its reader closed.
        left = [each for each in left if (each.read() or not each.text()) and not each.ended and each.fileno() >= 0]
    texts = [
        refusal or target.reader.text().strip() or "no stack: the process did not answer in time"
        for target, refusal in zip(targets, refusals, strict=True)
    ]
    return [Report(state, text) for state, text in zip(states, texts, strict=True)]


def _send(target: Target, state: str) -> str:
    """Ask one worker for its stacks. Returns why there will be none; empty if there will."""
    reader = target.reader
    reader.read()
    # Text from before the request is no answer to it.
    reader.clear()
    if state.startswith("stopped"):
        return f"no stack: the process is {state}, so it cannot answer"
    if reader.signal is None:
        return "no stack: the process is still starting, or has no signal free to be asked by"
    try:
        poll = select.poll()
        poll.register(target.death_fd, select.POLLIN)
        if poll.poll(0):
            return "no stack: the process has ended"
        # Without a handler the signal would end the process.
        if _catches(target.pid, reader.signal) is False:
            return f"no stack: the process does not take signal {reader.signal} any more"
        os.kill(target.pid, reader.signal)
    except OSError as error:
        return f"no stack: the process could not be asked ({error})"
    return ""


# ----------------------------------------------------------------------------------------- states from the kernel

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or network file system (uninterruptible)",
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "zombie",
    "X": "zombie",
}


def process_state(pid: int) -> str:
    """Describe the state of the process's main thread; "unknown" if it has ended, or /proc cannot be read."""
    try:
        # pid (command) state ...: the command may hold spaces and brackets, so split after the last
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "unknown"
    return _STATES.get(state, "unknown")


def _catches(pid: int, number: int) -> bool | None:
    """Whether the process has a handler for the signal; None where /proc cannot be read."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    # The lowest bit is signal 1.
    return None if found is None else bool(int(found[1], 16) >> (number - 1) & 1)


def crash_trace(text: str, n: int) -> str:
    """Return the fatal error that `text` ends with, and the stack of the failing thread, most recent call first.

    `faulthandler` also writes the other threads and a list of extension modules, and the outermost calls last, so the
    last lines of the text would say little.

    Args:
        text: a worker's output (`StackReader.text`).
        n: maximal number of calls.

    Returns:
        Some lines; "" if there was no fatal error (SIGKILL leaves none).
    """
    _, mark, crash = text.rpartition("Fatal Python error: ")
    if not mark:
        return ""
    lines = (mark + crash).splitlines()
    # If the failing thread is unknown to Python, no thread is marked as current: take the first thread.
    starts = [at for at, line in enumerate(lines) if line.startswith("Current thread ")]
    starts = starts or [at for at, line in enumerate(lines) if line.startswith("Thread ")]
    trace = lines[:1]
    if starts:
        trace.append(lines[starts[0]])
        for line in lines[starts[0] + 1 :][:n]:
            if not line.startswith("  "):
                break
            trace.append(line)
    return worker_calls("\n".join(trace))


def worker_calls(text: str) -> str:
    """Remove from the stacks the parts that every worker has: our own waiting thread, and the calls that led to the
    worker's entry point (in a forked worker those of the main process).
    """
    blocks = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text)
    kept = [re.sub(r"(\n *File [^\n]* in worker_main)(\n *File [^\n]*)+", r"\1", block) for block in blocks]
    return "\n".join(block for block in kept if " in wait_for_parent" not in block)
