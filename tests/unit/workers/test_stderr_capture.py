"""Real descriptors: every task runs in a forked process of its own, whose standard error is a pipe."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from asyncloader.workers.stderr_capture import captured_stderr, make_capture_file, read_tail
from tests.unit.workers.in_child import in_child


def written(data: bytes) -> int:
    fd = make_capture_file()
    os.write(fd, data)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def say_in_many_ways() -> None:
    sys.stderr.write("from Python\n")
    os.write(2, b"from a descriptor\n")
    ctypes.CDLL(None).perror(b"from C")
    subprocess.run(["sh", "-c", "echo from a child >&2"], check=True)


# --------------------------------------------------------------------------------------------- in the worker


def _ordinary(fd: int) -> bool:
    with captured_stderr(os.dup(fd)):
        say_in_many_ways()
        before = os.pread(fd, 1000, 0).count(b"\n")
    sys.stderr.write("after\n")
    return before >= 3


def test_what_was_written_is_kept_and_passed_on() -> None:
    """Output of Python, C and a child is in the file at once, and on stderr after the task, in order."""
    fd = make_capture_file()
    ended = in_child(_ordinary, fd)
    assert ended.result is True
    lines = ended.stderr.decode().splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "from Python",
        "from a descriptor",
        "from C",
        "from a child",
        "after",
    ]
    assert read_tail(fd).splitlines() == lines[:-1]


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_last_words_outlive_the_process(how: str) -> None:
    """The output of a process that ends in the middle of its task is kept."""
    fd = make_capture_file()

    def die() -> None:
        with captured_stderr(os.dup(fd)):
            say_in_many_ways()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)

    ended = in_child(die)
    assert ended.exitcode == (-signal.SIGKILL if how == "kill" else 3)
    assert ended.stderr == b""
    words = read_tail(fd)
    assert words.startswith("from Python\nfrom a descriptor\nfrom C")
    assert words.endswith("from a child")


def _begun(fd: int) -> None:
    sys.stderr.write("before, ")
    with captured_stderr(os.dup(fd)):
        sys.stderr.write("within, ")
    sys.stderr.write("after\n")


def test_an_unfinished_line_is_divided() -> None:
    """Text that Python still held back before the task is not captured; text held back at its end is."""
    fd = make_capture_file()
    ended = in_child(_begun, fd)
    assert ended.stderr == b"before, within, after\n"
    assert read_tail(fd) == "within,"


def _raising(fd: int) -> str:
    try:
        with captured_stderr(fd):
            sys.stderr.write("before it raised\n")
            raise KeyError("mine")
    except KeyError as error:
        sys.stderr.write("after\n")
        return repr(error)


def test_an_exception_goes_through() -> None:
    """After a task that raises stderr is restored, and its output is passed on."""
    fd = make_capture_file()
    ended = in_child(_raising, fd)
    assert ended.result == "KeyError('mine')"
    assert ended.stderr == b"before it raised\nafter\n"
    os.close(fd)


def _descriptors(fd: int) -> list[str]:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with captured_stderr(os.dup(fd)):
        os.write(2, b"words\n")
    return [name for name in os.listdir("/proc/self/fd") if name not in before]  # noqa: PTH208


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc lists the descriptors")
def test_no_descriptor_stays_behind() -> None:
    """The worker's copy of the file is closed with the task."""
    fd = make_capture_file()
    assert in_child(_descriptors, fd).result == []
    os.close(fd)


def _much(fd: int, lines: int) -> None:
    with captured_stderr(fd):
        for number in range(lines):
            os.write(2, b"line %06d\n" % number)


@pytest.mark.parametrize("lines", [1, 1000, 20_000])
def test_everything_is_passed_on(lines: int) -> None:
    """All output of a task that turns out to be innocent is passed on, however much it is."""
    fd = make_capture_file()
    ended = in_child(_much, fd, lines)
    assert ended.stderr.splitlines() == [b"line %06d" % number for number in range(lines)]
    os.close(fd)


def _without_stderr(fd: int) -> Any:
    os.close(2)
    ran = False
    with captured_stderr(fd):
        ran = True
    return ran, is_open(2), is_open(fd) and fd != 2


def test_a_process_without_standard_error() -> None:
    """With descriptor 2 closed, as in a daemon, the task runs nevertheless, and the descriptor is closed afterwards."""
    fd = make_capture_file()
    ended = in_child(_without_stderr, fd)
    assert ended.result == (True, False, False)
    os.close(fd)


def _unwilling(fd: int) -> bool:
    class Broken:
        def flush(self) -> None:
            raise ValueError("I/O operation on closed file")

    sys.stderr = Broken()  # type: ignore[assignment,unused-ignore]
    with captured_stderr(fd):
        os.write(2, b"said\n")
    return True


def test_a_broken_stderr_object_spoils_no_task() -> None:
    """For any object in `sys.stderr` the task runs and its output is passed on."""
    fd = make_capture_file()
    ended = in_child(_unwilling, fd)
    assert ended.result is True
    assert ended.stderr == b"said\n"
    os.close(fd)


# ------------------------------------------------------------------------------------------ in the main process


def test_the_last_lines_are_read() -> None:
    """The requested number of lines is read, without empty lines at the end."""
    text = b"".join(b"line %d\n" % number for number in range(100)) + b"\n \n"
    assert read_tail(written(text), lines=3) == "line 97\nline 98\nline 99"
    assert len(read_tail(written(text)).splitlines()) == 20


def test_of_very_much_only_the_end_is_read() -> None:
    """A gigabyte in one line costs kilobytes."""
    fd = written(b"begin")
    os.pwrite(fd, b"end\n", 1 << 30)
    text = read_tail(fd)
    assert text.endswith("end")
    assert len(text) <= 16 << 10
    assert "begin" not in text
