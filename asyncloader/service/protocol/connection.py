"""Sends and receives messages on a non-blocking socket between a loader and a service's node.

Data path: worker -> node -> [connection] -> connection -> [connection] -> ring -> consumer.

A batch's bytes are sent from the slot where the worker wrote them, and received into the slot where the consumer reads
them. Neither side makes another copy, with or without TLS, except of small batches: these are read together with what
comes before and behind them, as a copy of them takes less time than a system call for each.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import socket
import ssl
import sys
import termios
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asyncloader.service.protocol.frames import HEADER_BYTES, MOST_BODY, Header, pack_header, unpack_header
from asyncloader.workers.ipc.channel import Channel, SendQueue, close_quietly

_READ = 1 << 12  # small, because payload bytes that it reads are copied once more
_SMALL = 96 << 10  # bytes of a payload that may be copied, and is sent together with its header
_RECORD = 1 << 14  # bytes of a TLS record, at most
_READ_SMALL = 1 << 18  # bytes that are read at a time while payloads are small
_TURN = 4 << 20  # bytes after which other connections of the event loop have a turn
_WAKE = 1 << 18  # bytes of a payload that are worth a wake-up of the event loop
_FD_BYTES = socket.CMSG_SPACE(4)  # one, and with the padding of most systems a second


def shut_down(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut a connection down, so that its readers see the end. The socket stays open."""
    with contextlib.suppress(OSError):  # the connection has ended already
        # Not `sock.shutdown`: `SSLSocket` would drop its TLS state. Bytes that have come would then be read encrypted,
        # and later data would be sent unencrypted.
        socket.socket.shutdown(sock, how)


def flush_later(loop: asyncio.AbstractEventLoop, sender: Link | Channel) -> None:
    """Have the loop send what waits, whenever the socket takes more of it."""

    def writable() -> None:
        done = True  # also after an error: the loop would report the broken socket as writable without end
        with contextlib.suppress(ConnectionError):  # its reader, or the process's pidfd, reports the end
            done = sender.flush()
        if done:
            loop.remove_writer(sender.fileno())

    loop.add_writer(sender.fileno(), writable)


class Message(NamedTuple):
    """A complete message. Its payload is in the memory that `Link.place` returned for it."""

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
            # A task is a small message, which Nagle's algorithm would hold back until earlier data is acknowledged.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.most_body = most_body
        self.place: Callable[[Header], memoryview] | None = None
        """Returns the memory for a message's payload; None: messages with payloads are refused."""
        self.most_payload = 0
        self.ended = False
        self.alert: ssl.SSLError | None = None
        """The reason that the other side gave for the end by TLS: it refuses this side's certificate."""
        self.received = 0
        """Bytes received so far."""
        self.unsent = SendQueue()
        """The messages that wait to be sent, with their payloads."""
        self._joined = bytearray()  # messages of `put`, which wait behind those in `unsent`
        self.fds: deque[int] = deque()
        """The descriptor that came with a message, on a Unix socket, until it is taken."""
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._buffer = memoryview(bytearray(_READ))
        self._start = self._end = 0  # of the bytes in it that belong to no message yet
        self._at_once = _READ  # bytes that are read into it at a time
        self._reading: tuple[Header, bytearray, memoryview] | None = None  # a message whose payload is not complete
        self._got = 0
        # The bytes that must have come before a poll reports them (SO_RCVLOWAT). A new socket reports each.
        self._waking = 1

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self.sock.fileno()

    @property
    def arrived(self) -> int:
        """A number that grows with each byte that comes from the other end, also while none is read.

        Raises:
            OSError: the link is closed.
        """
        # Not `select`: below the number of `_wake_at`, the socket does not count as readable.
        return self.received + int.from_bytes(fcntl.ioctl(self.sock, termios.FIONREAD, bytes(4)), sys.byteorder)

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
        """Send a message, after those that are still unsent. Returns whether everything is sent.

        Args:
            kind: of the message.
            body: its body.
            epoch: of the header.
            task: of the header.
            payload: its bytes, which must not change until `sent` is called.
            sent: called once the whole message was sent, or the link was closed.
            fd: a descriptor to pass with it; the caller may close its own at once.

        Raises:
            ConnectionError: the other end is closed.
        """
        nbytes = 0 if payload is None else payload.nbytes
        head = pack_header(kind, len(body), epoch, task, nbytes) + body
        if self._joined:
            self._queue_joined()
        if payload is not None and self._tls and len(head) + nbytes <= _RECORD:
            # A record of its own for the header takes longer than the copy.
            head, payload, nbytes = b"".join((head, payload)), None, 0
        done = 0
        if nbytes <= _SMALL and not (self.unsent or self._tls) and fd < 0:
            # In one call, which wakes the receiver once.
            try:
                done = self.sock.sendmsg((head, payload)) if nbytes and payload is not None else self.sock.send(head)
            except OSError:  # `flush` raises it again
                done = 0
            if done == len(head) + nbytes:
                if sent is not None:
                    sent()
                return True
        # Both are queued before any is sent: if sending raises, `close` still finds `sent`, and the ring gets its slot.
        if done < len(head):
            self.unsent.put(memoryview(head)[done:], () if fd < 0 else (fd,), None if nbytes else sent)
        if payload is not None and nbytes:
            self.unsent.put(payload.cast("B")[max(0, done - len(head)) :], (), sent, owned=False)
        return self.flush()

    def put(self, kind: int, body: bytes, *, epoch: int = 0, task: int = 0) -> bool:
        """Queue a message without sending it: the next `send` or `flush` sends all that were put, in one call.

        Args: as `send`. Returns whether it is the first of them, so that the caller has to call `flush` soon.
        """
        first = not self._joined
        self._joined += pack_header(kind, len(body), epoch, task)
        self._joined += body
        return first

    def _queue_joined(self) -> None:
        joined, self._joined = self._joined, bytearray()
        self.unsent.put(memoryview(joined))

    def flush(self) -> bool:
        """Send unsent messages; returns whether none is left. Errors as `send`."""
        if self._joined:
            self._queue_joined()
        return self.unsent.flush(self._push)

    def _push(self, data: memoryview, fds: Sequence[int]) -> int:
        try:
            return socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            # OpenSSL demands that the next call sends the same bytes: the queue keeps them at its head.
            return 0
        except ssl.SSLError as error:
            raise ConnectionError(str(error)) from None
        except OSError as error:  # also those that are no `ConnectionError`, such as of a network without a route
            raise ConnectionError(*error.args) from None

    # ------------------------------------------------------------------------------------------ receiving

    def receive(self) -> Iterator[Message]:
        """Read received bytes, a few megabytes at most, and yield the complete messages. Sets `ended`.

        Raises:
            ValueError: the bytes are no message, or over a limit. The connection cannot be used any more.
        """
        until = self.received + _TURN
        # A caller that waits for one answer leaves the iterator after it: complete messages may be left from then.
        yield from self._split()
        while not self.ended:
            if self._reading is not None:
                header, body, target = self._reading
                number = self._read_into(target[self._got :])
                if number is None:
                    break
                self._got += number
                if self._got == header.payload:
                    self._reading = None
                    # Before the message is yielded: this generator is suspended while the caller works, and its view
                    # would keep the segment of a large batch mapped.
                    target.release()
                    yield Message(header, bytes(body))
            else:
                # Until a call finds nothing, also behind a short read: uvloop calls the reader of a connection that was
                # reset only once, even if bytes are left or the end was not read.
                number = self._read_into(self._room())
                if number is None:
                    break
                self._end += number
                yield from self._split()
            if self.received >= until and not self._is_forgotten():
                break
        # Also after a full turn: if fewer bytes are missing than the number set before, the socket would never count as
        # readable again.
        self._wake_at(1 if self._reading is None else self._reading[0].payload - self._got)

    def _is_forgotten(self) -> bool:
        """Whether the event loop would not wake for the bytes that are left."""
        # Bytes that OpenSSL has decrypted already do not make the socket readable. A connection that was reset was
        # reported, and is not again (see `receive`).
        decrypted = self._tls and self.sock.pending()  # type: ignore[attr-defined]
        return bool(decrypted or self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _split(self) -> Iterator[Message]:
        while self._reading is None and self._end - self._start >= HEADER_BYTES:
            start, buffer = self._start + HEADER_BYTES, self._buffer
            most_payload = self.most_payload if self.place else 0
            header = unpack_header(buffer, self.most_body, most_payload, self._start)
            end = start + header.body
            if end > self._end:
                return
            body = bytes(buffer[start:end])
            if not header.payload:
                self._start = end
                yield Message(header, body)
                continue
            assert self.place is not None  # otherwise the limit was 0, and the header was refused
            target = self.place(header).cast("B")
            self._at_once = _READ_SMALL if header.payload <= _SMALL else _READ
            there = min(header.payload, self._end - end)
            target[:there] = buffer[end : end + there]
            self._start = end + there
            if there == header.payload:
                target.release()
                yield Message(header, body)
            else:
                self._reading, self._got = (header, bytearray(body), target), there

    def _room(self) -> memoryview:
        """The part of the buffer for the bytes that are read next, as many as should be read at once."""
        rest, size = self._end - self._start, len(self._buffer)
        if not rest:
            self._start = self._end = 0
            # A larger one was for a long body.
            if size < self._at_once or size > _READ_SMALL:
                self._buffer = memoryview(bytearray(self._at_once))
        elif size - self._end < self._at_once:
            wanted = rest + self._at_once
            # Twice as large, as a long body takes many reads. It grows only as its bytes come.
            larger = self._buffer if wanted <= size else memoryview(bytearray(max(wanted, 2 * size)))
            larger[:rest] = self._buffer[self._start : self._end]
            self._buffer, self._start, self._end = larger, 0, rest
        return self._buffer[self._end : self._end + self._at_once]

    def _read_into(self, room: memoryview) -> int | None:
        """Read bytes into this memory. None: no byte was received, or the connection has ended."""
        try:
            if self._unix:
                # Without CLOEXEC, a process that another thread starts at this moment would inherit the descriptors.
                cloexec = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                number, ancillary, _, _ = self.sock.recvmsg_into([room], _FD_BYTES, cloexec)
                for level, kind, given in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        # A truncated list may end within a descriptor.
                        self.fds.extend(array.array("i", given[: len(given) - len(given) % 4]))
                # A connection has one such message. A peer could exhaust this process's descriptors with others.
                while len(self.fds) > 1:
                    close_quietly(self.fds.pop())
            else:
                number = self.sock.recv_into(room)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:  # reset, timed out, no route, or broken TLS
            if isinstance(error, ssl.SSLError):
                self.alert = error
            number = 0
        if not number:
            self.ended = True
            return None
        self.received += number
        return number

    def _wake_at(self, nbytes: int) -> None:
        """Let the socket count as readable once this number of bytes, or `_WAKE` of them, has been received."""
        # A batch arrives in many packets, and each would wake the event loop. Not for TLS, where OpenSSL may already
        # hold a part of the missing bytes, nor for Unix sockets, which are readable from the first byte on.
        wanted = min(nbytes, _WAKE)
        if wanted != self._waking and not (self._tls or self._unix):
            self._waking = wanted
            with contextlib.suppress(OSError):  # a closed connection is readable whatever the number
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    # -------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Close the socket, and drop unsent messages. Idempotent."""
        self.ended = True
        with contextlib.suppress(OSError):
            self.sock.close()
        # A batch that was cut off: the view of its memory would keep the ring, or the batch's segment, mapped.
        self._reading = None
        self._joined.clear()
        self.unsent.close()
        while self.fds:
            close_quietly(self.fds.popleft())
