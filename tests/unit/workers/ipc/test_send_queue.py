"""Bytes that wait for a socket: in order, each descriptor once, and each notification once."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from asyncloader.workers.ipc.channel import SendQueue


class Taker:
    """Takes bytes as a socket does: up to a number at a time, and none where that is 0."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self.taken: list[tuple[bytes, int]] = []  # with the number of descriptors

    def __call__(self, data: memoryview, fds: Sequence[int]) -> int:
        number = min(self.numbers.pop(0), data.nbytes)
        if number:
            self.taken.append((bytes(data[:number]), len(fds)))
        return number


@pytest.fixture
def fd() -> int:
    """A descriptor that the test closes."""
    return os.open("/dev/null", os.O_RDONLY)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_part_goes_with_the_descriptors_and_the_rest_without(fd: int) -> None:
    """The rest keeps its place before the next entry."""
    queue, taker, sent = SendQueue(), Taker(2, 0, 9, 9), list[str]()
    queue.put(memoryview(b"abcd"), [fd], lambda: sent.append("abcd"))
    queue.put(memoryview(b"ring"), (), lambda: sent.append("ring"), owned=False)
    copy = queue[0].fds[0]
    os.close(fd)  # the queue has a duplicate
    assert (queue.nbytes, queue.fds, bool(queue)) == (4, 1, True)
    assert not queue.flush(taker)
    assert (queue.nbytes, queue.fds, sent, is_open(copy)) == (2, 0, [], False)
    assert queue.flush(taker)
    assert taker.taken == [(b"ab", 1), (b"cd", 0), (b"ring", 0)]
    assert (queue.nbytes, queue.memory, sent) == (0, 0, ["abcd", "ring"])


def test_close_closes_descriptors_and_calls_those_that_wait(fd: int) -> None:
    """Nothing is sent after an error, but the memory of a ring must be released."""
    queue, sent = SendQueue(), list[str]()
    queue.put(memoryview(b"abcd"), [fd])
    queue.put(memoryview(b"ring"), (), lambda: sent.append("ring"), owned=False)
    copy = queue[0].fds[0]

    def broken(data: memoryview, fds: Sequence[int]) -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        queue.flush(broken)
    assert (len(queue), sent) == (2, [])
    for _ in range(2):
        queue.close()
        assert (len(queue), queue.memory, sent, is_open(copy)) == (0, 0, ["ring"], False)
    os.close(fd)
