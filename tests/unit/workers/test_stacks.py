"""Real worker processes, forked from the test, that wait, hang in C, stop, crash, or write without end."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.workers import stacks
from asyncloader.workers.stacks import (
    StackReader,
    Target,
    ask,
    crash_trace,
    install,
    stack_pipe,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux what processes are doing")

FORK = multiprocessing.get_context("fork")
SECONDS = 20.0  # for events that happen at once; reached only if they do not


Ready = Callable[[], object]
"""Called by a worker's function once it runs: the function is then on the stack."""


def stuck_in_c(ready: Ready) -> None:
    """Block forever with the GIL held: reads from an empty pipe without giving the GIL up."""
    read_fd, _ = os.pipe()
    ready()
    ctypes.PyDLL(None).read(read_fd, ctypes.create_string_buffer(1), 1)


def waiting_in_python(ready: Ready) -> None:
    ready()
    threading.Event().wait()


class Worker:
    """A forked process that installs the handler (unless disabled) and then runs `body`."""

    def __init__(self, body: Callable[[Ready], object], installs: bool) -> None:
        self.reader, write_fd = stack_pipe()
        ready_read, ready_write = os.pipe()

        def main() -> None:
            if installs:
                install(write_fd)
            body(lambda: os.write(ready_write, b"!"))

        process: Any = FORK.Process(target=main)
        process.start()
        self.process = process
        os.close(write_fd)
        assert select.select([ready_read], [], [], SECONDS)[0]
        os.read(ready_read, 1)
        os.close(ready_read)
        os.close(ready_write)
        self.pid: int = process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def target(self) -> Target:
        return Target(self.pid, self.pidfd, self.reader)

    def wait(self) -> int:
        """Wait for its end, read its last output, and return the exit code."""
        assert select.select([self.pidfd], [], [], SECONDS)[0]
        self.process.join()
        self.reader.read()
        return int(self.process.exitcode)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        os.close(self.pidfd)
        self.reader.close()
        self.reader.close()


@contextmanager
def worker(body: Callable[[Ready], object], *, installs: bool = True) -> Generator[Worker]:
    worker = Worker(body, installs)
    try:
        yield worker
    finally:
        worker.close()


# -------------------------------------------------------------------------------------------------------- asking


@pytest.mark.parametrize("body", [stuck_in_c, waiting_in_python])
async def test_worker_tells_its_stack(body: Callable[[Ready], None]) -> None:
    """The report has the function that the worker is in, also if it is stuck in C with the GIL."""
    with worker(body) as one:
        (report,) = await ask([one.target], SECONDS)
        assert f"in {body.__name__}\n" in report.text
        assert "most recent call first" in report.text
        assert "stacks on signal" not in report.text
        assert report.state in {"running", "sleeping"}


async def test_starting_worker_is_not_hurt() -> None:
    """A worker that has not installed the handler yet gets no signal, which would end it."""
    with worker(waiting_in_python, installs=False) as one:
        (report,) = await ask([one.target], SECONDS)
        assert report.text.startswith("no stack: the process is still starting")
        assert one.process.is_alive()


async def test_worker_that_took_the_handler_away_is_not_hurt() -> None:
    """User code that resets all signals does not make the request deadly."""

    def body(ready: Ready) -> None:
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
            signal.signal(number, signal.SIG_DFL)
        waiting_in_python(ready)

    with worker(body) as one:
        (report,) = await ask([one.target], SECONDS)
        assert "does not take signal" in report.text
        assert one.process.is_alive()


async def test_no_answer_in_time() -> None:
    """A worker that blocks the signal is waited for until the time is over, and no longer."""

    def body(ready: Ready) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        waiting_in_python(ready)

    with worker(body) as one:
        (report,) = await ask([one.target], 0.05)
        assert report.text == "no stack: the process did not answer in time"
        assert one.process.is_alive()


async def test_reader_closed_meanwhile() -> None:
    """A worker that is replaced during a request ends its part of it."""

    def body(ready: Ready) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        waiting_in_python(ready)

    with worker(body) as one, worker(stuck_in_c) as two:
        request = asyncio.ensure_future(ask([one.target, two.target], SECONDS))
        await asyncio.sleep(0)
        one.reader.close()
        reports = await request
        assert reports[0].text == "no stack: the process did not answer in time"
        assert "in stuck_in_c\n" in reports[1].text


# ------------------------------------------------------------------------------------------------------- crashes


def test_full_pipe_does_not_keep_a_dying_worker() -> None:
    """A worker whose pipe is full and not read crashes nevertheless."""
    reader, write_fd = stack_pipe()

    def main() -> None:
        install(write_fd)
        while True:
            try:
                os.write(write_fd, bytes(1 << 12))
            except BlockingIOError:
                os.abort()

    process = FORK.Process(target=main)
    process.start()
    os.close(write_fd)
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGABRT
    process.close()
    reader.close()


# ----------------------------------------------------------------------------------------------------- the parts


def test_signal_is_one_that_nobody_uses() -> None:
    """A signal with a handler is passed over, whether Python or C code set it; another signal is used."""
    first = stacks._free_signal()
    assert first is not None

    def body() -> None:
        signal.signal(first, lambda *_: None)
        second = stacks._free_signal()
        assert second not in {None, first}
        assert second is not None
        faulthandler.register(second, file=2)
        assert stacks._free_signal() not in {None, first, second}

    process = FORK.Process(target=body)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    process.close()


# ----------------------------------------------------------------------------------------------------- the reader alone


@given(st.lists(st.binary(max_size=3000), max_size=20), st.integers(1, 64), st.integers(0, 20))
def test_reader_finds_the_greeting_and_nothing_else(chunks: list[bytes], number: int, place: int) -> None:
    """Whatever surrounds it, the greeting gives the signal, and the text is the rest of the bytes."""
    chunks = [chunk.replace(b"\n", b".") for chunk in chunks]
    before, after = b"".join(chunks[:place]), b"".join(chunks[place:])
    read_fd, write_fd = os.pipe()
    reader = StackReader(read_fd)
    try:
        for data in (before, b"stacks on signal %d\n" % number, after):
            os.write(write_fd, data)
            assert reader.read() == len(data)
        assert reader.signal == number
        assert reader.text() == (before + after).decode(errors="replace")
        assert reader.read() == 0
        assert not reader.ended
    finally:
        os.close(write_fd)
        reader.read()
        assert reader.ended
        reader.close()


def test_reader_keeps_the_last_64_kib() -> None:
    """However much is written, the end of it is kept, and reading never waits."""
    reader, write_fd = stack_pipe()
    for number in range(40):
        os.write(write_fd, b"%04d" % number * 1024)
        reader.read()
    text = reader.text()
    assert len(text) == 64 << 10
    assert text.endswith("0039")
    assert text.startswith("0024")
    reader.clear()
    assert reader.text() == ""
    os.close(write_fd)
    reader.close()
    assert reader.read() == 0
    assert reader.fileno() == -1


def test_crash_trace_is_the_struck_thread() -> None:
    """The trace is the crashed thread's of the last dump; without a crash it is empty."""
    asked = 'Current thread 0x1 (most recent call first):\n  File "a", line 1 in asked\n'
    crash = (
        "Fatal Python error: Bus error\n\n"
        'Thread 0x2 (most recent call first):\n  File "b", line 2 in other\n\n'
        'Current thread 0x1 (most recent call first):\n  File "c", line 3 in inner\n  File "c", line 4 in outer\n\n'
        "Extension modules: numpy (total: 1)\n"
    )
    lines = crash_trace(asked + crash, 9).splitlines()
    assert lines == [
        "Fatal Python error: Bus error",
        "Current thread 0x1 (most recent call first):",
        '  File "c", line 3 in inner',
        '  File "c", line 4 in outer',
    ]
    assert crash_trace(crash, 1).splitlines() == lines[:3]
    assert crash_trace(crash.replace("Current thread", "Thread"), 1).splitlines()[-1] == '  File "b", line 2 in other'
    assert crash_trace("Fatal Python error: Aborted", 5) == "Fatal Python error: Aborted"
    assert crash_trace(asked, 5) == ""
    assert crash_trace("", 5) == ""
