"""One connection between a loader and a service's node: sends and receives messages on a non-blocking socket.

Data path: worker -> node -> [connection] -> connection -> [connection] -> ring -> consumer.

A batch's bytes are sent from the slot where the worker wrote them, and received into the slot where the consumer reads
them; neither side copies them otherwise. It is the same for plain sockets and for TLS.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import ssl
import sys
import termios
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from asyncloader.service.protocol.frames import HEADER_BYTES, MOST_BODY, Header, pack_header, unpack_header

_READ = 1 << 12  # small, because what it reads of a payload is copied once more
_TURN = 4 << 20  # bytes after which others have a turn
_MESSAGE_BYTES = 400  # that an unsent message takes besides its own
_WAKE = 1 << 18  # bytes of a payload that are worth a wake-up
_MOST_FDS = 4
_FD_BYTES = socket.CMSG_SPACE(_MOST_FDS * 4)


class Message(NamedTuple):
    """A message that was received whole. Its payload is where `Link.place` wanted it."""

    header: Header
    body: bytes


class Link:
    """A connection.

    Args:
        sock: a connected socket, plain or TLS, whose handshake is over.
        most_body: bytes of a message's body that are accepted, at most.
    """

    def __init__(self, sock: socket.socket, most_body: int = MOST_BODY) -> None:
        sock.setblocking(False)
        self._unix = sock.family == socket.AF_UNIX
        if not self._unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.most_body = most_body
        self.place: Callable[[Header], memoryview] | None = None
        """Says where a payload goes; None: there must be none."""
        self.most_payload = 0
        self.ended = False
        self.received = 0
        """Bytes, so far."""
        self.queued = 0
        """Bytes of unsent messages, without their payloads."""
        self.fds: deque[int] = deque()
        """Descriptors that came with messages, on a Unix socket."""
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._unsent: deque[tuple[memoryview, Callable[[], None] | None, int, int]] = deque()
        self._rest = bytearray()
        self._reading: tuple[Header, bytearray, memoryview] | None = None  # a message whose payload is not complete
        self._got = 0
        self._waking = 1

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self.sock.fileno()

    @property
    def unread(self) -> int:
        """Bytes that have come and were not read yet. The socket may not count as readable for them.

        Raises:
            OSError: the link is closed.
        """
        return int.from_bytes(fcntl.ioctl(self.sock, termios.FIONREAD, bytes(4)), sys.byteorder)

    # -------------------------------------------------------------------------------------------- sending

    def send(
        self,
        kind: int,
        body: bytes = b"",
        *,
        epoch: int = 0,
        task: int = 0,
        payload: memoryview | None = None,
        sent: Callable[[], None] | None = None,
        fd: int = -1,
    ) -> bool:
        """Send a message, after those still unsent. Returns whether everything is sent.

        Args:
            kind: of the message.
            body: its body.
            epoch: of the header.
            task: of the header.
            payload: its bytes, which must stay as they are until `sent` is called.
            sent: called once all of it was sent, or the link is closed.
            fd: a descriptor to pass with it; a duplicate is kept until then.

        Raises:
            ConnectionError: the other end is closed.
        """
        nbytes = 0 if payload is None else payload.nbytes
        head = pack_header(kind, len(body), epoch, task, nbytes) + body
        cost = len(head) + _MESSAGE_BYTES
        self._unsent.append((memoryview(head), None if nbytes else sent, -1 if fd < 0 else os.dup(fd), cost))
        self.queued += cost
        if payload is not None and nbytes:
            self._unsent.append((payload.cast("B"), sent, -1, 0))
        return self.flush()

    def flush(self) -> bool:
        """Send what is unsent; returns whether nothing is left. Errors as `send`."""
        while self._unsent:
            data, sent, fd, cost = self._unsent[0]
            try:
                number = self._push(data, fd)
            except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return False
            except ssl.SSLError as error:
                raise ConnectionError(str(error)) from None
            if fd >= 0:
                os.close(fd)
            if number < data.nbytes:
                self._unsent[0] = data[number:], sent, -1, cost
                continue
            self._unsent.popleft()
            self.queued -= cost
            if sent is not None:
                sent()
        return True

    def _push(self, data: memoryview, fd: int) -> int:
        return self.sock.send(data) if fd < 0 else socket.send_fds(self.sock, [data], [fd])

    # ------------------------------------------------------------------------------------------ receiving

    def receive(self) -> Iterator[Message]:
        """Read what is there, a few megabytes at most, and give the messages that are complete. Sets `ended`.

        Raises:
            ValueError: what came is no message, or over a limit. The connection is of no use any more.
        """
        until = self.received + _TURN
        yield from self._split()  # what an earlier caller left
        while not self.ended:
            if self._reading is not None:
                header, body, target = self._reading
                number = self._pull(target[self._got :])
                if number is None:
                    break
                self._got += number
                if self._got == header.payload:
                    self._reading = None
                    target.release()
                    yield Message(header, bytes(body))
            else:
                if self._fill() is None:
                    break
                yield from self._split()
            if self.received >= until and not (self._tls and self.sock.pending()):  # type: ignore[attr-defined]
                break
        # On every way out: after a turn, too, fewer bytes may be missing than the socket was told to wait for.
        self._wake_at(1 if self._reading is None else self._reading[0].payload - self._got)

    def _split(self) -> Iterator[Message]:
        rest = self._rest
        while self._reading is None and len(rest) >= HEADER_BYTES:
            header = unpack_header(rest, self.most_body, self.most_payload if self.place else 0)
            end = HEADER_BYTES + header.body
            if len(rest) < end:
                return
            body = bytes(rest[HEADER_BYTES:end])
            if not header.payload:
                del rest[:end]
                yield Message(header, body)
                continue
            assert self.place is not None  # or the limit were 0
            target = self.place(header).cast("B")
            there = min(header.payload, len(rest) - end)
            target[:there] = rest[end : end + there]
            del rest[: end + there]
            if there == header.payload:
                target.release()
                yield Message(header, body)
            else:
                self._reading, self._got = (header, bytearray(body), target), there

    def _fill(self) -> int | None:
        """Read a piece into the rest. None: nothing is there."""
        try:
            if self._unix:
                data, ancillary, _, _ = self.sock.recvmsg(_READ, _FD_BYTES, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
                for level, kind, given in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        self.fds.extend(array.array("i", given[: len(given) - len(given) % 4]))
            else:
                data = self.sock.recv(_READ)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError:  # reset, timed out, no route, or broken TLS
            data = b""
        return self._count(len(data), data)

    def _pull(self, target: memoryview) -> int | None:
        try:
            number = self.sock.recv_into(target)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError:  # reset, timed out, no route, or broken TLS
            number = 0
        return self._count(number, b"")

    def _wake_at(self, nbytes: int) -> None:
        """Have the loop told when so many bytes are there, or a good part of them: a batch comes in many packets."""
        wanted = min(nbytes, _WAKE)
        if wanted != self._waking and not (self._tls or self._unix):
            self._waking = wanted
            with contextlib.suppress(OSError):  # the end is told in any case
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _count(self, number: int, data: bytes) -> int | None:
        if not number:
            self.ended = True
            return None
        self.received += number
        self._rest += data
        return number

    # -------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Close the socket, and let go of what was to be sent. Idempotent."""
        self.ended = True
        with contextlib.suppress(OSError):
            self.sock.close()
        self._reading = None
        while self._unsent:
            _, sent, fd, _ = self._unsent.popleft()
            if fd >= 0:
                os.close(fd)
            if sent is not None:
                sent()
        while self.fds:
            os.close(self.fds.popleft())
