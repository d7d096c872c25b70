"""A worker's channel over a network: looks to the pool like the socket of a local worker.

Data path: node -> connection -> [remote_channel] -> ring -> consumer.

The pool sends a task with a slot of its ring; here the task goes out without it, and when the batch comes its bytes are
received straight into that slot. A batch that is larger than the slot gets a segment of its own, as a local worker
would make one. Only this process writes to the ring, so a connection that breaks leaves no foreign writer behind.

A node that is gone without a word (a cut cable) is noticed within three seconds, while there are tasks. The trainer may
block the loop for as long as it likes: bytes that came meanwhile count although nothing has read them, and however long
the loop stood still, that is one of the three checks without a byte after which a node is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter

from asyncloader.errors import RingMemoryError
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.frames import Header
from asyncloader.workers.ipc import wire
from asyncloader.workers.memory import segment
from asyncloader.workers.memory.ring import WorkerRing

_CHECK_S = 0.65
_MOST_PINGS = 2
_MOST_PAYLOAD = 1 << 40


class RemoteChannel:
    """The loader's end of a worker connection that is elsewhere. Interface and meaning are those of `Channel`.

    Args:
        link: the connection, after its handshake.
    """

    def __init__(self, link: Link) -> None:
        self.sock = link.sock
        self.ended = False
        self.death: bytes | None = None
        """What the node said of the end of the worker's process; None: nothing."""
        self.why = "the node closed the connection"
        """Why it ended, if it did."""
        self.broken = False
        """Whether it ended because of what the node sent."""
        self.gone_fd, self._gone = os.pipe()
        self._leaving = ""
        self._link = link
        link.place, link.most_payload = self._place, _MOST_PAYLOAD
        if link.sock.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            # From here on pings notice a silent network. The time-out would also end a connection whose window is
            # closed, as it is while the trainer computes and reads nothing.
            with contextlib.suppress(OSError):  # it has ended, which its reader sees
                link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._rings: dict[int, WorkerRing] = {}
        self._tasks: dict[tuple[int, int], tuple[int, int]] = {}  # (epoch, task) -> ring, slot
        self._segments: dict[tuple[int, int], int] = {}  # of batches that are larger than their slot
        self._began: dict[tuple[int, int], float] = {}  # when the payload began to arrive
        self._fds: deque[int] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the timer
        self._seen = 0  # bytes that had come at the last check
        self._pings = 0

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._link.fileno()

    @property
    def received(self) -> int:
        """Bytes, so far."""
        return self._link.received

    # -------------------------------------------------------------------------------------------- sending

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a frame of the pool's. Returns whether everything was sent.

        Raises:
            ConnectionError: the other end is closed.
        """
        kind, body = frame[wire.PREFIX_BYTES - 1], frame[wire.PREFIX_BYTES :]
        if kind == wire.RING:
            number, slots, slot_bytes = wire.unpack_ring(body)
            in_use = {ring for ring, _ in self._tasks.values()}
            self._rings = {number: ring for number, ring in self._rings.items() if number in in_use}
            self._rings[number] = WorkerRing(os.dup(fds[0]), slots, slot_bytes)
            return True
        if kind != wire.TASK:
            return self._send(kind, body)
        epoch, task, slot, ring, _, index = wire.unpack_task(body)
        if self._leaving:
            return True  # the pool gives it to the worker's successor
        self._tasks[epoch, task] = ring, slot
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:  # a timer of an earlier loop, which is closed, never comes
            self._seen, self._loop = -1, loop
            self._timer = loop.call_later(_CHECK_S, self._check)
        return self._send(wire.TASK, index, epoch, task)

    def _send(self, kind: int, body: bytes = b"", epoch: int = 0, task: int = 0) -> bool:
        try:
            return self._link.send(kind, body, epoch=epoch, task=task)
        except OSError as error:
            raise ConnectionError(str(error)) from None

    def leave(self, why: str) -> None:
        """Send no more tasks, and end once those that were sent are answered."""
        self._leaving = why
        if not self._tasks:
            self._end(why)

    def distrust(self, why: str) -> None:
        """End: the node has sent what cannot be read."""
        self.broken = True
        self._end(why)

    def kill(self) -> None:
        """Have the worker's process killed, which is at a task for too long."""
        self._send(frames.KILL)

    def flush(self) -> bool:
        """Send what is unsent. Errors as `send`."""
        try:
            return self._link.flush()
        except OSError as error:
            raise ConnectionError(str(error)) from None

    # ------------------------------------------------------------------------------------------ receiving

    def receive(self, *, wait: bool = False) -> Iterator[tuple[int, bytes]]:
        """Give the frames that are complete, as a local worker would have sent them. Never waits."""
        del wait
        if self.ended:  # of what came after a frame that cannot be read, nothing is
            return
        try:
            for message in self._link.receive():
                header, body = message
                if header.kind == wire.RESULT:
                    yield wire.RESULT, self._result(header, body)
                elif header.kind == frames.DIED:
                    self.death = body
                    self._end("its process died")
                    return
                elif header.kind == frames.DRAINING:
                    self._end("the node is about to end")
                    return
                elif header.kind != frames.PONG:
                    self._answered(header.kind, body)
                    yield header.kind, body
        except ValueError as error:  # no node of ours: its tasks go elsewhere
            self.distrust(str(error))
        except RingMemoryError as error:  # it may have announced any size: another node's batch may be smaller
            self.distrust(f"a batch for which this machine has no memory: {error}")
        if self._leaving and not self._tasks:
            self._end(self._leaving)
        if self._link.ended:
            self._end(self.why)

    def _answered(self, kind: int, body: bytes) -> None:
        if kind in (wire.ERROR, wire.ALL_DROPPED):
            epoch, task, _, _ = wire.unpack_answer(body)
            self._tasks.pop((epoch, task), None)
        elif kind == wire.EXHAUSTED:
            self._void(wire.unpack_answer(body)[0] + 1)
        elif kind == wire.RESET_DONE:
            self._void(wire.unpack_reset(body)[0])

    def _void(self, epoch: int) -> None:
        """The worker answers no task of an earlier epoch any more."""
        self._tasks = {key: value for key, value in self._tasks.items() if key[0] >= epoch}

    def _place(self, header: Header) -> memoryview:
        key = header.epoch, header.task
        if header.kind != wire.RESULT or key not in self._tasks:
            raise ValueError(f"broken stream: a batch for task {header.task}, which was not asked for")
        number, slot = self._tasks[key]
        self._began[key] = perf_counter()
        ring, nbytes = self._rings.get(number), header.payload
        if ring is not None and slot >= 0 and nbytes <= ring.slot_bytes:
            start = ring.offset(slot, nbytes)
            return memoryview(ring.memory)[start : start + nbytes]
        segment.check_room(nbytes, "one batch")
        fd = segment.create(nbytes)
        self._segments[key] = fd
        segment.reserve(fd, 0, nbytes)
        return memoryview(segment.map_segment(fd, nbytes))

    def _result(self, header: Header, body: bytes) -> bytes:
        result, template, cursor = wire.unpack_result(body)
        key = header.epoch, header.task
        if (result.epoch, result.seq) != key or result.nbytes != header.payload or key not in self._tasks:
            raise ValueError(f"broken stream: a batch for task {header.task}, which was not asked for")
        _, slot = self._tasks.pop(key)
        if key in self._segments:
            self._fds.append(self._segments.pop(key))
            slot = wire.ONEOFF
        elif not header.payload:
            slot = wire.NO_SLOT
        began = self._began.pop(key, None)
        result = result._replace(slot=slot, sent=perf_counter() if began is None else began)
        return wire.pack_result(result, template, cursor)[wire.PREFIX_BYTES :]

    def take_fd(self) -> int:
        """Return the segment of the batch just received; the caller owns it."""
        return self._fds.popleft()

    # ---------------------------------------------------------------------------------------------- ending

    def _check(self) -> None:
        """While there are tasks, every now and then: does the node still answer?"""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            return
        self._timer = None
        if self.ended or not self._tasks or self.fileno() < 0:
            return
        # Bytes, and not messages: a large batch takes its time. Those that were not read count as well: after a block
        # of the loop uvloop runs timers before readers, and the 256 KiB that wake the reader may take long to come.
        came = self.received + self._link.unread
        if self._seen != came:
            self._seen, self._pings = came, 0
        elif self._pings >= _MOST_PINGS:
            self._end(f"the node did not answer for {_CHECK_S * (_MOST_PINGS + 1):.1f} seconds")
            return
        else:
            self._pings += 1
            try:
                self._send(frames.PING)
            except ConnectionError as error:
                self._end(str(error))
                return
        self._timer = loop.call_later(_CHECK_S, self._check)

    def _end(self, why: str) -> None:
        if not self.ended:
            self.ended, self.why = True, why
        gone, self._gone = self._gone, -1
        if gone >= 0:
            os.close(gone)  # makes `gone_fd` readable

    def close(self) -> None:
        """Close the connection and all that was received and not taken. Idempotent."""
        self._end("closed")
        self._link.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for fd in (*self._fds, *self._segments.values()):
            os.close(fd)
        self._fds.clear()
        self._segments.clear()
        self._rings.clear()
        if self.gone_fd >= 0:
            os.close(self.gone_fd)
            self.gone_fd = -1
