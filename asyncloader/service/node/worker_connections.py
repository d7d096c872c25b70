"""The node's end of one worker connection: passes a loader's tasks to a process, and batches back.

Data path: loader -> link -> [worker_connections] -> worker_host -> [worker_connections] -> link -> loader.

The process writes a batch into a ring of the node's, and the node sends it from there. A loader on this machine has a
`LocalConnection` instead: loader and process share the loader's ring, and the node only reports how the process ended.

The memory that a loader makes the node hold is bounded: tasks wait in the node until the process may have them, and
the node stops reading from either side while the queue to the loader is too long (see `_steer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter

from asyncloader.errors import RingMemoryError
from asyncloader.service.node.sessions import MemoryQuota
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link, Message, flush_later
from asyncloader.service.protocol.records import DeathReport, pack_record
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.ipc.layout import slot_count
from asyncloader.workers.ipc.ring import oneoff_anchor
from asyncloader.workers.ipc.ring_manager import RingManager

_log = logging.getLogger("asyncloader")

_PASSED_ON = frozenset((wire.RESET, wire.ASSIGNMENT, wire.STOP))
_UNANSWERED = 1 << 12  # tasks of one connection, at most: the most credits that a loader may ask for
# Checked after a message was added: the queue may exceed it by that message, however large.
_MOST_QUEUED = 16 << 20  # bytes of the queue to the loader, and of the tasks that the process has
_MOST_WAITING = 256 << 20
"""Bytes of frames that wait for the process, at most: four of the largest bodies. The connection of a loader that sends
more is closed: its PINGs and its end are read all the time, so that a process that is stuck keeps neither."""
_TASK_BYTES = 300  # of memory that a waiting task takes besides its index
_SILENT_S = 2.0
"""Seconds that a process has to report why a connection ended, or to turn out to be dying."""


class RelayedConnection:
    """The connection of a loader on any machine, whose batches the node sends.

    Args:
        link: to the loader.
        sock: to the process, non-blocking.
        credits: tasks that the loader has outstanding, at most.
        quota: the loader's memory.
        ended: called once the connection is closed.
        kill: called when a task takes too long for the loader.
    """

    def __init__(
        self,
        link: Link,
        sock: socket.socket,
        credits: int,
        quota: MemoryQuota,
        ended: Callable[[], None],
        kill: Callable[[], None],
    ) -> None:
        self._link = link
        self._quota = quota
        self._held = 0  # bytes of the ring, as the quota counts them
        self._queued = 0  # bytes of unsent messages, as the quota counts them
        self._channel = Channel(sock)
        self._joins = False  # whether frames to the process wait for others, in `_joined`
        self._joined: list[bytes] = []
        self._ended = ended
        self._kill = kill
        self._rings = RingManager(credits=credits, ring_bytes=None)
        self._slots = slot_count(credits)
        self._loop = asyncio.get_running_loop()
        self._unanswered: dict[tuple[int, int], int] = {}  # bytes of each task's index, 0 while the task waits
        self._given_bytes = 0  # their sum
        self._waiting: deque[tuple[int, int, bytes]] = deque()  # unanswered tasks that the process does not have yet
        self._exhausted = -1  # the newest epoch whose stream has ended: the process answers no further task of it
        self._idle = asyncio.Event()
        self._sent = asyncio.Event()
        self._draining = False
        self._reads = True
        self._silent: asyncio.TimerHandle | None = None
        self._loop.add_reader(link.fileno(), self._on_link)
        self._loop.add_reader(sock.fileno(), self._on_process)

    # ------------------------------------------------------------------------------------------ from the loader

    def _on_link(self) -> None:
        # `_steer` schedules this call, too, and the connection may have been closed, or the queue be full, since then.
        if self._link.fileno() < 0 or not self._reads:
            return
        try:
            # Tasks that came together go to the process in one call, and wake it once. The bytes of a call of `receive`
            # are bounded, so these frames are as well.
            self._joins = True
            try:
                for message in self._link.receive():
                    self._take(message)
                    if not self._reads:
                        break  # the link keeps its other messages, until `_steer` reads it again
            finally:
                self._send_joined()
            waiting = sum(len(index) + _TASK_BYTES for _, _, index in self._waiting)
            if waiting + self._channel.unsent.memory > _MOST_WAITING:
                raise ValueError("more waits for its process than a loader of ours sends")
        except Exception as error:
            # Any error, also of our own code, ends the connection. One that goes on, answering PINGs and nothing else,
            # would look alive to its loader, which would wait for the task forever.
            self._fail(error)
        if self._link.ended:
            self.close()

    def _fail(self, error: Exception) -> None:
        """End the connection, or report a death, because a request of the loader cannot be carried out."""
        # The text, not the error: a handler may keep its log records, and the error's traceback holds the ring.
        why = str(error) or type(error).__name__
        if isinstance(error, RingMemoryError):
            # Reported as a death at the loader's task, which counts against the task. A closed connection does not, and
            # the loader would try the same task forever, as other nodes may have no more memory.
            _log.warning("a loader asks for more memory than there is: %s", why, extra={"peer": self._quota.name})
            self.died(DeathReport(0, None, why, "", blamed=True, shared=False))
        else:  # mostly a peer that does not follow the protocol
            _log.warning("a loader's connection is closed: %s", why, extra={"peer": self._quota.name})
            self.close()

    def _take(self, message: Message) -> None:
        kind, body = message.header.kind, message.body
        if kind == wire.TASK:
            self._task(message.header.epoch, message.header.task, body)
        elif kind in _PASSED_ON:
            if kind == wire.RESET:
                # Before the frame is sent: a task of the epoch before that followed RESET would be carried out in the
                # new epoch. The tasks stay among the unanswered until RESET_DONE, as those do that the process has.
                self._forget_waiting(wire.unpack_reset(body)[0])
            self._send_frame(wire.pack(kind, body))
        elif kind == frames.PING:
            self._send(frames.PONG)
        elif kind == frames.KILL:
            self._kill()
        else:
            raise ValueError(f"broken stream: a message of kind {kind} from a loader")

    def _task(self, epoch: int, task: int, index: bytes) -> None:
        if self._draining or self._channel.fileno() < 0:
            return  # DRAINING or DIED is on its way, at which the loader gives the task to another worker
        if epoch <= self._exhausted:
            return  # the loader sent it before it received EXHAUSTED
        if (epoch, task) in self._unanswered or len(self._unanswered) >= _UNANSWERED:
            raise ValueError("broken stream: a task twice, or too many at a time")
        # While others wait, this task waits behind them: a stream's process carries tasks out in the loader's order.
        if not self._waiting and self._may_give:
            self._start(epoch, task, index)
            return
        self._unanswered[epoch, task] = 0  # counted as waiting, not as given
        self._waiting.append((epoch, task, index))
        if self._quota.full:
            # Perhaps this process has no task, and so no answer to come that would give the next task. The memory may
            # be that of the loader's other connections, and only the quota reports when it is free.
            self._quota.wait(self._give_soon)

    @property
    def _may_give(self) -> bool:
        """Whether the process may be given one more task."""
        given = len(self._unanswered) - len(self._waiting)
        return given < self._slots and self._given_bytes < _MOST_QUEUED and not self._quota.full

    def _start(self, epoch: int, task: int, index: bytes) -> None:
        """Give the task to the process."""
        self._unanswered[epoch, task] = len(index)
        self._given_bytes += len(index)
        self._renew_ring()
        number, slot = self._rings.assign(epoch, task)
        self._send_frame(wire.pack_task(epoch, task, slot, number, perf_counter(), index))

    def _give_soon(self) -> None:
        # Not at once: the quota calls this when a message was sent, from inside `Link.flush` of this connection or of
        # another connection of the loader. To give a task may send, and would enter `flush` a second time.
        self._loop.call_soon(self._give_waiting)

    def _give_waiting(self) -> None:
        try:
            while self._waiting and self._may_give:
                epoch, task, index = self._waiting.popleft()
                self._start(epoch, task, index)
            if self._waiting and self._quota.full:
                self._quota.wait(self._give_soon)  # again: the quota calls each function once
        except Exception as error:
            self._fail(error)

    def _forget_waiting(self, epoch: int) -> None:
        """Drop waiting tasks of earlier epochs."""
        self._waiting = deque(each for each in self._waiting if each[0] >= epoch)

    def _renew_ring(self) -> None:
        """Send the process a larger ring, if it needs one. Raises RingMemoryError."""
        grown = self._rings.replacement(self._quota.room(self._held))
        if grown is not None:
            self._slots = grown.slots
            # Counted before it is sent: the process touches the pages only once it has the ring. The old ring
            # no longer counts, although some of its batches may be unsent: they go as the loader reads.
            self._hold(grown.nbytes)
            assert grown.fd is not None
            self._send_frame(wire.pack_ring(grown.number, grown.slots, grown.slot_bytes), grown.fd)
            grown.close_fd()  # the channel has a duplicate, if the frame has to wait

    def _hold(self, nbytes: int) -> None:
        """Count the ring's bytes in the quota. Raises RingMemoryError."""
        self._quota.hold(nbytes - self._held)
        self._held = nbytes

    def _send_joined(self) -> None:
        """Send the frames that were joined, and join no more."""
        self._joins = False
        if self._joined:
            joined, self._joined = b"".join(self._joined), []
            self._send_frame(joined)

    def _send_frame(self, frame: bytes, fd: int = -1) -> None:
        if self._joins and fd < 0:
            self._joined.append(frame)
            return
        if self._joined:
            self._send_joined()
        if self._channel.fileno() < 0:
            return
        with contextlib.suppress(ConnectionError):  # the process is dying: its pidfd reports that, and `died` is called
            if not self._channel.send(frame, () if fd < 0 else (fd,)):
                flush_later(self._loop, self._channel)

    def _steer(self) -> None:
        """Start or stop reading from the loader and from the process, as the queue to the loader allows."""
        # We cannot put a bound on the queue itself: a message that was received is in memory. Instead we stop reading
        # from the sources: messages come from the process, and (PONG) from the loader. They go as the loader reads; if
        # it does not, that is its own loss.
        read = self._link.unsent.memory <= _MOST_QUEUED
        if read == self._reads or self._link.fileno() < 0:
            return
        self._reads = read
        ends = [(self._link.fileno(), self._on_link), (self._channel.fileno(), self._on_process)]
        for fd, readable in ends:
            if fd >= 0 and read:
                self._loop.add_reader(fd, readable)
            elif fd >= 0:
                self._loop.remove_reader(fd)
        if read:
            # Messages that the link has received already do not make its socket readable.
            self._loop.call_soon(self._on_link)

    # ------------------------------------------------------------------------------------------- to the loader

    def _on_process(self) -> None:
        try:
            for kind, body in self._channel.receive():
                self._pass_on(kind, body)
        except Exception as error:  # a corrupt process, too little memory, too few descriptors, or a fault of ours
            self._fail(error)
        if self._channel.ended and self._channel.fileno() >= 0:
            # Why it ended is not known yet: the process's pidfd reports a death, and a process that lives reports its
            # reason on its own channel. Both arrive apart from this socket's end, often after it.
            self._loop.remove_reader(self._channel.fileno())
            if self._silent is None:
                why = "Its worker connection ended, and its process lives on."
                lost = DeathReport(0, None, why, "", blamed=False, shared=False)
                self._silent = self._loop.call_later(_SILENT_S, self.died, lost)

    def _pass_on(self, kind: int, body: bytes) -> None:
        if kind == wire.RESULT:
            self._result(body)
            return
        if kind in (wire.ERROR, wire.EXHAUSTED, wire.STREAM_ENDED, wire.ALL_DROPPED):
            epoch, task, _, _ = wire.unpack_answer(body)
            self._rings.answered(epoch, task, wire.NO_SLOT, 0)
            self._answered(epoch, task)
            if kind == wire.EXHAUSTED:
                # Up to this epoch, not all: the answer may be late, and the loader may have begun a new epoch since.
                self._exhausted = epoch
                self._void(epoch + 1)
        elif kind == wire.RESET_DONE:
            self._void(wire.unpack_reset(body)[0])
        self._send(kind, body)

    def _void(self, epoch: int) -> None:
        """Forget tasks of earlier epochs, which the process does not answer any more."""
        self._rings.reset_done(epoch)
        self._forget_waiting(epoch)
        self._unanswered = {key: nbytes for key, nbytes in self._unanswered.items() if key[0] >= epoch}
        self._given_bytes = sum(self._unanswered.values())
        self._after_answer()

    def _result(self, body: bytes) -> None:
        result = wire.unpack_result(body)[0]
        epoch, task = result.epoch, result.seq
        payload: memoryview | None = None
        sent: Callable[[], None] | None = None
        if result.slot == wire.ONEOFF:
            fd = self._channel.take_fd()
            try:
                payload = memoryview(oneoff_anchor(fd, result.nbytes))
            finally:
                os.close(fd)  # the mapping keeps the memory
            # Checked alone, not with the unsent bytes: the batch is made, and goes as the loader reads.
            self._quota.check(result.nbytes)
        ring = self._rings.answered(epoch, task, result.slot, result.nbytes)
        if ring is not None:
            payload, sent = ring.bytes_of(result.slot, result.nbytes), partial(ring.give_back, result.slot)
        elif payload is not None:
            # In no ring: counted until it was sent.
            self._quota.count(payload.nbytes)
            sent = partial(self._quota.count, -payload.nbytes)
        self._send(wire.RESULT, body, epoch, task, payload, sent)
        self._answered(epoch, task)
        if result.slot == wire.ONEOFF:
            # Now, not with the next task: the process has tasks already whose batches may be as large. If there is no
            # memory for such a ring, the loader must know before each of them takes a segment of its own.
            self._renew_ring()

    def _answered(self, epoch: int, task: int) -> None:
        self._given_bytes -= self._unanswered.pop((epoch, task), 0)
        self._after_answer()

    def _after_answer(self) -> None:
        if not self._unanswered:
            self._idle.set()
        elif self._waiting:
            self._give_soon()

    def _send(
        self,
        kind: int,
        body: bytes = b"",
        epoch: int = 0,
        task: int = 0,
        payload: memoryview | None = None,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a message to the loader; see `Link.send`. The rest of it follows when the socket takes more."""
        if self._link.fileno() < 0:
            if sent is not None:
                sent()  # as by a link that is closed with the message unsent: the slot is free again
            return
        try:
            done = self._link.send(kind, body, epoch=epoch, task=task, payload=payload, sent=sent)
        except OSError:
            # Not closed here: callers go on with the channel and the rings. Not left to the link's reader, either: it
            # may be removed at the moment.
            self._link.ended = True
            self._loop.call_soon(self.close)
            return
        if done:
            self._sent.set()
        else:
            self._sent.clear()
            self._loop.add_writer(self._link.fileno(), self._flush_link)
        # The usual message was sent at once, and the queue was empty: nothing has changed.
        if not done or self._queued:
            self._count()

    def _flush_link(self) -> None:
        try:
            done = self._link.flush()
        except OSError:
            # At once, unlike in `_send`: the event loop is the caller, and uses neither the channel nor the rings.
            self.close()
            return
        if done:
            self._sent.set()
            self._loop.remove_writer(self._link.fileno())
        self._count()

    def _count(self) -> None:
        """Count the unsent bytes in the quota."""
        queued = self._link.unsent.memory
        self._quota.count(queued - self._queued)
        self._queued = queued
        self._steer()

    # ---------------------------------------------------------------------------------------------- ending

    def died(self, death: DeathReport) -> None:
        """Pass on the frames that the process had sent, then report its death to the loader."""
        # Batches that it finished before its death would otherwise be made a second time. The pidfd can be readable
        # before the socket was read to its end, and a call of `receive` reads a part only. An error is of no interest:
        # DIED must be sent.
        before = -1
        with contextlib.suppress(Exception):
            while not self._channel.ended and self._channel.received != before:
                before = self._channel.received
                for kind, body in self._channel.receive():
                    self._pass_on(kind, body)
        self._send(frames.DIED, pack_record(death))
        self._leave_process()

    def _leave_process(self) -> None:
        """Close the channel to the process. The link stays open until all is sent and the loader closes it."""
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
        self._waiting.clear()
        self._quota.leave(self._give_soon)
        if self._silent is not None:
            self._silent.cancel()

    async def drain(self) -> None:
        """Take no more tasks, and wait until those in work are answered and sent."""
        self._draining = True
        # Waiting tasks were not begun: the loader gives them to another node at DRAINING.
        for epoch, task, _ in self._waiting:
            self._unanswered.pop((epoch, task), None)
        self._waiting.clear()
        self._idle.clear()  # set whenever no task was unanswered, which was so at some time before
        if self._unanswered:
            await self._idle.wait()
        self._send(frames.DRAINING)  # after the last batch: the loader ends the connection at it
        await self._sent.wait()
        self.close()

    def close(self) -> None:
        """Close link and channel. Idempotent."""
        self._leave_process()
        self._idle.set()  # both, so that `drain` does not wait for answers that will not come
        self._sent.set()
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
            self._link.close()  # before the rings: it gives back the slots of unsent batches
            self._rings.close()
            self._quota.count(-self._queued)
            self._queued = 0
            self._hold(0)
            self._ended()


class LocalConnection:
    """The connection of a loader on this machine, which has the process's socket itself.

    Args:
        link: to the loader. After OPENED only KILL and DIED are sent on it.
        ended: called once the connection is closed.
        kill: called when a task takes too long for the loader.
    """

    def __init__(self, link: Link, ended: Callable[[], None], kill: Callable[[], None]) -> None:
        self._link = link
        self._ended = ended
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            for message in self._link.receive():
                if message.header.kind == frames.KILL:
                    # Closes this link if the process is at another connection's task: see `HostProcesses.kill`.
                    self._kill()
        except ValueError:  # a broken stream
            self._link.ended = True
        if self._link.ended:
            self.close()

    def died(self, death: DeathReport) -> None:
        """Report to the loader that the process died."""
        # Not kept if the socket is full: a report is small, and nothing else was sent on this link.
        with contextlib.suppress(ConnectionError):
            self._link.send(frames.DIED, pack_record(death))
        self.close()

    def close(self) -> None:
        """Close the link. Idempotent."""
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._link.close()
            self._ended()

    async def drain(self) -> None:
        """Close the link: batches that the process has made are in the loader's own ring already."""
        self.close()
