from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel, SendQueue, channel_pair

BIG = 3_000_000  # more than a socket buffers


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """The main process's end (non-blocking) and the worker's (blocking)."""
    ours, theirs = (Channel(sock) for sock in channel_pair())
    yield ours, theirs
    ours.close()
    theirs.close()


def memory(text: bytes) -> int:
    fd = os.memfd_create("asyncloader-test-channel")
    os.write(fd, text)
    return fd


def content(fd: int) -> bytes:
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def read_all(channel: Channel, count: int) -> list[tuple[int, bytes]]:
    """`count` frames, in any number of reads."""
    frames: list[tuple[int, bytes]] = []
    while len(frames) < count and not channel.ended:
        frames += channel.receive(wait=True)
    return frames


def test_frames_arrive_in_order(pair: tuple[Channel, Channel]) -> None:
    """Frames of both directions are received as they were sent."""
    ours, theirs = pair
    assert ours.send(wire.pack(wire.TASK, b"one"))
    assert ours.send(wire.pack(wire.STOP))
    assert theirs.send(wire.pack(wire.RESULT, b"three"))
    assert read_all(theirs, 2) == [(wire.TASK, b"one"), (wire.STOP, b"")]
    assert list(ours.receive()) == [(wire.RESULT, b"three")]


def test_end_of_stream_is_noticed(pair: tuple[Channel, Channel]) -> None:
    """Closing the other end sets `ended`, after the frames that it had sent."""
    ours, theirs = pair
    theirs.send(wire.pack(wire.RESULT, b"last"))
    theirs.close()
    assert list(ours.receive()) == [(wire.RESULT, b"last")]
    assert not ours.ended
    assert list(ours.receive()) == []
    assert ours.ended


def test_a_reset_connection_is_an_end(pair: tuple[Channel, Channel]) -> None:
    """An end that was closed with unread frames resets the stream: this counts as its end, too."""
    ours, theirs = pair
    ours.send(wire.pack(wire.TASK, b"never read"))
    theirs.close()
    assert list(ours.receive()) == []
    assert ours.ended


def test_sending_to_a_closed_end_raises(pair: tuple[Channel, Channel]) -> None:
    """The sender gets a ConnectionError."""
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionError):
        ours.send(wire.pack(wire.STOP))


def test_descriptors_arrive_with_their_frames(pair: tuple[Channel, Channel]) -> None:
    """Each frame that announces a descriptor gets its own, whatever frames lie between; the sender keeps its copy."""
    ours, theirs = pair
    for number in range(5):
        fd = memory(b"content %d" % number)
        theirs.send(wire.pack(wire.RESULT, b"plain"))
        theirs.send(wire.pack(wire.RING, b"%d" % number), [fd])
        os.close(fd)
    seen: list[tuple[bytes, bytes]] = []
    while len(seen) < 5:
        for kind, body in ours.receive():
            if kind == wire.RING:
                seen.append((body, content(ours.take_fd())))
    assert seen == [(b"%d" % n, b"content %d" % n) for n in range(5)]


def test_received_descriptors_are_not_inherited(pair: tuple[Channel, Channel]) -> None:
    """A program that is started later does not get the segments that happened to be open."""
    ours, theirs = pair
    fd = memory(b"x")
    theirs.send(wire.pack(wire.RING), [fd])
    os.close(fd)
    list(ours.receive())
    received = ours.take_fd()
    assert not os.get_inheritable(received)
    os.close(received)


def test_missing_descriptor_says_why(pair: tuple[Channel, Channel]) -> None:
    """A descriptor that did not arrive is an error that names the limit to raise."""
    with pytest.raises(OSError, match="ulimit -n"):
        pair[0].take_fd()


def test_full_socket_keeps_the_rest_for_flush(pair: tuple[Channel, Channel]) -> None:
    """Frames that the kernel does not take wait, in order, and `flush` sends them when there is room."""
    ours, theirs = pair
    frames = [wire.pack(wire.TASK, bytes([n]) * BIG) for n in range(3)]
    assert [ours.send(frame) for frame in frames] == [False, False, False]
    assert not ours.flush()
    got: list[tuple[int, bytes]] = []
    while len(got) < 3:
        got += theirs.receive(wait=True)
        ours.flush()
    assert got == [(wire.TASK, bytes([n]) * BIG) for n in range(3)]
    assert ours.flush()


def test_descriptor_behind_a_full_socket_arrives_with_its_frame(pair: tuple[Channel, Channel]) -> None:
    """A descriptor that has to wait is kept open, even if the sender closes its own."""
    ours, theirs = pair
    assert not ours.send(wire.pack(wire.TASK, bytes(BIG)))
    fd = memory(b"late")
    assert not ours.send(wire.pack(wire.RING, b"r"), [fd])
    os.close(fd)
    kinds: list[int] = []
    while len(kinds) < 2:
        for kind, _ in theirs.receive(wait=True):
            kinds.append(kind)
            if kind == wire.RING:
                assert content(theirs.take_fd()) == b"late"
        ours.flush()
    assert kinds == [wire.TASK, wire.RING]


def test_large_frame_with_a_descriptor(pair: tuple[Channel, Channel]) -> None:
    """A frame that is sent in parts sends its descriptor once, with the first part."""
    ours, theirs = pair
    fd = memory(b"once")
    assert not ours.send(wire.pack(wire.RING, bytes(BIG)), [fd])
    os.close(fd)
    got: list[tuple[int, bytes]] = []
    while not got:
        got += theirs.receive(wait=True)
        ours.flush()
    assert got == [(wire.RING, bytes(BIG))]
    assert content(theirs.take_fd()) == b"once"
    with pytest.raises(OSError, match="did not arrive"):
        theirs.take_fd()


def test_close_closes_what_nobody_took(pair: tuple[Channel, Channel]) -> None:
    """Descriptors received and not taken, or kept and not sent, are closed with the channel (the leak check looks)."""
    ours, theirs = pair
    fd = memory(b"x")
    theirs.send(wire.pack(wire.RING), [fd])
    list(ours.receive())
    ours.send(wire.pack(wire.TASK, bytes(BIG)))
    ours.send(wire.pack(wire.RING), [fd])
    ours.close()
    ours.close()
    assert ours.ended
    assert ours.fileno() == -1
    theirs.close()
    os.close(fd)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_NOFILE cuts ancillary data on Linux")
def test_no_descriptor_left_is_an_error_of_its_frame(pair: tuple[Channel, Channel]) -> None:
    """If this process has no descriptor left, the frame is received, and taking its descriptor raises the reason."""
    import resource

    ours, theirs = pair
    fd = memory(b"x")
    theirs.send(wire.pack(wire.RING, b"r"), [fd])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fd, 64), hard))
    try:
        while True:
            try:
                fillers.append(os.dup(fd))
            except OSError:
                break
        assert list(ours.receive()) == [(wire.RING, b"r")]
        with pytest.raises(OSError, match="too many open files"):
            ours.take_fd()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in [*fillers, fd]:
            os.close(filler)


def test_the_memory_of_small_frames_that_wait(pair: tuple[Channel, Channel]) -> None:
    """The objects that hold the frames count: a bound on their bytes alone would allow ten times the memory."""
    channel, other = pair
    while channel.send(wire.pack(wire.RESET, bytes(20))):
        pass
    waiting = channel.unsent.nbytes
    tracemalloc.start()
    try:
        for _ in range(2000):
            channel.send(wire.pack(wire.RESET, bytes(20)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 5 * (channel.unsent.nbytes - waiting) < taken < channel.unsent.memory < 2 * taken
    while not channel.flush():
        list(other.receive(wait=True))
    assert channel.unsent.memory == 0


# ----------------------------------------------------------------------------------------------------- frames that wait


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
