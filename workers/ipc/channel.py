"""The control socket between the main process and one worker: carries frames and file descriptors.

Data path: scheduler -> [channel] -> worker -> [channel] -> reorder.

It is a Unix stream socket: it wakes the loop, orders memory (a frame is sent after the batch was written, by a system
call), and carries file descriptors.
"""

from __future__ import annotations

import array
import asyncio
import select
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from asyncloader.workers.ipc.send_queue import SendQueue, close_quietly
from asyncloader.workers.ipc.wire import MOST_FRAME, FrameSplitter

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
