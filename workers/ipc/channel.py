"""The control socket between the main process and one worker: carries frames and file descriptors.

Data path: scheduler -> [channel] -> worker -> [channel] -> reorder.

It is a Unix stream socket: it wakes the loop, orders memory (a frame is sent after the batch was written, by a system
call), and carries file descriptors.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from asyncloader.workers.ipc.wire import MOST_FRAME, FrameSplitter

_OBJECT_BYTES = 450
"""Memory of the objects that hold an entry, besides its bytes."""

Push: TypeAlias = Callable[[memoryview, Sequence[int]], int]
"""Sends bytes with descriptors; returns the number of bytes that were sent, 0 if the socket is full."""


class Unsent(NamedTuple):
    """Bytes that wait to be sent.

    Attributes:
        data: the bytes.
        fds: duplicates of the descriptors that are sent with the first of them.
        sent: called once all are sent, or the queue is closed.
        owned: whether they are memory of the queue, rather than of a ring.
    """

    data: memoryview
    fds: tuple[int, ...]
    sent: Callable[[], None] | None
    owned: bool


class SendQueue(deque[Unsent]):
    """The bytes that wait to be sent; true while there are any. Not thread-safe."""

    nbytes = 0
    """Bytes that wait, without those of rings."""
    fds = 0
    """Descriptors that wait with them."""

    @property
    def memory(self) -> int:
        """Bytes of memory that the queue takes, about: those of short entries are mostly Python's objects."""
        return self.nbytes + _OBJECT_BYTES * len(self)

    def put(
        self,
        data: memoryview,
        fds: Sequence[int] = (),
        sent: Callable[[], None] | None = None,
        *,
        owned: bool = True,
    ) -> None:
        """Add bytes at the end. Arguments as `Unsent`; the caller still owns `fds`, which are duplicated."""
        # As duplicates: the caller may close its own while the bytes wait.
        self.append(Unsent(data, tuple(os.dup(fd) for fd in fds), sent, owned))
        self.nbytes += owned * data.nbytes
        self.fds += len(fds)

    def flush(self, push: Push) -> bool:
        """Send the bytes; returns whether none are left. Errors are those of `push`."""
        while self:
            data, fds, sent, owned = self[0]
            number = push(data, fds)
            if not number:
                return False
            self.popleft()
            self.nbytes -= owned * number
            # The kernel passes descriptors with the first byte of a send: the rest of the bytes goes without them, or
            # the receiver would get each twice.
            self.fds -= len(fds)
            for fd in fds:
                os.close(fd)
            if number < data.nbytes:
                self.appendleft(Unsent(data[number:], (), sent, owned))
            elif sent is not None:
                sent()
        return True

    def close(self) -> None:
        """Drop the bytes, and close their descriptors. Idempotent."""
        self.nbytes = self.fds = 0
        while self:
            _, fds, sent, _ = self.popleft()
            for fd in fds:
                close_quietly(fd)
            if sent is not None:
                sent()  # the ring's slot is free again, although the bytes were not sent


def close_quietly(fd: int) -> None:
    """Close a descriptor that a forked child may have closed already, with all others."""
    with contextlib.suppress(OSError):
        os.close(fd)


_READ_BYTES = 1 << 16
_MAX_FDS = 8
# Windows, where this module is imported but not used, lacks some of these.
_ANCILLARY_BYTES = 0 if sys.platform == "win32" else socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_LOST = -1
# As plain integers: an operation on the enumeration's members takes as long as a system call.
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # a program started by the user must not inherit our segments
_WITHOUT_WAIT = _CLOEXEC | int(getattr(socket, "MSG_DONTWAIT", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)


class Channel:
    """One end of the socket. On a non-blocking socket `send` never blocks: unsent bytes are kept for `flush`.

    Not thread-safe: one thread may send and one may receive.

    Args:
        sock: the socket.
        most_frame: bytes of a received frame, at most.
    """

    joins = True
    """Whether several frames may be sent as one."""

    def __init__(self, sock: socket.socket, most_frame: int = MOST_FRAME) -> None:
        self.sock = sock
        self.ended = False
        self.received = 0
        self.unsent = SendQueue()
        """The frames that wait to be sent."""
        self._splitter = FrameSplitter(most_frame)
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self.sock.fileno()

    def listen(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None]) -> Callable[[], object]:
        """Have the loop call this while frames can be received. Returns a function that ends that."""
        fd = self.fileno()
        loop.add_reader(fd, readable)
        return partial(loop.remove_reader, fd)

    # ------------------------------------------------------------------------------------------ receiving

    def receive(self, *, wait: bool = False) -> Iterator[tuple[int, bytes]]:
        """Read once and return the frames that are complete. Sets `ended` at the end of the stream.

        Without data, returns nothing, or waits (`wait`, on a blocking socket only).
        """
        try:
            # A worker's end is a blocking socket, so not to wait is a flag of the call.
            flags = _CLOEXEC if wait else _WITHOUT_WAIT
            data, ancillary, state, _ = self.sock.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, flags)
        except (BlockingIOError, InterruptedError):
            return iter(())
        except ConnectionError:
            # The other end closed with frames of ours unread. That is the end of the stream, as without them.
            data, ancillary, state = b"", [], 0
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                # A truncated list may end within a descriptor.
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        if state & _TRUNCATED:
            # This process has too many open files, so the descriptor is lost. A frame carries one at most, and keeps
            # its place in the line: otherwise each later frame would get the descriptor of the frame after it.
            self._fds.append(_LOST)
        if not data:
            self.ended = True
            return iter(())
        self.received += len(data)
        return self._splitter.feed(data)

    def take_fd(self) -> int:
        """Return the descriptor that came with the frame just received; the caller owns it.

        Raises:
            OSError: it did not arrive, because this process has too many open files.
        """
        # The oldest is the frame's: a descriptor arrives with the first byte of its frame, and one read never joins two
        # writes that carry descriptors. So they are taken in the order of the frames that announce them.
        fd = self._fds.popleft() if self._fds else _LOST
        if fd == _LOST:
            raise OSError(
                "a shared-memory descriptor did not arrive: this process has too many open files. "
                "Please increase the limit using `ulimit -n` in the shell"
            )
        return fd

    # -------------------------------------------------------------------------------------------- sending

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a frame, after those still unsent. Returns True if everything was sent.

        The caller still owns `fds`; those that have to wait are duplicated.

        Raises:
            ConnectionError: the other end is closed.
        """
        if self.unsent:
            # Not past those that wait: the receiver takes descriptors in the order of the frames that announce them.
            self.unsent.put(memoryview(frame), fds)
            return self.flush()
        try:  # as `_push`, without the call
            sent = socket.send_fds(self.sock, [frame], list(fds)) if fds else self.sock.send(frame)
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent == len(frame):
            return True
        # The descriptors have gone with the first byte, if that has.
        self.unsent.put(memoryview(frame)[sent:], fds if sent == 0 else ())
        return False

    def send_all(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame; waits while the socket is full. Errors as `send`."""
        if not self.send(frame, fds):
            while not self.flush():
                select.select([], [self.sock], [])

    def flush(self) -> bool:
        """Send the bytes that wait; returns True if none are left."""
        return self.unsent.flush(self._push)

    def _push(self, frame: bytes | memoryview, fds: Sequence[int]) -> int:
        try:
            if fds:
                return socket.send_fds(self.sock, [frame], list(fds))
            return self.sock.send(frame)
        except (BlockingIOError, InterruptedError):
            return 0

    # -------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Close the socket and every descriptor that was not taken. Idempotent."""
        self.ended = True
        self.sock.close()
        while self._fds:
            close_quietly(self._fds.popleft())
        self.unsent.close()


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return the main process's end (non-blocking) and the worker's end (blocking)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    return ours, theirs


class Watched:
    """The part of a `WorkerHandle` that registers its descriptors."""

    channel: Any

    @property
    def death_fd(self) -> int:
        """File descriptor that is readable once the worker has ended, or its connection."""
        raise NotImplementedError

    def listen(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None], died: Callable[[], None]) -> None:
        """Have the loop watch the channel and the descriptor of its end. See `WorkerHandle.listen`."""
        loop.add_reader(self.channel.fileno(), readable)
        loop.add_reader(self.death_fd, died)

    def unlisten(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `listen`. See `WorkerHandle.unlisten`."""
        if self.channel.fileno() >= 0:  # otherwise it has been released
            loop.remove_reader(self.channel.fileno())
            loop.remove_writer(self.channel.fileno())
            loop.remove_reader(self.death_fd)
