"""The node's end of one logical worker: passes a loader's tasks to a process, and batches back.

Data path: loader -> connection -> [node_lanes] -> lane_host -> [node_lanes] -> connection -> loader.

A loader on another machine has a `ForwardedLane`: the process writes a batch into a ring of the node's, and the node
sends it from there. A loader on this machine gets the lane's socket itself (`PassedLane`): it shares its own ring with
the process, and the node is not in between; it only says how the process ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from time import perf_counter

from asyncloader.errors import RingMemoryError
from asyncloader.service import frames
from asyncloader.service.host_process import Death
from asyncloader.service.link import Link, Message
from asyncloader.service.records import pack_record
from asyncloader.service.session import Session
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.memory.ring import oneoff_anchor
from asyncloader.workers.memory.ring_manager import RingManager

__all__ = ["ForwardedLane", "PassedLane"]

_log = logging.getLogger("asyncloader")

_PASSED_ON = frozenset((wire.RESET, wire.ASSIGNMENT, wire.STOP))
_UNANSWERED = 1 << 12


class PassedLane:
    """The lane of a loader on this machine.

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

    def died(self, death: Death) -> None:
        """As `LaneEnd`."""
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


class ForwardedLane:
    """The lane of a loader anywhere.

    Args:
        link: to the loader.
        sock: the node's end of the lane, non-blocking.
        credits: tasks that the loader has outstanding, at most.
        session: the loader.
        ended: called once the lane has.
        kill: called when a task takes too long for the loader.
    """

    def __init__(
        self,
        link: Link,
        sock: socket.socket,
        credits: int,
        session: Session,
        ended: Callable[[], None],
        kill: Callable[[], None],
    ) -> None:
        self._link = link
        self._session = session
        self._held = 0  # bytes of its ring
        self._channel = Channel(sock)
        self._ended = ended
        self._kill = kill
        self._rings = RingManager(credits=credits, ring_bytes=None)
        self._loop = asyncio.get_running_loop()
        self._unanswered: set[tuple[int, int]] = set()
        self._exhausted = -1  # the newest epoch in which the process's stream has ended: it answers no task of it
        self._idle = asyncio.Event()
        self._sent = asyncio.Event()
        self._draining = False
        self._loop.add_reader(link.fileno(), self._on_link)
        self._loop.add_reader(sock.fileno(), self._on_lane)

    # ------------------------------------------------------------------------------------------ from the loader

    def _on_link(self) -> None:
        try:
            for message in self._link.receive():
                self._take(message)
        except (ValueError, OSError, RingMemoryError) as error:
            self._fails(error)
        if self._link.ended:
            self.close()

    def _fails(self, error: Exception) -> None:
        """What the loader asks for cannot be done."""
        why = str(error)  # a record of the log that somebody keeps must not keep the ring
        if isinstance(error, RingMemoryError):  # at another node it may be the same: the loader must not try for ever
            _log.warning("a loader asks for more memory than there is: %s", why)
            self.died(Death(0, None, why, "", blamed=True, shared=False))
        else:  # it is no loader of ours
            _log.warning("a loader's connection is closed: %s", why)
            self.close()

    def _take(self, message: Message) -> None:
        kind, body = message.header.kind, message.body
        if kind == wire.TASK:
            self._task(message.header.epoch, message.header.task, body)
        elif kind in _PASSED_ON:
            self._pass_to_lane(kind, body)
        elif kind == frames.PING:
            self._send(partial(self._link.send, frames.PONG))
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
        self._unanswered.add((epoch, task))
        self._give(epoch, task, index)

    def _pass_to_lane(self, kind: int, body: bytes) -> None:
        """The loader says that an epoch begins, or that it ends the worker."""
        self._tell(wire.pack(kind, body))

    def _give(self, epoch: int, task: int, index: bytes) -> None:
        """Give the task to the process."""
        grown = self._rings.replacement()
        if grown is not None:
            self._hold(grown.nbytes)
            assert grown.fd is not None
            self._tell(wire.pack_ring(grown.number, grown.slots, grown.slot_bytes), grown.fd)
            grown.close_fd()
        number, slot = self._rings.assign(epoch, task)
        self._tell(wire.pack_task(epoch, task, slot, number, perf_counter(), index))

    def _hold(self, nbytes: int) -> None:
        """Count the bytes of this lane's ring. Raises RingMemoryError."""
        self._session.hold(nbytes - self._held)
        self._held = nbytes

    def _tell(self, frame: bytes, fd: int = -1) -> None:
        with contextlib.suppress(ConnectionError):  # the process is dying, which its pidfd reports
            if not self._channel.send(frame, () if fd < 0 else (fd,)):
                self._loop.add_writer(self._channel.fileno(), self._flush_lane)

    def _flush_lane(self) -> None:
        done = True
        with contextlib.suppress(ConnectionError):
            done = self._channel.flush()
        if done:
            self._loop.remove_writer(self._channel.fileno())

    # ------------------------------------------------------------------------------------------- to the loader

    def _on_lane(self) -> None:
        try:
            for kind, body in self._channel.receive():
                self._pass_on(kind, body)
        except (ValueError, OSError, RingMemoryError) as error:  # a corrupt process, or memory or descriptors are short
            _log.warning("a loader's connection is closed: %s", error)
            self.close()
            return
        if self._channel.ended and self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())  # how it ended is reported by its pidfd

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
        self._send(partial(self._link.send, kind, body))

    def _void(self, epoch: int) -> None:
        """The process answers no task of an earlier epoch any more."""
        self._rings.reset_done(epoch)
        self._unanswered = {each for each in self._unanswered if each[0] >= epoch}
        if not self._unanswered:
            self._idle.set()

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
        ring = self._rings.answered(epoch, task, result.slot, result.nbytes)
        if ring is not None:
            payload, sent = memoryview(ring.look(result.slot, result.nbytes)), partial(ring.give_back, result.slot)
        self._batch(body, result, template, payload, sent)
        self._answered(epoch, task)

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
        send, epoch, task = self._link.send, result.epoch, result.seq
        self._send(partial(send, wire.RESULT, body, epoch=epoch, task=task, payload=payload, sent=sent))

    def _answered(self, epoch: int, task: int) -> None:
        self._unanswered.discard((epoch, task))
        if not self._unanswered:
            self._idle.set()

    def _send(self, send: Callable[[], bool]) -> None:
        """Send a message to the loader by a call of `Link.send`; the rest of it follows when the socket takes more."""
        if self._link.fileno() < 0:
            return
        try:
            done = send()
        except OSError:
            self._link.ended = True  # the reader sees it, too
            return
        if done:
            self._sent.set()
        else:
            self._sent.clear()
            self._loop.add_writer(self._link.fileno(), self._flush_link)

    def _flush_link(self) -> None:
        try:
            done = self._link.flush()
        except OSError:
            done = True
        if done:
            self._sent.set()
            self._loop.remove_writer(self._link.fileno())

    # ---------------------------------------------------------------------------------------------- ending

    def died(self, death: Death) -> None:
        """As `LaneEnd`: what the process had sent goes first."""
        before = -1
        with contextlib.suppress(ValueError, OSError, RingMemoryError):
            while not self._channel.ended and self._channel.received != before:
                before = self._channel.received
                for kind, body in self._channel.receive():
                    self._pass_on(kind, body)
        self._send(partial(self._link.send, frames.DIED, pack_record(death)))
        self._leave_lane()

    def _leave_lane(self) -> None:
        """Let go of the process. The link stays until all is sent and the loader closes it."""
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()

    async def drain(self) -> None:
        """Take no more tasks, and wait until those in work are answered and sent."""
        self._draining = True
        self._idle.clear()
        if self._unanswered:
            await self._idle.wait()
        self._send(partial(self._link.send, frames.DRAINING))
        await self._sent.wait()
        self.close()

    def close(self) -> None:
        """End the lane. Idempotent."""
        self._leave_lane()
        self._idle.set()
        self._sent.set()
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
            self._link.close()
            self._rings.close()
            self._hold(0)
            self._ended()
