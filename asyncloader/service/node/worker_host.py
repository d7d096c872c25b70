"""The main function of a service's worker process: carries out the tasks of several logical workers.

Data path: node -> connection -> [worker_host: fetch -> collate -> slot] -> connection -> node or loader.

A *connection* is one logical worker of one loader: a socket, with a `TaskRunner` behind it. A process has any number of
them. Those of a blocking dataset take turns, task by task: next is a connection of the loader that has had the least
time.
Those of an asynchronous dataset, or of one that is read in threads, run on one event loop.

A blocking map dataset, whose samples depend on nothing but their index, is made once and shared by all connections. Any
other is made for each connection, because it may keep a position, or open connections.

The node opens connections, over the process's own channel. A connection ends with its socket, or on STOP. One that
ends for any other reason, of the dataset's or of this process's, is reported to the node, so that its loader goes on
elsewhere.

*What a connection holds is bounded.* A loader that sends more than its process carries out, or does not read what was
made, holds up itself: nothing is read from its connection, or none of its tasks is carried out, until its queues are
shorter. Both
get shorter without a frame that was not read: by carrying frames out, or by the loader that reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import socket
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker as torch_worker

from asyncloader.errors import StateError
from asyncloader.service.definition import Defined, Made, load_definition
from asyncloader.service.node.dataset_info import dataset_info_of
from asyncloader.service.pickled import PickledDefinition
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.service.protocol.records import DatasetInfo
from asyncloader.service.protocol.shard_plan import Catalog, PlanRequest, finding, planned
from asyncloader.telemetry.counters import CONNECTION_KEY, Recorder
from asyncloader.workers.fetch.seeding import GlobalDrawCheck
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.ipc.peer_text import line_of
from asyncloader.workers.task_runner import TaskRunner
from asyncloader.workers.worker import AsyncTaskLoop, serve_async, tune

DATASET_INFO, OPEN, PLAN, PLANNED, NOT_MADE, ENDED = 40, 41, 42, 43, 44, 45
"""Frames between the node and its process, all pickled, as both are the node's own: what the dataset is; a new
connection, whose socket comes with the frame; a number and a `PlanRequest`; this number with the `Plan`, or an error
as bytes; why there is no dataset, as text; a `ConnectionEnding`."""
MOST_PROBLEM = 1500
"""Characters of the text that says why there is no dataset, at most."""

_COUNTS_S = 0.25
_MOST_FRAME = (64 << 20) + 256  # a message's largest body, and the head of a frame
_MOST_QUEUED = 16 << 20  # bytes of a connection's frames, in either direction; one frame more, if it is that large
_FRAME_BYTES = 200  # that a frame takes in a queue besides its own
_MOST_TASKS = 1 << 13  # of a connection on the event loop: twice the credits that a loader may have
_MOST_TASK_BYTES = 256 << 20  # of their frames
_MOST_REASON = 2000  # characters


class ConnectionOpening(NamedTuple):
    """A new connection.

    Attributes:
        number: the node's number for it, from 1.
        loader: the loader that it belongs to.
        worker: its number among the loader's workers.
        setup: the loader's options, without dataset and functions.
        catalog: the shards that the loader assigns; None: of no such dataset.
        start: where it begins: an `EpochStart`, packed by the loader and not read by the node.
        info: what the loader's node says of the dataset, with which it has planned.
    """

    number: int
    loader: str
    worker: int
    setup: WorkerSetup
    catalog: Catalog | None
    start: bytes
    info: DatasetInfo


class ConnectionEnding(NamedTuple):
    """The end of a connection, at one of its tasks or not, whose loader did not ask for it. The process lives on."""

    number: int
    reason: str
    at_task: bool


class HostSetup(NamedTuple):
    """What a process of the service is started with.

    Attributes:
        target: names the definition.
        arguments: the definition's.
        threads: whether its connections read a blocking dataset in threads (`concurrency`).
        data: the definition itself, where an engine sent it; None: it is imported.
        fingerprint: of the definition that the node has imported; empty: it was sent.
    """

    target: str
    arguments: dict[str, Any]
    threads: bool = False
    data: bytes | None = None
    fingerprint: str = ""

    def run(self, channel: Channel, recorder: Recorder, entered: float) -> None:
        """Serve connections until the node ends this process. Raises what its channel raises."""
        recorder.time("start_import", perf_counter() - entered)
        began = perf_counter()
        torch.multiprocessing._set_thread_name("asyncloader_lane")
        torch.set_num_threads(1)
        try:
            definition = load_definition(self.target) if self.data is None else PickledDefinition(self.data)
            if self.fingerprint:  # the files may have been changed since the node was started
                definition.check(self.fingerprint, "in the node")
            defined = Defined(definition, self.arguments)
            made = defined.make()
            info = dataset_info_of(made.dataset)
            host = _Host(channel, recorder, defined, made, info)
        except (Exception, SystemExit) as error:
            text = line_of(f"{self.target} raised {type(error).__name__}: {error}", MOST_PROBLEM)
            channel.send_all(wire.pack(NOT_MADE, pickle.dumps(text)))
            return  # the node starts another process in a while
        recorder.time("start_dataset", perf_counter() - began)
        channel.send_all(wire.pack(DATASET_INFO, pickle.dumps(info)))
        if info.problem:
            channel.receive(wait=True)  # until the node ends this process
            return
        concurrent = info.asynchronous or self.threads
        tune(concurrent=concurrent)
        if concurrent:
            serve_async(host.run_async)
        else:
            host.run()


class _ConnectionChannel(Channel):
    """A channel whose `send_all` does not wait: one connection's reader must not hold up the others."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__(sock, _MOST_FRAME)
        self.recorder = Recorder()
        """What this connection's worker counts. The loader gets it now and then, before an answer."""
        self.sent: Callable[[], None] | None = None
        """Called when all is sent that had to wait, or the loader is gone; only with an event loop."""
        self._loop = loop  # sends the rest; None: the host does
        self._counts_due = 0.0

    def send_all(self, frame: bytes, fds: Any = ()) -> None:
        """Send what the socket takes; the rest follows when it takes more."""
        now = perf_counter()
        if now >= self._counts_due:
            self._counts_due = now + _COUNTS_S
            self.send(wire.pack(wire.COUNTS, self.recorder.packed()))
        if not self.send(frame, fds) and self._loop is not None:
            self._loop.add_writer(self.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            done = self.flush()
        except ConnectionError:  # the loader is gone
            self.ended = done = True
        if done and self._loop is not None:
            self._loop.remove_writer(self.fileno())
            if self.sent is not None:
                self.sent()

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that nothing may be added. A segment counts as much, whatever its size."""
        return self.unsent_fds > 0 or self.unsent_memory > _MOST_QUEUED

    def close(self) -> None:
        """As `Channel.close`."""
        if self._loop is not None and self.fileno() >= 0:
            self._loop.remove_writer(self.fileno())  # or the loop would keep it for another socket of that number
        self.sent = None
        super().close()


class _Connection:
    def __init__(self, opening: ConnectionOpening, channel: _ConnectionChannel, runner: TaskRunner) -> None:
        self.number = opening.number
        self.loader = opening.loader
        self.channel = channel
        self.runner = runner
        self.frames: deque[tuple[int, bytes]] = deque()
        self.queued = 0  # bytes of them
        self.info = torch_worker._worker_info

    @property
    def ready(self) -> bool:
        """Whether it has something to do, and its loader reads what it is sent."""
        return bool(self.frames) and not self.channel.full

    @property
    def events(self) -> int:
        """What the host waits for. That the loader hangs up is reported in any case."""
        reading = select.POLLIN if self.queued <= _MOST_QUEUED else 0
        return reading | (select.POLLOUT if self.channel.unsent_bytes else 0)


class _ConnectionLoop(AsyncTaskLoop):
    """Carries out a connection's tasks on the shared loop. `failed` is called before its tasks have ended."""

    def __init__(self, connection: _Connection, failed: Callable[..., None]) -> None:
        super().__init__(connection.runner)
        self._channel = connection.channel
        self._channel.sent = self._sent
        self._failed = failed

    def _readable(self) -> None:
        super()._readable()
        if self._channel.full:
            self._loop.remove_reader(self._channel.fileno())

    def _sent(self) -> None:
        if self._channel.ended:
            self._end(None)
        elif not self._done.done():
            self._loop.add_reader(self._channel.fileno(), self._readable)

    def _take(self, kind: int, body: bytes) -> None:
        large = len(body) > 1 << 15 and sum(self._tasks.values()) > _MOST_TASK_BYTES
        if kind == wire.TASK and (large or len(self._tasks) >= _MOST_TASKS):
            raise ValueError(f"broken stream: a loader has {len(self._tasks)} tasks or their bytes at one worker")
        super()._take(kind, body)

    def _end(self, error: BaseException | None, *, at_task: bool = False) -> None:
        if error is not None and not self._done.done():
            self._failed(error, at_task=at_task)
        super()._end(error)


class _ConnectionSetup(NamedTuple):
    """A connection's set-up, with the process's dataset or one of its own."""

    opening: ConnectionOpening
    defined: Defined
    made: Made | None

    def load(self) -> WorkerSetup:
        # Another connection's may be set, and a dataset's length may depend on it: the node's was taken without any.
        torch_worker._worker_info = None
        dataset, functions = self.made or self.defined.make()
        # What is stored may have changed since the node's first process was started.
        difference = dataset_info_of(dataset).difference(self.opening.info)
        if difference:
            raise StateError(
                f"process {os.getpid()} of the node: {difference}. What is stored has changed since the node was "
                "started: start it again, and make a new loader"
            )
        collate_fn, seeded = functions.get("collate_fn"), self.opening.setup.seeded
        init = functions.get("worker_init_fn")
        assert seeded is not None  # a service serves seeded loaders only
        return self.opening.setup._replace(
            dataset=dataset,
            starts=[MSGPACK.load_start(self.opening.start)] * (self.opening.worker + 1),
            worker_init_fn=init if self.opening.catalog is None else finding(dataset, self.opening.catalog, init),
            decode=functions.get("decode"),
            collate_fn=collate_fn or self.opening.setup.collate_fn,
            seeded=seeded._replace(seed_collate=collate_fn is not None),
        )


class _Host:
    def __init__(self, channel: Channel, recorder: Recorder, defined: Defined, made: Made, info: DatasetInfo) -> None:
        self._channel = channel
        self._recorder = recorder
        self._defined = defined
        self._made = made
        self._fresh = True  # `made` was given to no connection yet
        self._shared = not (info.iterable or info.asynchronous or info.stateful)
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._used: dict[str, float] = {}  # seconds of each loader that has connections here
        self._draw_check = GlobalDrawCheck()  # one for all connections: they share the generators
        self._planning: Any = None  # a dataset that no connection has: it makes plans of any number of workers
        self._plans: list[tuple[int, PlanRequest]] = []  # that the node has asked for
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    # ------------------------------------------------------------------------------------------- connections

    def _control(self) -> list[_Connection]:
        """Read the process's own channel. Returns the connections that are new."""
        opened = []
        for kind, body in self._channel.receive():
            if kind == wire.STOP:
                self._ended = True
            elif kind == OPEN:
                connection = self._open(pickle.loads(body))
                if connection is not None:
                    opened.append(connection)
            elif kind == PLAN:
                self._plans.append(pickle.loads(body))
        self._ended = self._ended or self._channel.ended
        return opened

    def _open(self, opening: ConnectionOpening) -> _Connection | None:
        channel: _ConnectionChannel | None = None
        try:
            sock = socket.socket(fileno=self._channel.take_fd())
            sock.setblocking(False)
            channel = _ConnectionChannel(sock, self._loop)
            made = self._made if self._shared or self._fresh else None
            self._fresh = False
            setup = _ConnectionSetup(opening, self._defined, made)
            runner = TaskRunner(
                opening.worker, channel, setup, channel.recorder, perf_counter(), MSGPACK, self._draw_check
            )
        except Exception as error:  # the other connections go on
            self._report(opening.number, error, at_task=False)
            if channel is not None:
                channel.close()
            return None
        connection = _Connection(opening, channel, runner)
        self._add(connection)
        return connection

    def _report(self, number: int, error: BaseException, *, at_task: bool) -> None:
        """Tell the node what ended a connection, unless its loader did: the process lives, so nothing else would."""
        if isinstance(error, ConnectionError):
            return
        kind = type(error).__name__
        try:
            reason = f"{kind}: {error}"
        except Exception:
            reason = kind
        reason = f"Its worker failed, and its process lives on. {reason[:_MOST_REASON]}"
        ending = ConnectionEnding(number, reason, at_task)
        with contextlib.suppress(ConnectionError):  # the node is gone, which ends this process
            self._channel.send_all(wire.pack(ENDED, pickle.dumps(ending)))

    def _add(self, connection: _Connection) -> None:
        # A loader that comes late does not get the time that it was not there for.
        self._used.setdefault(connection.loader, min(self._used.values(), default=0.0))
        self._connections[connection.channel.fileno()] = connection

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.channel.fileno(), None)
        connection.channel.close()
        connection.runner.release()
        if torch_worker._worker_info is connection.info:
            torch_worker._worker_info = None  # it has the connection's dataset
        if all(other.loader != connection.loader for other in self._connections.values()):
            self._used.pop(connection.loader, None)

    # ------------------------------------------------------------------------------------------- blocking

    def run(self) -> None:
        """Carry out the connections' tasks, one after the other."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while not self._ended:
            busy = any(connection.ready for connection in self._connections.values())
            for fd, events in poll.poll(0 if busy else None):
                if fd == self._channel.fileno():
                    for connection in self._control():
                        poll.register(connection.channel.fileno(), connection.events)
                    continue
                self._exchange(self._connections[fd], events)
            following = self._next()
            if following is not None:
                self._carry_out(following)
            for connection in [
                each for each in self._connections.values() if each.channel.ended or each.runner.stopped
            ]:
                poll.unregister(connection.channel.fileno())
                self._close(connection)
            for connection in self._connections.values():
                poll.modify(connection.channel.fileno(), connection.events)

    def _next(self) -> _Connection | None:
        """The connection whose turn it is: of those with work, one of the loader that has had the least time."""
        ready = [connection for connection in self._connections.values() if connection.ready]
        return min(ready, key=lambda connection: self._used[connection.loader], default=None)

    def _exchange(self, connection: _Connection, events: int) -> None:
        """Send and receive what the connection's socket takes and has."""
        try:
            connection.channel.flush()
            if not events & select.POLLIN:
                # Perhaps the loader has hung up while nothing was read: nobody wants the answers to what is queued.
                connection.channel.ended = connection.channel.ended or bool(events & ~select.POLLOUT)
                return
            for frame in connection.channel.receive():
                connection.frames.append(frame)
                connection.queued += len(frame[1]) + _FRAME_BYTES
        except ConnectionError:
            connection.channel.ended = True
        except Exception as error:
            self._fail(connection, error, at_task=False)

    def _fail(self, connection: _Connection, error: BaseException, *, at_task: bool) -> None:
        """This connection cannot go on: the others do."""
        if not connection.channel.ended:
            self._report(connection.number, error, at_task=at_task)
        connection.channel.ended = True

    def _carry_out(self, connection: _Connection) -> None:
        kind, body = connection.frames.popleft()
        connection.queued -= len(body) + _FRAME_BYTES
        torch_worker._worker_info = connection.info
        began = perf_counter()
        self._recorder.put(CONNECTION_KEY, connection.number)
        try:
            if kind == wire.TASK:
                connection.runner.task(body)
            else:
                connection.runner.control(kind, body)
        except Exception as error:  # the loader is gone, or sent what is no frame of ours, or the dataset is at fault
            self._fail(connection, error, at_task=kind == wire.TASK)
        self._recorder.put(CONNECTION_KEY, 0)
        seconds = perf_counter() - began
        self._used[connection.loader] += seconds
        if kind == wire.TASK:
            self._recorder.time("fetch", seconds)

    # ------------------------------------------------------------------------------------------- asynchronous

    async def run_async(self) -> None:
        """Carry out the connections' tasks, all at a time."""
        loop = self._loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        current: Any = _CurrentInfo()

        def readable() -> None:
            opened = self._control()
            torch_worker._worker_info = current  # each new connection has put its own there
            for connection in opened:
                context = copy_context()
                context.run(_info.set, connection.info)
                group.create_task(self._run_connection(connection), context=context)
            while self._plans:
                group.create_task(self._plan(*self._plans.pop()))
            if self._ended and not done.done():
                done.set_result(None)

        async with asyncio.TaskGroup() as group:
            loop.add_reader(self._channel.fileno(), readable)
            try:
                await done
            finally:
                loop.remove_reader(self._channel.fileno())
                for connection in self._connections.values():
                    connection.runner.stopped = True
                    connection.channel.sock.shutdown(socket.SHUT_RDWR)

    async def _plan(self, number: int, request: PlanRequest) -> None:
        answer: Any
        try:
            if self._planning is None:
                self._planning = self._defined.make().dataset
            answer = await planned(self._planning, request)
        except Exception as error:
            answer = MSGPACK.dump_error(error, 0)
        self._channel.send_all(wire.pack(PLANNED, pickle.dumps((number, answer))))

    async def _run_connection(self, connection: _Connection) -> None:
        try:
            await _ConnectionLoop(connection, partial(self._fail, connection)).run()
        except Exception:  # as in `_carry_out`
            connection.channel.ended = True
        finally:
            self._close(connection)


_info: ContextVar[Any] = ContextVar("asyncloader_worker_info", default=None)


class _CurrentInfo:
    """What `torch.utils.data.get_worker_info` returns where connections share a loop: the current connection's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_info.get(), name)
