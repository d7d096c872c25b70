"""The node's end of one logical worker: passes a loader's tasks to a process, and batches back.

Data path: loader -> connection -> [worker_connections] -> worker_host -> [worker_connections] -> connection -> loader.

A loader on another machine has a `RelayedConnection`: the process writes a batch into a ring of the node's, and the
node sends it from there. A loader on this machine gets the process's socket itself (`LocalConnection`): it shares its
own ring with the process, and the node is not in between; it only says how the process ended.

*What a loader makes the node hold is bounded, and an honest loader is never held up.* Tasks are given to the process
while the loader has credits, and the quota is not full; others wait here. The loader is read only while its tasks
that wait, what its process has not taken, and the messages that the loader has not read are below a bound, and the
process only while the messages are.

This cannot last for ever. Messages go as the loader reads. What waits for the process goes as the process works, and if
it does not for `_DEAF_S`, the connection is closed: its loader's PINGs are unanswered, so an honest loader is elsewhere
by then, and one that has hung up would not be noticed. KILL is read behind what came before it, hence by then at the
latest. A quota is full only of what its loader has not read. A loader within its credits has no tasks that wait, and
so is read all the time, unless its indices take more than `_MOST_QUEUED` twice.
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
from asyncloader.service.node.memory_quota import MemoryQuota
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link, Message
from asyncloader.service.protocol.records import DeathReport, pack_record
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.memory.layout import slot_count
from asyncloader.workers.memory.ring import oneoff_anchor
from asyncloader.workers.memory.ring_manager import RingManager

_log = logging.getLogger("asyncloader")

_PASSED_ON = frozenset((wire.RESET, wire.ASSIGNMENT, wire.STOP))
_UNANSWERED = 1 << 12
_MOST_QUEUED = 16 << 20  # bytes, in each queue; one message more, if it is that large
_TASK_BYTES = 300  # that a task takes in a queue besides its index
_DEAF_S = 10.0
_SILENT_S = 2.0
"""Seconds after a connection's end in which its process reports why, or turns out to be dying."""


class LocalConnection:
    """The connection of a loader on this machine.

    Args:
        link: to the loader; it says nothing more on it, until it ends.
        ended: called once it has.
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
                    self._kill()
        except ValueError:
            self._link.ended = True
        if self._link.ended:
            self.close()

    def died(self, death: DeathReport) -> None:
        """As `WorkerConnection`."""
        with contextlib.suppress(ConnectionError):
            self._link.send(frames.DIED, pack_record(death))
        self.close()

    def close(self) -> None:
        """End it. Idempotent."""
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._link.close()
            self._ended()

    async def drain(self) -> None:
        """Its loader has what was made, and gets no more."""
        self.close()


class RelayedConnection:
    """The connection of a loader anywhere.

    Args:
        link: to the loader.
        sock: the node's end of the connection, non-blocking.
        credits: tasks that the loader has outstanding, at most.
        quota: the loader.
        ended: called once the connection has.
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
        self._held = 0  # bytes of its ring
        self._queued = 0  # of the messages that are unsent, as the quota knows them
        self._channel = Channel(sock)
        self._ended = ended
        self._kill = kill
        self._rings = RingManager(credits=credits, ring_bytes=None)
        self._most_given = slot_count(credits)
        self._loop = asyncio.get_running_loop()
        self._unanswered: dict[tuple[int, int], int] = {}  # bytes of each task's index that the process has
        self._given_bytes = 0  # their sum
        self._waiting: deque[tuple[int, int, bytes]] = deque()  # those of them that the process has not yet
        self._waiting_bytes = 0
        self._exhausted = -1  # the newest epoch in which the process's stream has ended: it answers no task of it
        self._idle = asyncio.Event()
        self._sent = asyncio.Event()
        self._draining = False
        self._reads_link = self._reads_process = True
        self._deaf: asyncio.TimerHandle | None = None
        self._queued_when_deaf = 0
        self._silent: asyncio.TimerHandle | None = None
        self._loop.add_reader(link.fileno(), self._on_link)
        self._loop.add_reader(sock.fileno(), self._on_process)

    # ------------------------------------------------------------------------------------------ from the loader

    def _on_link(self) -> None:
        if self._link.fileno() < 0 or not self._reads_link:
            return
        try:
            for message in self._link.receive():
                self._take(message)
                if not self._reads_link:
                    break  # the rest of the link's messages are taken when it is read again
        except Exception as error:  # of any kind: a loader waits for a connection that answers pings
            self._fails(error)
        if self._link.ended:
            self.close()

    def _fails(self, error: Exception) -> None:
        """End the connection, or report a death, because a request of the loader cannot be carried out."""
        why = str(error) or type(error).__name__  # a log record that somebody keeps must not keep the ring
        if isinstance(error, RingMemoryError):  # at another node it may be the same: the loader must not try for ever
            _log.warning("a loader asks for more memory than there is: %s", why, extra={"peer": self._quota.name})
            self.died(DeathReport(0, None, why, "", blamed=True, shared=False))
        else:  # the peer does not follow the protocol
            _log.warning("a loader's connection is closed: %s", why, extra={"peer": self._quota.name})
            self.close()

    def _take(self, message: Message) -> None:
        kind, body = message.header.kind, message.body
        if kind == wire.TASK:
            self._task(message.header.epoch, message.header.task, body)
        elif kind in _PASSED_ON:
            self._pass_to_process(kind, body)
        elif kind == frames.PING:
            self._send(frames.PONG)
        elif kind == frames.KILL:
            self._kill()
        else:
            raise ValueError(f"broken stream: a message of kind {kind} from a loader")

    def _task(self, epoch: int, task: int, index: bytes) -> None:
        if self._draining or self._channel.fileno() < 0:
            return  # the loader gives it to another node, or to another process
        if epoch <= self._exhausted:
            return  # it was sent before the loader knew
        if (epoch, task) in self._unanswered or len(self._unanswered) >= _UNANSWERED:
            raise ValueError("broken stream: a task twice, or too many at a time")
        if not self._waiting and self._may_give:
            self._hand_over(epoch, task, index)
            return
        self._unanswered[epoch, task] = 0
        self._waiting.append((epoch, task, index))
        self._waiting_bytes += len(index) + _TASK_BYTES
        if self._quota.full:
            self._quota.wait(self._give_soon)
        self._steer()

    @property
    def _may_give(self) -> bool:
        """Whether the process may be given one more task."""
        given = len(self._unanswered) - len(self._waiting)
        return given < self._most_given and self._given_bytes < _MOST_QUEUED and not self._quota.full

    def _hand_over(self, epoch: int, task: int, index: bytes) -> None:
        self._unanswered[epoch, task] = len(index)
        self._given_bytes += len(index)
        self._give(epoch, task, index)

    def _give_soon(self) -> None:
        """Not at once: this is called while a message is sent, or another connection is."""
        self._loop.call_soon(self._give_waiting)

    def _give_waiting(self) -> None:
        try:
            while self._waiting and self._may_give:
                epoch, task, index = self._waiting.popleft()
                self._waiting_bytes -= len(index) + _TASK_BYTES
                self._hand_over(epoch, task, index)
            if self._waiting and self._quota.full:
                self._quota.wait(self._give_soon)
        except Exception as error:
            self._fails(error)
        self._steer()

    def _forget_waiting(self, epoch: int) -> None:
        """No task of an earlier epoch is given to the process any more."""
        if self._waiting:
            self._waiting = deque(each for each in self._waiting if each[0] >= epoch)
            self._waiting_bytes = sum(len(index) + _TASK_BYTES for _, _, index in self._waiting)

    def _pass_to_process(self, kind: int, body: bytes) -> None:
        """The loader says that an epoch begins, or that it ends the worker."""
        if kind == wire.RESET:
            self._forget_waiting(wire.unpack_reset(body)[0])
        self._tell(wire.pack(kind, body))

    def _give(self, epoch: int, task: int, index: bytes) -> None:
        """Give the task to the process."""
        self._renew_ring()
        number, slot = self._rings.assign(epoch, task)
        self._tell(wire.pack_task(epoch, task, slot, number, perf_counter(), index))

    def _renew_ring(self) -> None:
        """Give the process a larger ring, if it needs one. Raises RingMemoryError."""
        grown = self._rings.replacement()
        if grown is not None:
            self._hold(grown.nbytes)
            assert grown.fd is not None
            self._tell(wire.pack_ring(grown.number, grown.slots, grown.slot_bytes), grown.fd)
            grown.close_fd()

    def _hold(self, nbytes: int) -> None:
        """Count the bytes of this connection's ring. Raises RingMemoryError."""
        self._quota.hold(nbytes - self._held)
        self._held = nbytes

    def _tell(self, frame: bytes, fd: int = -1) -> None:
        if self._channel.fileno() < 0:
            return
        with contextlib.suppress(ConnectionError):  # the process is dying, which its pidfd reports
            if not self._channel.send(frame, () if fd < 0 else (fd,)):
                self._loop.add_writer(self._channel.fileno(), self._flush_process)
                self._steer()

    def _flush_process(self) -> None:
        done = True
        with contextlib.suppress(ConnectionError):
            done = self._channel.flush()
        if done:
            self._loop.remove_writer(self._channel.fileno())
        self._steer()

    def _steer(self) -> None:
        """Read from the loader and from the process, or not, as the queues allow. See the top of this file."""
        if self._link.fileno() < 0:
            return
        read = self._link.queued <= _MOST_QUEUED
        if read != self._reads_process and self._channel.fileno() >= 0:
            self._reads_process = read
            if read:
                self._loop.add_reader(self._channel.fileno(), self._on_process)
            else:
                self._loop.remove_reader(self._channel.fileno())
        queued = self._channel.unsent_memory + self._waiting_bytes
        full = self._channel.fileno() >= 0 and queued > _MOST_QUEUED
        if self._deaf is not None and (not full or queued < self._queued_when_deaf):  # it takes some, if slowly
            self._deaf.cancel()
            self._deaf = None
        if full:
            read = False
            if self._deaf is None:
                deaf = ValueError("its process takes nothing from it")
                self._queued_when_deaf, self._deaf = queued, self._loop.call_later(_DEAF_S, self._fails, deaf)
        if read == self._reads_link:
            return
        self._reads_link = read
        if read:
            self._loop.add_reader(self._link.fileno(), self._on_link)
            self._loop.call_soon(self._on_link)  # messages may lie in the link already
        else:
            self._loop.remove_reader(self._link.fileno())

    # ------------------------------------------------------------------------------------------- to the loader

    def _on_process(self) -> None:
        try:
            for kind, body in self._channel.receive():
                self._pass_on(kind, body)
        except Exception as error:  # a corrupt process; memory or descriptors are short; or a fault of ours
            self._fails(error)
        if self._channel.ended and self._channel.fileno() >= 0:
            # How it ended is reported by its process's pidfd, or by the process.
            self._loop.remove_reader(self._channel.fileno())
            if self._silent is None:
                self._silent = self._loop.call_later(_SILENT_S, self._ended_silently)

    def _ended_silently(self) -> None:
        why = "Its worker connection ended, and its process lives on."
        self.died(DeathReport(0, None, why, "", blamed=False, shared=False))

    def _pass_on(self, kind: int, body: bytes) -> None:
        if kind == wire.RESULT:
            self._result(body)
            return
        if kind in (wire.ERROR, wire.EXHAUSTED, wire.ALL_DROPPED):
            epoch, task, _, _ = wire.unpack_answer(body)
            self._rings.answered(epoch, task, wire.NO_SLOT, 0)
            self._answered(epoch, task)
            if kind == wire.EXHAUSTED:  # perhaps late: the loader may have begun a new epoch, whose tasks stay
                self._exhausted = epoch
                self._void(epoch + 1)
        elif kind == wire.RESET_DONE:
            self._void(wire.unpack_reset(body)[0])
        self._send(kind, body)

    def _void(self, epoch: int) -> None:
        """The process answers no task of an earlier epoch any more."""
        self._rings.reset_done(epoch)
        self._forget_waiting(epoch)
        self._unanswered = {key: nbytes for key, nbytes in self._unanswered.items() if key[0] >= epoch}
        self._given_bytes = sum(self._unanswered.values())
        self._after_answer()

    def _result(self, body: bytes) -> None:
        result, template, _ = wire.unpack_result(body)
        epoch, task = result.epoch, result.seq
        payload: memoryview | None = None
        sent: Callable[[], None] | None = None
        if result.slot == wire.ONEOFF:
            fd = self._channel.take_fd()
            try:
                payload = memoryview(oneoff_anchor(fd, result.nbytes))
            finally:
                os.close(fd)
            self._quota.check(result.nbytes)
        ring = self._rings.answered(epoch, task, result.slot, result.nbytes)
        if ring is not None:
            payload, sent = memoryview(ring.look(result.slot, result.nbytes)), partial(ring.give_back, result.slot)
        elif payload is not None:
            sent = self._own(payload)
        self._batch(body, result, template, payload, sent)
        self._answered(epoch, task)
        if result.slot == wire.ONEOFF and self._channel.fileno() >= 0:
            # Not with the next task: the process has others, whose batches may be as large, and perhaps too large.
            self._renew_ring()

    def _own(self, payload: memoryview) -> Callable[[], None]:
        """Count a batch that lies in no ring. Returns the function to call once it was sent."""
        self._quota.count(payload.nbytes)
        return partial(self._quota.count, -payload.nbytes)

    def _batch(
        self,
        body: bytes,
        result: wire.Result,
        template: bytes,
        payload: memoryview | None,
        sent: Callable[[], None] | None,
    ) -> None:
        """The process has made a batch; `body` is its description and template. `sent` is called when it may go."""
        del template
        self._send(wire.RESULT, body, result.epoch, result.seq, payload, sent)

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
        """Send a message to the loader, as by `Link.send`; the rest of it follows when the socket takes more."""
        if self._link.fileno() < 0:
            if sent is not None:
                sent()
            return
        try:
            done = self._link.send(kind, body, epoch=epoch, task=task, payload=payload, sent=sent)
        except OSError:
            self._link.ended = True
            self._loop.call_soon(self.close)  # the reader would see it, too, but perhaps there is none now
            return
        if done:
            self._sent.set()
        else:
            self._sent.clear()
            self._loop.add_writer(self._link.fileno(), self._flush_link)
        if not done or self._queued:
            self._count()

    def _flush_link(self) -> None:
        try:
            done = self._link.flush()
        except OSError:
            self.close()
            return
        if done:
            self._sent.set()
            self._loop.remove_writer(self._link.fileno())
        self._count()

    def _count(self) -> None:
        """Note how much is unsent."""
        queued = self._link.queued
        self._quota.count(queued - self._queued)
        self._queued = queued
        self._steer()

    # ---------------------------------------------------------------------------------------------- ending

    def died(self, death: DeathReport) -> None:
        """As `WorkerConnection`: what the process had sent goes first."""
        before = -1
        with contextlib.suppress(Exception):
            while not self._channel.ended and self._channel.received != before:
                before = self._channel.received
                for kind, body in self._channel.receive():
                    self._pass_on(kind, body)
        self._send(frames.DIED, pack_record(death))
        self._leave_process()

    def _leave_process(self) -> None:
        """Let go of the process. The link stays until all is sent and the loader closes it."""
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
        self._waiting.clear()
        self._waiting_bytes = 0
        self._quota.leave(self._give_soon)
        for timer in (self._deaf, self._silent):
            if timer is not None:
                timer.cancel()
        self._steer()

    async def drain(self) -> None:
        """Take no more tasks, and wait until those in work are answered and sent."""
        self._draining = True
        for epoch, task, _ in self._waiting:
            self._unanswered.pop((epoch, task), None)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._idle.clear()
        if self._unanswered:
            await self._idle.wait()
        self._send(frames.DRAINING)
        await self._sent.wait()
        self.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._leave_process()
        self._idle.set()
        self._sent.set()
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
            self._link.close()
            self._rings.close()
            self._quota.count(-self._queued)
            self._queued = 0
            self._hold(0)
            self._ended()
