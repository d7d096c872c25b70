"""A pool's workers at a service: instead of starting a process, the pool connects to a node.

Data path: loader -> pool -> [remote_workers] -> connection -> node.

Connecting blocks, in threads that may wait (`connect.py`). An open worker connection is read by the pool's event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any

from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.peer_text import block_of, line_of
from asyncloader.base.process_hooks import in_forked_child
from asyncloader.errors import ServiceUnavailable, WorkerDied
from asyncloader.service.client.connect import NodeConnection, Search, Unreachable, on_any_node
from asyncloader.service.client.node_health import NodeHealth, node_order
from asyncloader.service.client.remote_channel import PassedChannel, RemoteChannel
from asyncloader.service.client.remote_dataset import RemoteDataset
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.address import Service
from asyncloader.service.protocol.connection import Link, shut_down
from asyncloader.service.protocol.handshake import Opened, pack_opening
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.service.protocol.records import DeathReport, read_record
from asyncloader.telemetry.counters import Recorder
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.ipc.channel import Channel, Watched
from asyncloader.workers.ipc.ring_manager import RingManager
from asyncloader.workers.message_codec import MessageCodec
from asyncloader.workers.source import WorkerHandle
from asyncloader.workers.stacks import Report

_log = logging.getLogger("asyncloader")

_MOST_THREADS = 16
_STANDS_S = 4.0
"""Seconds after which a connection with tasks counts as standing: its node has answered pings, or was given up."""
_MOST_REASON, _MOST_TRACE = 2000, 1 << 15  # characters of a node's report of a death


class ServiceWorkers(Search):
    """The workers of one loader at a service. See `WorkerSource`.

    Args:
        dataset: the remote dataset, with its service.
        credits: tasks that a worker may have outstanding, at most.
    """

    start_method = "service"
    ring_manager = RingManager

    def __init__(self, dataset: RemoteDataset, credits: int) -> None:
        super().__init__()
        self._dataset = dataset
        self._service: Service = dataset.service
        self._defined = dataset.defined
        self._credits = credits
        self._loader_name = secrets.token_hex(8)
        self._made: weakref.WeakSet[RemoteWorker] = weakref.WeakSet()
        self._next = 0
        self._chosen: dict[int, str] = {}  # by thread: the node that it tries first for the worker that it connects
        # Not less than `_STANDS_S`: before, no connection can be known to stand, and a slow node would be an error.
        self._progress = NodeHealth(max(_STANDS_S, dataset.service.wait))
        self._answers = 0  # of workers that have ended
        self._seen = 0  # all answers when `delivered_at` was last called
        self._delivered = 0.0  # when it last found more of them
        # Several threads connect at a time, while the loop's thread notes the ends of workers.
        self._lock = threading.Lock()

    def obstacle(self) -> str:
        """Return "": the nodes' definition does not change, so workers can be replaced."""
        return ""

    def make(self, workers: Iterable[int], setup: WorkerSetup) -> Generator[WorkerHandle]:
        """Connect these workers, all at a time.

        Raises:
            ServiceUnavailable: no node opened a worker connection in time, or each ends before any batch.
        """
        wanted = list(workers)
        # A connection takes some round trips, so many workers connect in threads; a single worker, as of a replacement,
        # needs none.
        if len(wanted) == 1:
            yield self._connect(wanted[0], setup)
            return
        with ThreadPoolExecutor(min(_MOST_THREADS, len(wanted)), "asyncloader-connect") as threads:
            # The block ends when all threads have ended: beside an error, each open connection is among the results.
            futures = [threads.submit(self._connect, worker, setup) for worker in wanted]
        failed = [error for future in futures if (error := future.exception()) is not None]
        made = [future.result() for future in futures if future.exception() is None]
        # With an error, or if the pool closes the generator early, the workers that it did not get are released.
        try:
            if failed:
                raise failed[0]
            while made:
                yield made.pop(0)
        finally:
            for worker in made:
                worker.release()

    def _connect(self, worker: int, setup: WorkerSetup) -> RemoteWorker:
        use = partial(self._open, worker=worker, setup=setup)
        try:
            return on_any_node(self._service, self._defined, use, self)
        finally:
            with self._lock:
                self._chosen.pop(threading.get_ident(), None)

    def order(self, addresses: Sequence[str]) -> Sequence[tuple[int, float]]:
        """Order the nodes by failures, and then by this loader's workers at them. See `Search`.

        Raises:
            ServiceUnavailable: for `Service.wait` seconds connections were made, and none delivered.
        """
        now = monotonic()
        with self._lock:
            turn = self._next
            self._next += 1
            there = Counter(worker.node for worker in self._made if not worker.released)
            # Workers that other threads connect at this moment count at the nodes that they try first.
            there.update(node for thread, node in self._chosen.items() if thread != threading.get_ident())
            stands = any(worker.works and now - worker.opened >= _STANDS_S for worker in self._made)
            problem = self._progress.problem(self._every_answer(), stands, now)
            failures = [self._progress.failures(each, now) for each in addresses]
            rests = [self._progress.rest(each, now) for each in addresses]
            if problem is not None:
                raise ServiceUnavailable(f"{self._service.url}: {problem}")
            order = node_order([there[each] for each in addresses], turn, failures)
            self._chosen.update({threading.get_ident(): addresses[number] for number in order[:1]})
        return [(number, rests[number]) for number in order]

    def _every_answer(self) -> int:
        # `counted` workers are in the first number already. The set is weak, so they may be in it or not.
        return self._answers + sum(worker.answers for worker in self._made if not worker.counted)

    def delivered_at(self) -> float:
        """Return when this loader's other workers last delivered, as seen by calls of this method."""
        with self._lock:
            every = self._every_answer()
            if every != self._seen:
                self._seen, self._delivered = every, monotonic()
            return self._delivered

    def refused(self, address: str, why: str) -> None:
        """Note that a node could not be used."""
        with self._lock:
            self._progress.refused(address, why)

    def _ended(self, worker: RemoteWorker, why: str) -> None:
        """Note that a worker has ended. `why` is empty if its task or this loader was the cause."""
        with self._lock:
            every = self._every_answer()
            if not worker.counted:
                worker.counted = True
                self._answers += worker.answers
            if why:
                figures = worker.opened, worker.tasks, worker.answers, every, monotonic()
                self._progress.lost(worker.node, why, *figures)

    def _open(self, node: NodeConnection, worker: int, setup: WorkerSetup) -> RemoteWorker:
        link = node.link
        difference = node.info.difference(self._dataset.info)
        if difference:  # a node that was started again, or one with another copy of the data
            raise Unreachable(f"{node.address}: {difference}: all nodes of a service need the same data", final=True)
        opening = pack_opening(self._loader_name, worker, self._credits, setup, catalog=self._dataset.catalog)
        link.send(frames.OPENING, opening)
        pid = read_record(Opened, node.answer(frames.OPENED)).pid
        made = RemoteWorker(worker, pid, node.address, link, self._ended)
        with self._lock:
            self._progress.connected(node.address)
            self._made.add(made)
            self._chosen.pop(threading.get_ident(), None)
        return made

    async def look(self, workers: Sequence[RemoteWorker], seconds: float) -> dict[int, Report]:
        """Report where the workers' processes can be looked at: their stacks stay on their machines."""
        del seconds
        return {
            worker.worker_id: Report("at its node", f"no stack: py-spy dump --pid {worker.pid} prints it at the node")
            for worker in workers
            if not worker.released
        }

    def end(self, workers: Sequence[RemoteWorker]) -> None:
        """Close the connections; the node ends the workers' tasks."""
        for worker in workers:
            worker.release()

    def hang_up(self, workers: Sequence[RemoteWorker]) -> None:
        """Shut the connections down, so that the loop's thread, in which they are used, sees their end."""
        for worker in workers:
            shut_down(worker.channel.sock)

    def close(self) -> None:
        """Let threads that look for a node stop."""
        self.closed.set()


_live: LiveObjects[RemoteWorker] = LiveObjects()


def _forget_all() -> None:
    """In a forked child: close its copies of all connections, which would keep them open after the loader's end."""
    for worker in _live:
        worker.release()


class RemoteWorker(Watched):
    """A logical worker at a node. See `WorkerHandle`."""

    def __init__(
        self, worker_id: int, pid: int, node: str, link: Link, on_end: Callable[[RemoteWorker, str], None]
    ) -> None:
        self.worker_id = worker_id
        self.pid = pid
        self.node = node
        self.place = f"pid {pid} at {node}"
        self.codec: MessageCodec = MSGPACK
        self.recorder = Recorder()
        self.ready = self.started = self.outside = self.lost = self.released = False
        self.saved_rng_state: bytes | None = None
        self.tasks = self.answers = self.outstanding = 0
        self.opened = monotonic()
        self.counted = False
        """Whether its answers are among those of workers that have ended."""
        self._on_end = on_end
        self.kill_reason = ""
        self._link = link
        # A node on this machine passes the socket of the worker's process with OPENED.
        self.channel: Any = self._take_channel() if link.fds else RemoteChannel(link)
        in_forked_child(_forget_all)
        # Last: another thread may fork at any moment, and the child releases all workers that it finds here.
        _live.add(self)

    @property
    def process(self) -> Any:
        """This object, in place of a process. An attribute would keep it, and the nodes, until a garbage collection."""
        return self

    def _take_channel(self) -> Channel:
        # The node is not trusted: its descriptor may be a file, a pipe, or a socket of another kind. Those would fail,
        # or block the loop, when the first task is sent.
        fd = self._link.fds.popleft()
        try:
            sock = socket.socket(fileno=fd)
        except OSError:  # it is no socket
            os.close(fd)
            raise
        try:
            if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
                raise ConnectionError(f"the node passed a socket of another kind: {sock.family!r}, {sock.type!r}")
            sock.getpeername()  # OSError: it is not connected
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        return PassedChannel(sock, self._link)

    @property
    def works(self) -> bool:
        """Whether its connection stands, and it has tasks."""
        return not (self.released or self.channel.ended) and self.outstanding > 0

    @property
    def death_fd(self) -> int:
        """A descriptor that is readable once the worker has ended, or its connection."""
        return int(self.channel.gone_fd)

    @property
    def alive(self) -> bool:
        """Whether the connection still stands, as far as this process knows."""
        if self.released or self.channel.ended:
            return False
        poll = select.poll()
        poll.register(self.death_fd, select.POLLIN)
        # Not POLLIN: an answer that was not read yet is no end.
        poll.register(self.channel.fileno(), getattr(select, "POLLRDHUP", 0))
        return not poll.poll(0)

    @property
    def left(self) -> bool:
        """Whether no other process can write to its ring: over a network none ever does."""
        return isinstance(self.channel, RemoteChannel)

    def dumps(self, value: Any) -> bytes:
        """Pack a value that is sent to it."""
        return MSGPACK.dumps(value)

    def death(self) -> WorkerDied:
        """Return the node's report of its end as an error. Without a report, the worker itself may be running."""
        death, why = self._death()
        self._on_end(self, why if self.lost else "")
        return death

    def _death(self) -> tuple[WorkerDied, str]:
        said, why = self.channel.death, self.channel.why
        if said is not None:
            try:
                death = read_record(DeathReport, said)
            except ValueError as error:
                why = str(error)
            else:
                # Lost is the connection only: the process did not carry out this worker's task, so no task is
                # suspected.
                self.lost = not (death.blamed or death.shared)
                self.outside = death.shared
                given = line_of(death.reason, _MOST_REASON)
                why = given if self.lost else self.kill_reason or given
                reason = why if why and why == self.kill_reason else f"It was at {self.node}. {why}".strip()
                trace = block_of(death.trace, _MOST_TRACE)
                return WorkerDied(self.worker_id, self.pid, death.exitcode, reason, "", trace), why
        self.lost = not self.kill_reason
        reason = self.kill_reason or f"It was at {self.node}, and {line_of(why)}."
        return WorkerDied(self.worker_id, self.pid, None, reason), why

    def distrust(self, error: ValueError) -> bool:
        """End the worker, whose answer cannot be read. Returns True: its tasks go to the worker that replaces it."""
        # The replacement may be at the same node, if it is the only node: `NodeHealth.problem` ends that.
        self.channel.distrust(line_of(str(error)))
        return True

    def kill_for(self, reason: str) -> None:
        """Have the node kill the process, if it carries out this worker's task. `reason` becomes part of the error."""
        self.kill_reason = f"It was at {self.node}. {reason}"
        with contextlib.suppress(ConnectionError):
            self._link.send(frames.KILL)

    def kill(self) -> None:
        """Shut the connection down. The pool then notices an end; `release` follows."""
        # Not closed: the event loop still watches the descriptor, whose number another socket could get.
        shut_down(self._link.sock)

    def request_stop(self) -> None:
        """Close the sending side; the node then ends the worker's tasks."""
        # Only this side: answers that are on their way can still be received.
        shut_down(self.channel.sock, socket.SHUT_WR)

    def release(self) -> None:
        """Close this side's descriptors. Idempotent."""
        if not self.released:
            self.released = True
            # Closed, and not shut down: a forked child calls this for its copies, and a shutdown would end its parent's
            # connections.
            self.channel.close()
            self._link.close()

    def __repr__(self) -> str:
        return f"<RemoteWorker {self.worker_id} at {self.node}>"
