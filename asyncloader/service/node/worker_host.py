"""The main function of a service's worker process: carries out the tasks of several worker connections.

Data path: node -> connection -> [worker_host: fetch -> collate -> slot] -> connection -> node or loader.

A connection is one logical worker of one loader: a socket, with a `TaskRunner` behind it. Connections to a blocking
dataset take turns, task by task. Those to an asynchronous dataset, or to one that is read in threads, share an event
loop. A connection ends with its socket, or on STOP. One that ends for any other reason, of the dataset or of this
process, is reported to the node, so that its loader goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import select
import socket
from contextvars import ContextVar, copy_context
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker as torch_worker

from asyncloader.base.peer_text import line_of
from asyncloader.service.node.hosted_connection import (
    ConnectionChannel,
    ConnectionLoop,
    ConnectionOpening,
    ConnectionSetup,
    HostedConnection,
    dataset_info_of,
)
from asyncloader.service.protocol.definition import Defined, Made, PickledDefinition, load_definition
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.service.protocol.records import DatasetInfo, pack_record
from asyncloader.service.protocol.shard_plan import Plan, PlanRequest, make_plan
from asyncloader.telemetry.counters import CONNECTION_KEY, Recorder
from asyncloader.workers.fetch.seeding import GlobalDrawCheck
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.task_runner import TaskRunner
from asyncloader.workers.worker import serve_async, tune

DATASET_INFO, OPEN, PLAN, PLANNED, NOT_MADE, ENDED = 40, 41, 42, 43, 44, 45
"""Frames between the node and its process, pickled, as both are processes of the node: a `DatasetInfo`; a
`ConnectionOpening`, with the connection's socket; a number and a `PlanRequest`; this number with the packed
`Plan`; the reason why the dataset could not be made, as text; a `ConnectionEnding`."""
MOST_PROBLEM = 1500
"""Characters of that reason, at most."""

_MOST_REASON = 2000  # characters


class ConnectionEnding(NamedTuple):
    """The end of a connection that its loader did not ask for. The process lives on."""

    number: int
    reason: str
    at_task: bool


class HostSetup(NamedTuple):
    """The main function of a process of the service, with its arguments.

    Attributes:
        target: the definition's name, as ``module:name``.
        arguments: the definition's.
        threads: whether connections read a blocking dataset in threads (`concurrency`).
        data: the pickled definition, if an engine sent it; None: it is imported.
        fingerprint: of the definition that the node has imported; empty if it was sent.
    """

    target: str
    arguments: dict[str, Any]
    threads: bool = False
    data: bytes | None = None
    fingerprint: str = ""

    def run(self, channel: Channel, recorder: Recorder, entered: float) -> None:
        """Serve connections until the node ends this process. Raises the errors of its channel."""
        recorder.time("start_import", perf_counter() - entered)
        began = perf_counter()
        torch.multiprocessing._set_thread_name("asyncloader_lane")
        torch.set_num_threads(1)
        try:
            definition = load_definition(self.target) if self.data is None else PickledDefinition(self.data)
            if self.fingerprint:  # files may have been changed since the node imported them
                definition.check(self.fingerprint, "in the node")
            defined = Defined(definition, self.arguments)
            made = defined.make()
            info = dataset_info_of(made.dataset)
            host = _Host(channel, recorder, defined, made, info)
        except (Exception, SystemExit) as error:  # of the user's module: an import may call `sys.exit`
            text = line_of(f"{self.target} raised {type(error).__name__}: {error}", MOST_PROBLEM)
            channel.send_all(wire.pack(NOT_MADE, pickle.dumps(text)))
            return  # the process exits, and the node starts another after a pause
        recorder.time("start_dataset", perf_counter() - began)
        channel.send_all(wire.pack(DATASET_INFO, pickle.dumps(info)))
        if info.problem:
            # Until the node ends this process: an exit would count as a death.
            channel.receive(wait=True)
            return
        concurrent = info.asynchronous or self.threads
        tune(concurrent=concurrent)
        if concurrent:
            serve_async(host.run_async)
        else:
            host.run()


class _Host:
    def __init__(self, channel: Channel, recorder: Recorder, defined: Defined, made: Made, info: DatasetInfo) -> None:
        self._channel = channel
        self._recorder = recorder
        self._defined = defined
        self._made = made
        self._fresh = True  # `made` was given to no connection yet
        # Samples of a blocking map dataset depend on nothing but their index, so all connections read one copy. Any
        # other dataset may keep a position, or connections of an event loop.
        self._shared = not (info.iterable or info.asynchronous or info.stateful)
        self._connections: dict[int, HostedConnection] = {}  # by descriptor
        self._used: dict[str, float] = {}  # seconds of each loader that has connections here
        self._draw_check = GlobalDrawCheck()  # of all connections: they share the process's generators
        self._planning: Any = None  # a dataset that no connection reads: it makes plans of any number of workers
        self._counting = asyncio.Lock()
        self._plans: list[tuple[int, PlanRequest]] = []  # requests of the node
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    # ------------------------------------------------------------------------------------------- connections

    def _control(self) -> list[HostedConnection]:
        """Read the process's own channel. Returns the new connections."""
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

    def _open(self, opening: ConnectionOpening) -> HostedConnection | None:
        channel: ConnectionChannel | None = None
        runner: TaskRunner | None = None
        try:
            sock = socket.socket(fileno=self._channel.take_fd())
            sock.setblocking(False)
            # As for a task: `worker_init_fn` and a dataset of its own may hang, or end the process.
            self._recorder.put(CONNECTION_KEY, opening.number)
            channel = ConnectionChannel(sock, self._loop)
            # The first connection reads the process's own copy, which was made to look at it: it is as good as new.
            made = self._made if self._shared or self._fresh else None
            self._fresh = False
            setup = ConnectionSetup(opening, self._defined, made, self._count_samples)
            runner = TaskRunner(
                opening.asked.worker, channel, setup, channel.recorder, perf_counter(), MSGPACK, self._draw_check
            )
        except Exception as error:  # the other connections go on
            self._report(opening.number, error, at_task=False)
            if channel is not None:
                channel.close()
        # Not after a SystemExit, which ends this process: the node still reads whose it was.
        self._recorder.put(CONNECTION_KEY, 0)
        if channel is None or runner is None:
            return None
        connection = HostedConnection(opening, channel, runner)
        self._add(connection)
        return connection

    def _report(self, number: int, error: BaseException, *, at_task: bool) -> None:
        """Report the error that ended a connection to the node, unless the loader hung up."""
        # The node would learn of a death from the pidfd, but this process lives.
        if isinstance(error, ConnectionError):
            return
        kind = type(error).__name__
        try:
            reason = f"{kind}: {error}"
        except Exception:  # the `__str__` of a user's error
            reason = kind
        reason = f"Its worker failed, and its process lives on. {reason[:_MOST_REASON]}"
        ending = ConnectionEnding(number, reason, at_task)
        with contextlib.suppress(ConnectionError):  # the node has died, which ends this process
            self._channel.send_all(wire.pack(ENDED, pickle.dumps(ending)))

    def _add(self, connection: HostedConnection) -> None:
        # A new loader begins with the time of the loader that had the least. From zero it would have all turns until it
        # had caught up with loaders that have read for hours.
        self._used.setdefault(connection.loader, min(self._used.values(), default=0.0))
        self._connections[connection.channel.fileno()] = connection

    def _close(self, connection: HostedConnection) -> None:
        # Before the channel is closed, after which it has no number.
        self._connections.pop(connection.channel.fileno(), None)
        connection.channel.close()
        connection.runner.release()
        if torch_worker._worker_info is connection.info:
            torch_worker._worker_info = None  # it refers to the connection's dataset
        if all(other.loader != connection.loader for other in self._connections.values()):
            self._used.pop(connection.loader, None)

    # ------------------------------------------------------------------------------------------- blocking

    def run(self) -> None:
        """Carry out the connections' frames, one after the other."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while not self._ended:
            # Sockets are looked at between any two tasks, so that a new loader waits for one task at most.
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
                poll.unregister(connection.channel.fileno())  # while it has its number
                self._close(connection)
            for connection in self._connections.values():
                poll.modify(connection.channel.fileno(), connection.events)

    def _next(self) -> HostedConnection | None:
        """The connection whose turn it is: of those with work, one of the loader that has had the least time."""
        ready = [connection for connection in self._connections.values() if connection.ready]
        return min(ready, key=lambda connection: self._used[connection.loader], default=None)

    def _exchange(self, connection: HostedConnection, events: int) -> None:
        """Send waiting frames, and read the connection's socket if it is readable."""
        try:
            connection.channel.flush()
            if not events & select.POLLIN:
                # POLLHUP or POLLERR alone: the loader has hung up while its queue was too long to be read. Its queued
                # tasks are dropped, as no one would read their answers.
                connection.channel.ended = connection.channel.ended or bool(events & ~select.POLLOUT)
                return
            connection.receive()
        except ConnectionError:
            connection.channel.ended = True
        except Exception as error:
            self._fail(connection, error, at_task=False)

    def _fail(self, connection: HostedConnection, error: BaseException, *, at_task: bool) -> None:
        """End this connection, and report why."""
        if not connection.channel.ended:  # reported before, or the loader has hung up
            self._report(connection.number, error, at_task=at_task)
        connection.channel.ended = True

    def _carry_out(self, connection: HostedConnection) -> None:
        kind, body = connection.take()
        torch_worker._worker_info = connection.info
        began = perf_counter()
        # In memory that the node reads: if this process dies now, the node knows at which task, and blames no other
        # loader.
        self._recorder.put(CONNECTION_KEY, connection.number)
        try:
            if kind == wire.TASK:
                connection.runner.task(body)
            else:
                connection.runner.control(kind, body)
        except Exception as error:  # the loader has hung up or sent a broken frame, or the dataset is at fault
            self._fail(connection, error, at_task=kind == wire.TASK)
        # Of several streams, it is the info of the one that was read last.
        connection.info = torch_worker._worker_info
        # Also after an error: a number that stays means a task that does not end, for which the node kills the process
        # some time after that connection was closed.
        self._recorder.put(CONNECTION_KEY, 0)
        seconds = perf_counter() - began
        self._used[connection.loader] += seconds
        if kind == wire.TASK:
            self._recorder.time("fetch", seconds)

    # ------------------------------------------------------------------------------------------- asynchronous

    async def run_async(self) -> None:
        """Carry out the tasks of all connections on one loop."""
        loop = self._loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        current: Any = _CurrentInfo()

        def readable() -> None:
            opened = self._control()
            torch_worker._worker_info = current  # each new connection has replaced it by its own
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
                # Each connection's loop notices its socket's end, cancels its tasks, and closes the dataset's context.
                for connection in self._connections.values():
                    connection.runner.stopped = True
                    connection.channel.sock.shutdown(socket.SHUT_RDWR)

    async def _plan(self, number: int, request: PlanRequest) -> None:
        try:
            plan = await make_plan(self._planner(), request)
        except Exception as error:
            plan = Plan("", [], [], None, 0.0, MSGPACK.dump_error(error, 0))
        self._channel.send_all(wire.pack(PLANNED, pickle.dumps((number, pack_record(plan)))))

    def _planner(self) -> Any:
        if self._planning is None:
            # Outside of any worker, as the process's own was made: there is no info of a connection here.
            current, torch_worker._worker_info = torch_worker._worker_info, None
            try:
                self._planning = self._defined.make().dataset
            finally:
                torch_worker._worker_info = current
        return self._planning

    async def _count_samples(self) -> Any:
        async with self._counting:  # once, however many connections need it
            await self._planner().counted()
        return self._planning

    async def _run_connection(self, connection: HostedConnection) -> None:
        try:
            await ConnectionLoop(connection, partial(self._fail, connection)).run()
        except Exception:  # was reported by `ConnectionLoop`; the other connections go on
            connection.channel.ended = True
        finally:
            self._close(connection)


_info: ContextVar[Any] = ContextVar("asyncloader_worker_info", default=None)


class _CurrentInfo:
    """The result of `torch.utils.data.get_worker_info` where connections share a loop: the current connection's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_info.get(), name)
