"""One worker connection in a service's worker process: its socket, its queue of frames, and the set-up of its tasks.

Data path: node -> [hosted_connection: frames] -> worker_host -> [hosted_connection: frames] -> node or loader.

A loader that does not read its answers, or sends tasks faster than they are carried out, is not read from: each
connection's memory has bounds.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from asyncloader.errors import StateError
from asyncloader.service.protocol.definition import Defined, Made
from asyncloader.service.protocol.handshake import Opening
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.service.protocol.records import DatasetInfo
from asyncloader.service.protocol.shard_plan import check_shards
from asyncloader.telemetry.counters import Recorder
from asyncloader.workers.fetch.dataset_kinds import assigns_shards, is_async_dataset, is_async_stream
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.task_runner import TaskRunner
from asyncloader.workers.worker import AsyncTaskLoop

_COUNTS_S = 0.25  # between two messages with a worker's counts
_MOST_FRAME = (64 << 20) + 256  # a message's largest body, and the head of a frame
_MOST_QUEUED = 16 << 20  # bytes of a connection's frames, in either direction, and one frame more
_FRAME_BYTES = 200  # of memory that a queued frame takes besides its own bytes
_MOST_TASKS = 1 << 13  # of a connection on an event loop: twice the credits that a loader may have
_MOST_TASK_BYTES = 256 << 20  # bytes of their frames


class ConnectionOpening(NamedTuple):
    """A new connection.

    Attributes:
        number: the node's number for the connection, from 1.
        asked: the loader's request.
        info: the dataset's kind and length that the node gave the loader, which planned its epoch with them.
    """

    number: int
    asked: Opening
    info: DatasetInfo


class ConnectionChannel(Channel):
    """A channel whose `send_all` does not wait: one connection's reader must not hold up the others."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__(sock, _MOST_FRAME)
        self.recorder = Recorder()
        """The worker's counts, which are sent to the loader before an answer, every `_COUNTS_S` at most."""
        self.sent: Callable[[], None] | None = None
        """Called when all waiting frames were sent, or the loader has hung up; only with an event loop."""
        self._loop = loop  # sends waiting frames; None: the host does
        self._counts_due = 0.0

    def send_all(self, frame: bytes, fds: Any = ()) -> None:
        """Send a frame as far as the socket takes it; the rest follows later."""
        now = perf_counter()
        if now >= self._counts_due:
            self._counts_due = now + _COUNTS_S
            self.send(wire.pack(wire.COUNTS, self.recorder.packed()))
        if not self.send(frame, fds) and self._loop is not None:
            self._loop.add_writer(self.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            done = self.flush()
        except ConnectionError:  # the loader has hung up
            self.ended = done = True
        if done and self._loop is not None:
            self._loop.remove_writer(self.fileno())
            if self.sent is not None:
                self.sent()

    @property
    def full(self) -> bool:
        """Whether the queue of unsent frames is too long for another answer."""
        # A single descriptor fills it: each is of a segment with a batch of any size, which lives until it is sent.
        return self.unsent.fds > 0 or self.unsent.memory > _MOST_QUEUED

    def close(self) -> None:
        """Close the socket and drop unsent frames. Idempotent."""
        if self._loop is not None and self.fileno() >= 0:
            # Before the number is free: the loop knows sockets by their numbers, and the next socket may get this one.
            self._loop.remove_writer(self.fileno())
        self.sent = None
        super().close()


class HostedConnection:
    """A connection, with its frames that were not carried out yet.

    Args:
        opening: what the node says of it.
        channel: its socket.
        runner: carries out its tasks.
    """

    def __init__(self, opening: ConnectionOpening, channel: ConnectionChannel, runner: TaskRunner) -> None:
        self.number = opening.number
        self.loader = opening.asked.loader
        self.channel = channel
        self.runner = runner
        self.info = torch_worker._worker_info
        """The result of `torch.utils.data.get_worker_info` for its dataset."""
        self._frames: deque[tuple[int, bytes]] = deque()
        self._queued = 0  # bytes of them

    def receive(self) -> None:
        """Queue the frames that have come. Raises the errors of `Channel.receive`."""
        for frame in self.channel.receive():
            self._frames.append(frame)
            self._queued += len(frame[1]) + _FRAME_BYTES

    def take(self) -> tuple[int, bytes]:
        """Take the next frame, as kind and body, out of the queue."""
        kind, body = self._frames.popleft()
        self._queued -= len(body) + _FRAME_BYTES
        return kind, body

    @property
    def ready(self) -> bool:
        """Whether a frame can be carried out, and its answer be queued."""
        # A loader that does not read its batches holds up its own tasks only. The queue gets shorter as it reads, and
        # `_frames` gets shorter as they are carried out: neither needs a frame that was not read yet.
        return bool(self._frames) and not self.channel.full

    @property
    def events(self) -> int:
        """The events to poll for, besides the loader's hanging up, which is always reported."""
        reading = select.POLLIN if self._queued <= _MOST_QUEUED else 0
        return reading | (select.POLLOUT if self.channel.unsent else 0)


class ConnectionLoop(AsyncTaskLoop):
    """Carries out a connection's tasks on the loop that all connections share.

    Args:
        connection: the connection.
        failed: called with the error that ends it, and whether a task raised it, before its tasks have ended.
    """

    def __init__(self, connection: HostedConnection, failed: Callable[..., None]) -> None:
        super().__init__(connection.runner)
        self._channel = connection.channel
        self._channel.sent = self._sent
        self._failed = failed

    def _readable(self) -> None:
        # Until nothing is left: uvloop calls the reader of a socket whose other end was closed with bytes unread only
        # once, and the end comes behind the bytes.
        before = -1
        while self._channel.received != before and not (self._channel.full or self._done.done()):
            before = self._channel.received
            super()._readable()
        # A task on the loop begins when it is read. So a loader that does not read its batches is not read from, until
        # `_sent` is called: its answers would fill the memory.
        if self._channel.full:
            self._loop.remove_reader(self._channel.fileno())

    def _sent(self) -> None:
        if self._channel.ended:
            self._end(None)
        elif not self._done.done():
            self._loop.add_reader(self._channel.fileno(), self._readable)

    def _take(self, kind: int, body: bytes) -> None:
        # Tasks in progress need a bound of their own: a dataset that waits for a store answers none for a while. The
        # sum is computed for large frames only: the small ones take 256 MiB together at most, by their number.
        large = len(body) > 1 << 15 and sum(self._tasks.values()) > _MOST_TASK_BYTES
        if kind == wire.TASK and (large or len(self._tasks) >= _MOST_TASKS):
            raise ValueError(f"broken stream: a loader has {len(self._tasks)} tasks or their bytes at one worker")
        super()._take(kind, body)

    def _end(self, error: BaseException | None, *, at_task: bool = False) -> None:
        # Now, not when `run` raises: that waits for the cancelled tasks, which may take long, and the loader waits for
        # this report.
        if error is not None and not self._done.done():
            self._failed(error, at_task=at_task)
        super()._end(error)


class ConnectionSetup(NamedTuple):
    """A connection's set-up, with the process's dataset, or None for one of its own."""

    opening: ConnectionOpening
    defined: Defined
    made: Made | None
    count_samples: Callable[[], Awaitable[Any]]
    """Counts the samples of fixed streams, once for all connections; returns a dataset that knows them."""

    def load(self) -> WorkerSetup:
        """Return the worker's set-up.

        Raises:
            StateError: the dataset is not the one of which the node has told the loader.
            The errors of the definition.
        """
        # Another connection's info may be set. A dataset's length may depend on it, and the node's `DatasetInfo`, which
        # is compared below, was taken without any.
        torch_worker._worker_info = None
        dataset, functions = self.made or self.defined.make()
        # The stored data may have changed since the node's first process was started.
        difference = dataset_info_of(dataset).difference(self.opening.info)
        if difference:
            raise StateError(
                f"process {os.getpid()} of the node: {difference}. What is stored has changed since the node was "
                "started: start it again, and make a new loader"
            )
        asked = self.opening.asked
        collate_fn, seeded = functions.get("collate_fn"), asked.setup.seeded
        assert seeded is not None  # a service serves seeded loaders only
        if (catalog := asked.catalog) is not None:
            find = partial(dataset.fingerprint, catalog.workers, catalog.ranks)
            if catalog.batch:
                dataset = dataset.fixed_streams(seeded.seed)
                find = partial(self._plan_streams, dataset, catalog.batch)
            check_shards(dataset, find, catalog)
        return asked.setup._replace(
            dataset=dataset,
            # As a list with an entry for each worker up to this one: `TaskRunner` takes the entry of its number.
            starts=[MSGPACK.load_start(asked.start)] * (asked.worker + 1),
            worker_init_fn=functions.get("worker_init_fn"),
            decode=functions.get("decode"),
            collate_fn=collate_fn or asked.setup.collate_fn,
            seeded=seeded._replace(seed_collate=collate_fn is not None),
        )

    async def _plan_streams(self, fixed: Any, batch: int) -> Any:
        """Plan fixed streams. Returns the fingerprint of their shards and samples."""
        fixed.source.take_counts(await self.count_samples())
        await fixed.plan_streams(batch)
        return fixed.described()["shards"]


def dataset_info_of(dataset: Any) -> DatasetInfo:
    """Look at a dataset: its kind and length are the only things of it that a loader plans an epoch with."""
    iterable, problem = isinstance(dataset, IterableDataset) or is_async_stream(dataset), ""
    if assigns_shards(dataset):  # its length would cost a look into each of its shards
        buffer, streams = getattr(dataset, "shuffle_buffer", 0), getattr(dataset, "streams", None)
        fixed = streams, streams is not None and bool(getattr(dataset, "shuffle_shards", False))
        return DatasetInfo(True, None, True, is_stateful(dataset), buffer, problem, *fixed)
    try:
        length = len(dataset)  # pyright: ignore[reportArgumentType] - or the error says that it has none
    except (TypeError, NotImplementedError):  # the two ways in which datasets say that they have none
        length = None
    if hasattr(type(dataset), "fixed_streams") or (iterable and getattr(dataset, "loader_streams", None) is not None):
        why = "whose order the loader computes from its parts" if not iterable else "which has loader_streams"
        problem = (
            f"a service cannot read a {type(dataset).__name__}, {why}: leave out workers=, so that workers of the "
            "trainer's machine read it"
        )
    elif not iterable and length is None:
        problem = f"{type(dataset).__name__} has no length, without which no order can be made of its samples"
    return DatasetInfo(iterable, length, is_async_dataset(dataset), is_stateful(dataset), None, problem)
