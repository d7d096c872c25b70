"""The node's side of its worker processes: starts them, opens worker connections in them, and replaces the dead.

Data path: node -> [worker_processes] -> worker_host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable, Generator, Sequence
from functools import partial
from math import inf
from typing import Any, TypeAlias

from asyncloader.base.bridge import in_thread
from asyncloader.base.peer_text import line_of
from asyncloader.service.node.admission import Refused
from asyncloader.service.node.hosted_connection import ConnectionOpening
from asyncloader.service.node.worker_connections import LocalConnection, RelayedConnection
from asyncloader.service.node.worker_host import (
    DATASET_INFO,
    ENDED,
    MOST_PROBLEM,
    NOT_MADE,
    OPEN,
    PLAN,
    PLANNED,
    ConnectionEnding,
    HostSetup,
)
from asyncloader.service.protocol.connection import flush_later
from asyncloader.service.protocol.handshake import Opening
from asyncloader.service.protocol.records import DatasetInfo, DeathReport
from asyncloader.service.protocol.shard_plan import PlanRequest
from asyncloader.telemetry.counters import CONNECTION_KEY, StageTimes, stage_times, total
from asyncloader.workers import shutdown
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import channel_pair
from asyncloader.workers.ipc.lifeline import Lifeline
from asyncloader.workers.process import WorkerProcess

_log = logging.getLogger("asyncloader")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0  # before a process is started again
_ABANDONED_S = 10.0  # for a process to end a task without a loader, or to exit without a dataset
_ALL_BEGUN_S = 60.0
"""Seconds that the first loaders wait until all processes have their dataset, once one has."""
_NONE_READY_S = 20.0
"""Seconds that a connection waits for a process: less than a loader waits for an answer."""
_FAILED_S = 60.0
"""Seconds in which a process gets no connections after one ended at no task, if there are other processes."""
_KILLED = "Its loader had it killed: it was at one task for too long."
_BUSY = "Its process was at the task of another worker connection."


WorkerConnection: TypeAlias = RelayedConnection | LocalConnection


class _Process:
    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.connections: dict[int, WorkerConnection] = {}
        self.plans: dict[int, asyncio.Future[Any]] = {}
        self.ready = False
        self.problem = ""
        """Why it could not make its dataset."""
        self.failed_at = -inf
        """When a connection last ended at no task: the process may be out of descriptors."""
        self.killed_for = 0
        """The connection for which the node killed it; 0: it did not."""


def _end_left_over(process: WorkerProcess) -> None:
    if not process.released:
        process.kill()


def _times(made: _Process) -> StageTimes:
    return stage_times(made.process.recorder.block, "fetch")


class HostProcesses:
    """The processes of one definition with one set of arguments.

    Args:
        setup: their main function.
        number: of processes.
        lasting: whether they are kept for the life of the node, as their arguments are not a loader's choice.
    """

    def __init__(self, setup: HostSetup, number: int, *, lasting: bool = True) -> None:
        self.lasting = lasting
        self.setup = setup
        self.number = number
        self.deaths = 0
        self._by = {"peer": f"processes of {setup.target}"}  # the log bounds the lines of each peer
        self._requests = 0  # numbers connections and plans; no number is used twice
        self._users = 0  # handshakes that are about to open a connection
        self._tasks_of_dead, self._busy_of_dead = 0, 0.0
        # Not "fork": a child would inherit the node's sockets, and locks that other threads hold.
        self._context = multiprocessing.get_context("forkserver")
        self._lifeline = Lifeline()
        self._processes: dict[int, _Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._info: DatasetInfo | None = None  # of the first process that had the dataset while no other had it
        self._news = asyncio.Event()  # set, and replaced by another, whenever a process has begun or failed
        self._begun: set[int] = set()  # processes that have had their dataset, or have failed, at least once
        self._waited_for_all = False
        self._closing = asyncio.Event()
        self.problem = ""
        """Why no process has the dataset: the newest failure, as one line; empty while one has, or may yet."""

    def start(self) -> None:
        """Start the processes, without waiting for them. Call it in the node's loop."""
        for number in range(self.number):
            self._keep(number)

    async def dataset_info(self, tries: int = 1) -> DatasetInfo:
        """Return the dataset's info as soon as one process has made it.

        Args:
            tries: processes that must have failed before it counts as a dataset that cannot be made at the moment.

        Raises:
            Refused: it cannot be made.
        """
        while not self.running and not (self._info is not None and self._info.problem):
            if self.problem and len(self._begun) >= tries:
                raise Refused(self.problem, for_now=True)
            await self._news.wait()
        assert self._info is not None
        return self._info

    async def begun(self) -> None:
        """Wait until each process has its dataset or has failed: the first time only, and `_ALL_BEGUN_S` at most."""
        # Otherwise the loaders that come first would all get the process that was ready first.
        await self._wait(lambda: len(self._begun) >= self.number or self._waited_for_all, _ALL_BEGUN_S)
        if not self._waited_for_all:
            self._waited_for_all = True
            self._notify()  # the loaders that wait here, too

    def _notify(self) -> None:
        """Wake up all coroutines that wait for a change."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _wait(self, over: Callable[[], bool], seconds: float) -> None:
        """Wait until this is so after a change, for some seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not over():
                    await self._news.wait()

    async def _ready_processes(self) -> list[_Process]:
        """Return the processes that have the dataset, at least one.

        Raises:
            Refused: no process has it, for too long.
        """
        # Awaits nothing after the check: a process cannot die before the caller uses it.
        await self._wait(lambda: bool(self.running or self.problem), _NONE_READY_S)
        if not self.running:
            late = f"no process of {self.setup.target} had made the dataset after {_NONE_READY_S:.0f} seconds"
            raise Refused(self.problem or late, for_now=True)
        return [each for each in self._processes.values() if each.ready]

    @property
    def running(self) -> int:
        """The number of processes that have the dataset."""
        return sum(each.ready for each in self._processes.values())

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Context in which a loader is about to open a connection, and the processes are not idle."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    @property
    def idle(self) -> bool:
        """Whether no loader has a connection, or is about to open one."""
        return not self._users and not any(each.connections for each in self._processes.values())

    @property
    def tasks(self) -> int:
        """The number of tasks carried out, of a blocking dataset."""
        return self._tasks_of_dead + sum(_times(each).number for each in self._processes.values())

    @property
    def busy(self) -> float:
        """The seconds that processes took for them."""
        return self._busy_of_dead + sum(_times(each).total for each in self._processes.values())

    def _keep(self, number: int, pause: float = 0.0) -> None:
        task = asyncio.get_running_loop().create_task(self._start(number, pause))
        self._tasks.add(task)  # the loop itself has weak references only
        task.add_done_callback(self._tasks.discard)

    async def _start(self, number: int, pause: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._closing.wait()  # a pause that `close` ends early
        if self._closing.is_set():
            return
        # In a thread: the fork server may have to be started first, and connections must go on.
        try:
            process = await in_thread(partial(self._make, number))
        except Exception as error:  # such as an EOFError, of a fork server that could not fork and exited
            why = f"{type(error).__name__}: {error}"
            self._start_later(number, f"{self.setup.target}: its process cannot be started: {why}", pause)
            return
        if self._closing.is_set():  # in the time that the start took
            await in_thread(partial(shutdown.run, [process]))
            return
        made = self._processes[number] = _Process(process)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.channel.fileno(), self._read, number, made)
        loop.add_reader(process.death_fd, self._died, number, made, pause)

    def _make(self, number: int) -> WorkerProcess:
        # The node's own: the process waits for it in a thread, and exits when the node has ended.
        pidfd = os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else None
        try:
            return WorkerProcess(self._context, number, self.setup, self._lifeline.fd, pidfd)
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def _read(self, number: int, made: _Process) -> None:
        for kind, body in made.process.channel.receive():
            if kind == DATASET_INFO:
                info: DatasetInfo = pickle.loads(body)
                # Not while another process has the dataset: its loaders have planned their epochs with its length.
                if self._info is None or not self.running:
                    self._info = info
                made.ready = not info.problem
                made.process.ready = True  # it reads requests: `close` asks it to end, and sends no SIGTERM at once
                if self.problem and made.ready:
                    self.problem = ""
                    _log.warning("%s is made now", self.setup.target, extra=self._by)
                self._begins(number)
            elif kind == NOT_MADE:
                made.problem = pickle.loads(body)
                # The process exits by itself, unless a thread that the dataset has left behind keeps it.
                asyncio.get_running_loop().call_later(_ABANDONED_S, _end_left_over, made.process)
            elif kind == PLANNED:
                asked, answer = pickle.loads(body)
                future = made.plans.pop(asked, None)
                if future is not None and not future.done():
                    future.set_result(answer)
            elif kind == ENDED:
                ending: ConnectionEnding = pickle.loads(body)
                # Taken out now: once its loader closes it, `close_connection` must not take the process for stuck.
                end = made.connections.pop(ending.number, None)
                if not ending.at_task:
                    made.failed_at = asyncio.get_running_loop().time()
                if end is not None:
                    end.died(
                        DeathReport(made.process.pid, None, ending.reason, "", blamed=ending.at_task, shared=False)
                    )
            elif kind == wire.LOG:
                level, text, _, _ = pickle.loads(body)
                _log.log(level, "%s", text, extra=self._by)
        if made.process.channel.ended:
            asyncio.get_running_loop().remove_reader(made.process.channel.fileno())

    def _begins(self, number: int) -> None:
        """Note that a process has its dataset, or has failed."""
        self._begun.add(number)
        self._notify()

    def _start_later(self, number: int, problem: str, pause: float) -> None:
        """Start a process again that could not make the dataset, after a longer pause than before."""
        pause = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause))
        if not self.running:  # else the dataset can be made, and loaders have processes
            self.problem = line_of(problem, MOST_PROBLEM)
        self._begins(number)
        if self._closing.is_set():
            return
        text = "process %d has no dataset, and tries again in %.1f s: %s"
        _log.warning(text, number, pause, problem, extra=self._by)
        self._keep(number, pause)

    def _died(self, number: int, made: _Process, pause: float) -> None:
        process = made.process
        # Frames that it sent before it died, such as its reason: the pidfd may be readable before they were read, and a
        # call of `_read` reads a part only.
        before = -1
        with contextlib.suppress(ValueError):  # a frame that was cut off
            while not process.channel.ended and process.channel.received != before:
                before = process.channel.received
                self._read(number, made)
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.death_fd)
        if process.channel.fileno() >= 0:
            loop.remove_reader(process.channel.fileno())
            loop.remove_writer(process.channel.fileno())
        error = process.death()
        # `_at` alone does not name the connection for which it was killed: it is 0 on a shared loop, and the process
        # may have begun another task between the decision and the signal.
        at = made.killed_for or self._at(made)
        self.deaths += not made.problem  # a process that reported why it has no dataset has exited by itself
        for connection, end in list(made.connections.items()):  # a copy: `died` takes the connection out
            # A death counts against a loader's task only if no other loader's could be the cause.
            blamed = connection == at or (not at and len(made.connections) == 1)
            # On a shared loop the task that ended the process is not known.
            shared = not at and len(made.connections) > 1 and self._asynchronous
            end.died(DeathReport(error.pid, error.exitcode, error.reason, error.trace, blamed, shared))
        for future in made.plans.values():
            if not future.done():
                future.set_exception(ConnectionError("the process that made the plan died"))
        times = _times(made)
        self._tasks_of_dead += times.number
        self._busy_of_dead += times.total
        del self._processes[number]
        # After `death`, which reads the stacks from a pipe that this closes.
        process.release()
        # A dataset with such a problem has it in each process: no other is started.
        if self._closing.is_set() or (self._info is not None and self._info.problem):
            return
        if made.ready:
            _log.warning("process %d of %s died and is replaced: %s", number, self.setup.target, error, extra=self._by)
            self._keep(number)
        else:
            died = f"{self.setup.target}: its process died before it had the dataset: {error}"
            self._start_later(number, made.problem or died, pause)

    @property
    def _asynchronous(self) -> bool:
        return self.setup.threads or (self._info is not None and self._info.asynchronous)

    # ---------------------------------------------------------------------------------------------- connections

    async def open(
        self, opening: Opening, info: DatasetInfo, make_end: Callable[[Any, int], WorkerConnection]
    ) -> tuple[int, int]:
        """Open a connection in the process with the fewest. Returns the connection's number, and the process's id.

        Args:
            opening: the loader's request.
            info: the dataset's info that the loader was given; a process that was started since may have another.
            make_end: makes the node's end, from the socket and the connection's number.

        Raises:
            Refused: no process has the dataset.
            ConnectionError: the process died.
        """
        # A process that has too few descriptors ends connections at once, so it would always have the fewest.
        healthy = asyncio.get_running_loop().time() - _FAILED_S
        made = min(await self._ready_processes(), key=lambda each: (each.failed_at > healthy, len(each.connections)))
        self._requests += 1
        number = self._requests
        ours, theirs = channel_pair()
        try:
            asked = ConnectionOpening(number, opening, info)
            # First: this raises if the process has closed its channel, and then there is no end of the node to close.
            self._ask(made, OPEN, asked, [theirs.fileno()])
            made.connections[number] = make_end(ours, number)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # the channel has a duplicate, if the frame has to wait
        return number, made.process.pid

    async def plan(self, request: PlanRequest) -> bytes:
        """Have a process make a plan. Returns a packed `Plan`.

        Raises:
            Refused: no process has the dataset.
            ConnectionError: the process died.
        """
        made = (await self._ready_processes())[0]
        self._requests += 1
        number = self._requests
        future = made.plans[number] = asyncio.get_running_loop().create_future()
        try:
            self._ask(made, PLAN, (number, request))
            plan: bytes = await future
            return plan
        finally:
            # Also when the handshake is cancelled: the process still answers, and `_read` drops that answer.
            made.plans.pop(number, None)

    def _ask(self, made: _Process, kind: int, request: Any, fds: Sequence[int] = ()) -> None:
        """Send a request to a process."""
        if not made.process.channel.send(wire.pack(kind, pickle.dumps(request)), fds):
            flush_later(asyncio.get_running_loop(), made.process.channel)

    def close_connection(self, number: int) -> None:
        """Note that the node's end of this connection is closed."""
        for made in self._processes.values():
            # The process cannot be asked to give up a blocking task. It has `_ABANDONED_S` to end it.
            if made.connections.pop(number, None) is not None and self._at(made) == number:
                asyncio.get_running_loop().call_later(_ABANDONED_S, self._end_abandoned, made, number)

    def _end_abandoned(self, made: _Process, number: int) -> None:
        """Kill a process that is still at the task of a closed connection: the other connections wait for it."""
        # Numbers are not used twice, so this is a task of the closed connection.
        if not made.process.released and self._at(made) == number:
            made.killed_for = number
            made.process.kill_for("It was at a task of a loader that is gone.")

    def _at(self, made: _Process) -> int:
        """The number of the connection whose task the process carries out; 0: of none, or of several."""
        # Read from memory that the process writes, so that it is right for a process that is stuck or dead, too.
        return int(total(made.process.recorder.block, CONNECTION_KEY))

    def kill(self, number: int) -> None:
        """Kill the process of this connection, because a task takes too long for its loader.

        A process that carries out another connection's task is not killed: this connection ends, and its loader goes
        elsewhere.
        """
        for made in self._processes.values():
            if number not in made.connections:
                continue
            # On a shared loop any of the tasks may block it.
            if self._at(made) == number or self._asynchronous:
                made.killed_for = number
                made.process.kill_for(_KILLED)
            else:
                report = DeathReport(made.process.pid, None, _BUSY, "", blamed=False, shared=False)
                made.connections[number].died(report)
            return

    async def close(self) -> None:
        """End all processes, and wait for that."""
        # The tasks see this, and are not cancelled: a process that a thread is starting for one would be lost.
        self._closing.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        processes = [each.process for each in self._processes.values()]
        for process in processes:
            loop.remove_reader(process.death_fd)
            loop.remove_reader(process.channel.fileno())
            loop.remove_writer(process.channel.fileno())
        self._processes.clear()
        await in_thread(partial(shutdown.run, processes))
        # Last: this kills the processes that still run.
        self._lifeline.close()
