"""The reading end of a worker's stack pipe, and the meaning of its text."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.workers.stacks import StackReader, crash_trace, stack_pipe


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
