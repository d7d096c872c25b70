"""Real processes: a *main* process, forked from the test, and *workers*, forked from it, which outlive it or not."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from asyncloader.workers.ipc.lifeline import Lifeline, hold

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part of it is Linux's")

FORK = multiprocessing.get_context("fork")
SECONDS = 10.0  # for a process to end; reached only if it does not


class Pipe:
    """Lines from other processes, and the end once every process that could write has exited."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def say(self, text: str) -> None:
        os.write(self.write_fd, text.encode() + b"\n")

    def line(self) -> str:
        """The next line; "" at the end."""
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([self.read_fd], [], [], SECONDS)[0], f"nobody said a word after {line!r}"
            byte = os.read(self.read_fd, 1)
            if not byte:
                break
            line += byte
        return line.decode().strip()

    def close_write(self) -> None:
        os.close(self.write_fd)
        self.write_fd = -1

    def close(self) -> None:
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def fork_worker(body: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


@contextmanager
def main_process(body: Callable[[], object]) -> Generator[Any]:
    """A process that runs `body`; it is killed and reaped at the end."""
    process = FORK.Process(target=body)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


@contextmanager
def watched(pid: int) -> Generator[Callable[[float], bool]]:
    """Return whether a process that is not our child exits within some seconds; kill it otherwise."""
    pidfd = os.pidfd_open(pid)
    try:
        yield lambda seconds: bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def stuck_in_c() -> None:
    """Block forever with the GIL held: no Python code runs in this process any more, in no thread."""
    while True:
        ctypes.PyDLL(None).pause()


def waiting() -> None:
    threading.Event().wait()


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


STATES: dict[str, Callable[[], None]] = {"stuck in C": stuck_in_c, "waiting": waiting, "stopped": stopped}
ENDS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "_exit": lambda: os._exit(3),
    "return": lambda: None,
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_workers_end_with_their_parent(pipe: Pipe, state: Callable[[], None], end: Callable[[], object]) -> None:
    """Workers end however the parent ends and in any state; a sibling without `hold` lives on, and delays no worker."""
    go_read, go_write = os.pipe()

    def worker(lifeline: Lifeline) -> None:
        held = hold(lifeline.fd)
        pipe.say(f"{os.getpid()} {held}")
        state()

    def main() -> None:
        lifeline = Lifeline()
        for _ in range(2):
            fork_worker(lambda: worker(lifeline))
        pipe.say(f"{fork_worker(waiting)} sibling")
        os.read(go_read, 1)
        end()

    with main_process(main):
        words = dict(pipe.line().split() for _ in range(3))
        sibling = next(pid for pid, word in words.items() if word == "sibling")
        holders = [int(pid) for pid in words.keys() - {sibling}]
        assert [words[str(pid)] for pid in holders] == ["True", "True"]
        with watched(holders[0]) as one, watched(holders[1]) as two, watched(int(sibling)) as other:
            assert not one(0)
            assert not two(0)
            os.write(go_write, b"!")
            assert one(SECONDS)
            assert two(SECONDS)
            assert not other(0)
    os.close(go_read)
    os.close(go_write)


def test_hold_ends_the_worker_if_the_parent_is_gone(pipe: Pipe) -> None:
    """A worker whose parent exited while it started does not get past `hold`."""

    def worker(lifeline: Lifeline, parent: int) -> None:
        pipe.say("waits")
        select.select([parent], [], [])
        pipe.say("parent ended")
        hold(lifeline.fd)
        pipe.say("still here")

    def main() -> None:
        lifeline, own = Lifeline(), os.pidfd_open(os.getpid())
        fork_worker(lambda: worker(lifeline, own))
        pipe.close_write()
        waiting()

    with main_process(main) as process:
        pipe.close_write()
        assert pipe.line() == "waits"
        process.kill()
        assert [pipe.line(), pipe.line()] == ["parent ended", ""]


def test_close_ends_those_that_hold() -> None:
    """For the workers, `close` is the parent's end; a second `close` does nothing."""
    lifeline, pipe = Lifeline(), Pipe()

    def worker() -> None:
        pipe.say(str(hold(lifeline.fd)))
        stuck_in_c()

    process = FORK.Process(target=worker)
    process.start()
    assert pipe.line() == "True"
    assert process.is_alive()
    lifeline.close()
    lifeline.close()
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGKILL
    assert lifeline.fd == -1
    process.close()
    pipe.close()


def test_forked_child_closes_the_write_end_at_once() -> None:
    """After a plain fork the child has no write end: its number is free, while the parent's is open."""
    lifeline = Lifeline()
    number = lifeline._write_fd
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(number)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.fstat(number)
    lifeline.close()


def test_close_in_a_worker_leaves_other_files_alone() -> None:
    """In a worker the read end's number may belong to another file: the inherited object does not close that file."""
    lifeline = Lifeline()

    def worker() -> None:
        number = lifeline.fd
        hold(number)
        with tempfile.TemporaryFile() as file:
            if file.fileno() != number:
                os.dup2(file.fileno(), number)
            lifeline.close()
            os.fstat(number)

    process = FORK.Process(target=worker)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    process.close()
    lifeline.close()


def test_hold_needs_a_signal_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without F_SETSIG gives False, and the descriptor is closed."""
    monkeypatch.delattr(fcntl, "F_SETSIG")
    read_fd, write_fd = os.pipe()
    assert hold(read_fd) is False
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_fd)
    os.close(write_fd)
