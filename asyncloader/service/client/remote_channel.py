"""A worker's channel over a network. It has the interface of a local worker's channel.

Data path: node -> connection -> [remote_channel] -> ring -> consumer.

The pool sends a task with a slot of its ring; the task goes to the node without the slot, and the batch's bytes are
received directly into that slot. A batch that is larger than the slot gets a separate segment, like a local worker's.
Only this process writes to the ring, so no other process can write to it after a connection has broken.

While tasks are open, a silent node (a cut cable) is noticed within three seconds: see `_check`.
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
from asyncloader.service.protocol.connection import Link, flush_later, shut_down
from asyncloader.service.protocol.frames import Header
from asyncloader.workers.ipc import segment, wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.ipc.ring import WorkerRing

_SILENT_S = 3.0  # for the node's report of a death: longer than the node waits for a process that may be dying
_CHECK_S = 0.65  # between two checks of a node with tasks
_MOST_PINGS = 2  # without any byte in return: the next check gives the node up
_MOST_PAYLOAD = 1 << 40  # whether there is memory for a payload is checked when it is placed


class RemoteChannel:
    """The loader's end of a worker connection over a network. Interface and meaning are those of `Channel`.

    Args:
        link: the connection, after its handshake.
    """

    def __init__(self, link: Link) -> None:
        self.sock = link.sock
        self.ended = False
        self.death: bytes | None = None
        """The node's report of the end of the worker's process; None: no report."""
        self.why = "the node closed the connection"
        """The reason of the end, once `ended` is set."""
        # A pipe, because the socket is no sign of the end: it becomes readable also for messages, and a node that is
        # given up has not closed it. A forked child closes its copies at once (`_forget_all` in `remote_workers.py`):
        # with another write end open, closing this process's would wake nothing.
        self.gone_fd, self._gone = os.pipe()
        self._link = link
        link.place, link.most_payload = self._place, _MOST_PAYLOAD
        if link.sock.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            # From here on pings notice a silent network. The kernel's time-out would also end a connection whose window
            # is closed, as it is while the trainer computes and reads nothing.
            with contextlib.suppress(OSError):  # the connection has ended, which its reader sees
                link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._rings: dict[int, WorkerRing] = {}
        self._tasks: dict[tuple[int, int], tuple[int, int, float]] = {}  # (epoch, task) -> ring, slot, time of sending
        self._segments: dict[tuple[int, int], int] = {}  # of batches that are larger than their slot
        self._began = 0.0  # when the newest payload began to arrive
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
        """Bytes received so far."""
        return self._link.received

    # -------------------------------------------------------------------------------------------- sending

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a frame of the pool. Returns whether everything was sent.

        Raises:
            ConnectionError: the other end is closed.
        """
        kind = frame[wire.PREFIX_BYTES - 1]
        if kind == wire.TASK:
            return self._send_task(*wire.unpack_task(frame, wire.PREFIX_BYTES))
        body = frame[wire.PREFIX_BYTES :]
        if kind == wire.RING:
            # The ring stays here. Older rings are still the place of batches whose tasks were sent before.
            number, slots, slot_bytes = wire.unpack_ring(body)
            in_use = {ring for ring, _, _ in self._tasks.values()}
            self._rings = {number: ring for number, ring in self._rings.items() if number in in_use}
            # A duplicate: the pool may close its own once the frame is sent.
            self._rings[number] = WorkerRing(os.dup(fds[0]), slots, slot_bytes)
            return True
        return self._link.send(kind, body)

    def _send_task(self, epoch: int, task: int, slot: int, ring: int, sent: float, index: bytes) -> bool:
        self._tasks[epoch, task] = ring, slot, abs(sent)
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:  # a timer of an earlier loop, which is closed, never comes
            # No number of bytes: the first check sees a difference, and so gives the node a whole interval.
            self._seen, self._loop = -1, loop
            self._timer = loop.call_later(_CHECK_S, self._check)
        if asyncio.current_task(loop) is not None:
            # The user's coroutine takes a batch, and may then compute for long: the task must be on its way before.
            return self._link.send(wire.TASK, index, epoch=epoch, task=task)
        # In a callback, often one of several tasks: they go in one call, and wake the node once, when it has returned.
        if self._link.put(wire.TASK, index, epoch=epoch, task=task):
            loop.call_soon(self._send_put)
        return True

    def _send_put(self) -> None:
        """Send the tasks that callbacks have put."""
        if self.fileno() >= 0:
            with contextlib.suppress(ConnectionError):  # the reader sees the end
                if not self._link.flush():
                    flush_later(asyncio.get_running_loop(), self._link)

    def distrust(self, why: str) -> None:
        """End, because the node has sent a message that cannot be read."""
        self._end(why)

    def flush(self) -> bool:
        """Send unsent messages. Errors as `send`."""
        return self._link.flush()

    # ------------------------------------------------------------------------------------------ receiving

    def receive(self, *, wait: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield the complete frames, in the form in which a local worker sends them. Never waits."""
        del wait
        if self.ended:  # messages after a message that cannot be read are not read either
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
        except ValueError as error:  # not an error of the epoch: the tasks go to another node
            self.distrust(str(error))
        except RingMemoryError as error:  # the node may have announced any size: another node's batch may be smaller
            self.distrust(f"a batch for which this machine has no memory: {error}")
        if self._link.ended:
            self._end(self.why)

    def _answered(self, kind: int, body: bytes) -> None:
        if kind in (wire.ERROR, wire.ALL_DROPPED, wire.STREAM_ENDED):
            epoch, task, _, _ = wire.unpack_answer(body)
            self._tasks.pop((epoch, task), None)
        elif kind == wire.EXHAUSTED:
            # Up to this epoch, not all: the loader may have sent tasks of a new epoch before the answer came.
            self._void(wire.unpack_answer(body)[0] + 1)
        elif kind == wire.RESET_DONE:
            self._void(wire.unpack_reset(body)[0])

    def _void(self, epoch: int) -> None:
        """Forget the tasks of earlier epochs, which the worker will not answer any more."""
        self._tasks = {key: value for key, value in self._tasks.items() if key[0] >= epoch}

    def _place(self, header: Header) -> memoryview:
        key = header.epoch, header.task
        # Before any byte is received: the slot of another task may hold a batch that the consumer is reading.
        held = self._tasks.get(key)
        if header.kind != wire.RESULT or held is None:
            raise ValueError(f"broken stream: a batch for task {header.task}, which was not asked for")
        number, slot, _ = held
        self._began = perf_counter()
        ring, nbytes = self._rings.get(number), header.payload
        if ring is not None and slot >= 0 and nbytes <= ring.slot_bytes:
            start = ring.offset(slot, nbytes)
            return memoryview(ring.memory)[start : start + nbytes]
        # The node announces any size, and memory is taken before a byte comes: the trainer keeps half of what is left.
        room, reason = segment.memory_limit()
        if room is not None and nbytes > room // 2:
            raise RingMemoryError(nbytes, room // 2, f"half of the {reason}; wanted for one batch of a node")
        fd = segment.create(nbytes)
        self._segments[key] = fd  # before an error can be raised: `close` closes it
        segment.reserve(fd, 0, nbytes)
        return memoryview(segment.map_segment(fd, nbytes))

    def _result(self, header: Header, body: bytes) -> bytes:
        result = wire.unpack_result(body)[0]
        # The body repeats the header, and decides which batch the pool delivers: both must name a task that is open
        # here.
        key = header.epoch, header.task
        if (result.epoch, result.seq) != key or result.nbytes != header.payload or key not in self._tasks:
            raise ValueError(f"broken stream: a batch for task {header.task}, which was not asked for")
        _, slot, _ = self._tasks.pop(key)
        if key in self._segments:
            self._fds.append(self._segments.pop(key))
            slot = wire.ONEOFF
        elif not header.payload:
            slot = wire.NO_SLOT
        # The slot is the loader's, not the node's. The time of sending is that of this machine's clock: `perf_counter`
        # of another machine cannot be compared.
        return wire.place_result(body, slot, self._began if header.payload else perf_counter())

    def take_fd(self) -> int:
        """Return the segment of the batch just received, which the caller then owns."""
        return self._fds.popleft()

    # ---------------------------------------------------------------------------------------------- ending

    def _check(self) -> None:
        """Give the node up after three checks in which no byte has come. Runs while tasks are open."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # another loop has a timer of its own
            return
        self._timer = None
        if self.ended or not self._tasks or self.fileno() < 0:
            return
        # Bytes, and not messages: a large batch takes its time. Unread bytes count as well: after the program has
        # blocked the loop, uvloop runs timers before readers, and the 256 KiB that wake the reader may take long to
        # come. Checks are counted, and not seconds: a loop that was blocked for a minute has missed the answers of one
        # check.
        came = self._link.arrived
        if self._seen != came:
            self._seen, self._pings = came, 0
        elif self._pings >= _MOST_PINGS:
            self._end(f"the node did not answer for {_CHECK_S * (_MOST_PINGS + 1):.1f} seconds")
            return
        else:
            self._pings += 1
            try:
                self._link.send(frames.PING)
            except ConnectionError as error:
                self._end(f"the connection broke ({error})")
                return
        self._timer = loop.call_later(_CHECK_S, self._check)

    def _end(self, why: str) -> None:
        if not self.ended:
            self.ended, self.why = True, why
        gone, self._gone = self._gone, -1
        if gone >= 0:
            os.close(gone)  # makes `gone_fd` readable, which wakes the pool

    def close(self) -> None:
        """Close the connection, and drop received batches that were not taken. Idempotent."""
        self._end("closed")
        self._link.close()
        self._link.place = None  # it refers to this object
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


class PassedChannel(Channel):
    """The loader's end of a worker connection to a process of this machine, without the node in between. Its end, and
    the attributes of it, are those of `RemoteChannel`; the node reports it over the link.
    """

    def __init__(self, sock: socket.socket, link: Link) -> None:
        super().__init__(sock)
        self._link = link
        self.why = "the node closed the connection"
        self._silent: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the timer

    @property
    def gone_fd(self) -> int:
        """A descriptor that is readable by the node's report, or by its end without a report."""
        return self._link.fileno()

    @property
    def death(self) -> bytes | None:
        """The node's report of the end of the worker's process, once; None: no report."""
        try:
            return next((each.body for each in self._link.receive() if each.header.kind == frames.DIED), None)
        except ValueError as error:
            self.why = str(error)
            return None

    def distrust(self, why: str) -> None:
        """End, because the process has sent a message that cannot be read."""
        self.ended, self.why = True, why
        shut_down(self._link.sock)  # makes `gone_fd` readable

    def receive(self, *, wait: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield the complete frames. See `Channel.receive`."""
        received = super().receive(wait=wait)
        # The end of this channel is the end of the worker, but only the node reports how it ended, over the other
        # connection, for which the pool waits. A process that lives on without its end of the channel has no such
        # report: after a time the connection is shut down, which the pool takes for a lost node.
        if self.ended and self.fileno() >= 0:
            loop = asyncio.get_running_loop()
            if self._silent is None or self._loop is not loop:  # a timer of an earlier loop never comes
                self._loop, self._silent = loop, loop.call_later(_SILENT_S, shut_down, self._link.sock)
        return received

    def close(self) -> None:
        """Close the channel. Idempotent."""
        if self._silent is not None:
            self._silent.cancel()
        super().close()
