"""The node's side of its worker processes: starts them, opens connections in them, and replaces those that die.

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
from typing import Any, Protocol

from asyncloader.bridge import in_thread
from asyncloader.service.node.worker_host import (
    DATASET_INFO,
    ENDED,
    MOST_PROBLEM,
    NOT_MADE,
    OPEN,
    PLAN,
    PLANNED,
    ConnectionEnding,
    ConnectionOpening,
    HostSetup,
)
from asyncloader.service.protocol.handshake import Opening
from asyncloader.service.protocol.records import DatasetInfo, DeathReport
from asyncloader.service.protocol.shard_plan import PlanRequest
from asyncloader.telemetry.counters import CONNECTION_KEY, StageTimes, stage_times, total
from asyncloader.workers import shutdown
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import channel_pair
from asyncloader.workers.ipc.lifeline import Lifeline
from asyncloader.workers.ipc.peer_text import LineLimit, line_of
from asyncloader.workers.process import WorkerProcess, look

_log = logging.getLogger("asyncloader")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_ABANDONED_S = 10.0
_ALL_BEGUN_S = 60.0
"""Seconds that the first loaders wait for all processes to have their dataset, while one has."""
_NONE_READY_S = 20.0
"""Seconds that a connection waits for a process: less than a loader waits for an answer."""
_UNWANTED_S = 60.0
"""Seconds without a loader after which a dataset of the loaders' choice that cannot be made is given up."""
_FAILURES_PER_MINUTE = 6
_FAILED_S = 60.0
"""Seconds for which a process in which a connection ended at no task gets no connections, if there are others."""
_STACKS_S = 1.0
_KILLED = "Its loader had it killed: it was at one task for too long."
_BUSY = "Its process was at another loader's task."


class NotMade(Exception):
    """No process has the dataset; the text says why, on one line. Later one may."""


class WorkerConnection(Protocol):
    """What holds the node's end of a connection."""

    def died(self, death: DeathReport) -> None:
        """The connection's process died."""
        ...


class _Process:
    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.connections: dict[int, WorkerConnection] = {}
        self.plans: dict[int, asyncio.Future[Any]] = {}
        self.ready = False
        self.problem = ""
        """Why it could not make its dataset."""
        self.failed_at = -inf
        """When a connection ended in it at no task: it may be out of descriptors, so others get the next ones."""
        self.killed_for = 0
        """The connection whose loader had it killed; 0: none."""


def _end_left_over(process: WorkerProcess) -> None:
    if not process.released:
        process.kill()


def _times(made: _Process) -> StageTimes:
    return stage_times(made.process.recorder.block, "fetch")


class HostProcesses:
    """The processes of one definition with one set of arguments.

    Args:
        setup: what they are started with.
        number: how many there are.
        lasting: whether the dataset is to be made however often that fails, even if nobody wants it.
    """

    def __init__(self, setup: HostSetup, number: int, *, lasting: bool = True) -> None:
        self.lasting = lasting
        self.setup = setup
        self.number = number
        self.deaths = 0
        self._by = {"peer": f"processes of {setup.target}"}  # whose lines of the log these are
        self._logged = LineLimit(_FAILURES_PER_MINUTE)
        self._looking = asyncio.Lock()  # a pipe has one reader
        self._requests = 0  # connections and plans that were asked for
        self._users = 0
        self._tasks_of_dead, self._busy_of_dead = 0, 0.0
        self._context = multiprocessing.get_context("forkserver")
        self._lifeline = Lifeline()
        self._processes: dict[int, _Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._info: DatasetInfo | None = None  # that were reported first, since no process had the dataset
        self._news = asyncio.Event()  # replaced by another whenever something below, or a process, has changed
        self._begun: set[int] = set()
        self._waited_for_all = False
        self._asked = 0.0  # when somebody wanted the dataset
        self._closing = asyncio.Event()
        self.problem = ""
        """Why no process has the dataset: the newest failure, as one line; empty while one has, or may yet."""
        self.given_up = False
        """No process is there, and none is started any more: for a long time nobody wanted it."""

    def start(self) -> None:
        """Start the processes, without waiting for them. In the node's loop."""
        self._loop = asyncio.get_running_loop()
        self._asked = self._loop.time()
        for number in range(self.number):
            self._keep(number)

    async def first_dataset_info(self) -> DatasetInfo:
        """What the dataset is, as soon as one process has made it.

        Raises:
            NotMade: each process has failed.
        """
        while not self.running and not (self._info is not None and self._info.problem):
            if self.problem and len(self._begun) == self.number:
                raise NotMade(self.problem)
            await self._news.wait()
        assert self._info is not None
        return self._info

    async def dataset_info(self) -> DatasetInfo:
        """What the dataset is, as soon as one process has made it, for a loader that wants it.

        Raises:
            NotMade: at the moment it cannot be made.
        """
        assert self._loop is not None
        self._asked = self._loop.time()
        while not self.running and not (self._info is not None and self._info.problem):
            if self.problem:
                raise NotMade(self.problem)
            await self._news.wait()
        assert self._info is not None
        return self._info

    async def begun(self) -> None:
        """Wait until each process has its dataset, or has failed, but only once and not for ever: the loaders that come
        first would all share the first process.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ALL_BEGUN_S):
                while len(self._begun) < self.number and not self._waited_for_all:
                    await self._news.wait()
        if not self._waited_for_all:
            self._waited_for_all = True
            self._tell()

    def _tell(self) -> None:
        """Wake up whoever waits for a change."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _some(self) -> list[_Process]:
        """The processes that have the dataset; there is at least one. Nothing is awaited since this was found.

        Raises:
            NotMade: there was none for too long.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NONE_READY_S):
                while not self.running and not self.problem:
                    await self._news.wait()
        if not self.running:
            late = f"no process of {self.setup.target} had made the dataset after {_NONE_READY_S:.0f} seconds"
            raise NotMade(self.problem or late)
        return [each for each in self._processes.values() if each.ready]

    @property
    def running(self) -> int:
        """How many processes are ready."""
        return sum(each.ready for each in self._processes.values())

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """While somebody is about to open a connection."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    @property
    def idle(self) -> bool:
        """Whether nobody has a connection, or is about to."""
        return not self._users and not any(each.connections for each in self._processes.values())

    @property
    def tasks(self) -> int:
        """Tasks carried out, of a blocking dataset."""
        return self._tasks_of_dead + sum(_times(each).number for each in self._processes.values())

    @property
    def busy(self) -> float:
        """Seconds that processes were at them."""
        return self._busy_of_dead + sum(_times(each).total for each in self._processes.values())

    def _keep(self, number: int, pause: float = 0.0) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._start(number, pause))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, number: int, pause: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._closing.wait()
        if self._closing.is_set() or self.given_up:
            return
        try:
            process = await in_thread(partial(self._make, number))
        except Exception as error:  # such as an EOFError: a fork server that cannot fork ends
            why = f"{type(error).__name__}: {error}"
            self._fails(number, f"{self.setup.target}: its process cannot be started: {why}", pause)
            return
        if self._closing.is_set() or self.given_up:
            await in_thread(partial(shutdown.run, [process]))
            return
        made = self._processes[number] = _Process(process)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.channel.fileno(), self._read, number, made)
        loop.add_reader(process.death_fd, self._died, number, made, pause)

    def _make(self, number: int) -> WorkerProcess:
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
                if self._info is None or not self.running:
                    self._info = info
                made.ready = not info.problem
                if self.problem and made.ready:
                    self.problem = ""
                    _log.warning("%s is made now", self.setup.target, extra=self._by)
                self._begins(number)
            elif kind == NOT_MADE:
                made.problem = pickle.loads(body)
                # It ends by itself, unless a thread that the dataset has left behind keeps it.
                asyncio.get_running_loop().call_later(_ABANDONED_S, _end_left_over, made.process)
            elif kind == PLANNED:
                asked, answer = pickle.loads(body)
                future = made.plans.pop(asked, None)
                if future is not None and not future.done():
                    future.set_result(answer)
            elif kind == ENDED:
                ending: ConnectionEnding = pickle.loads(body)
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
        """This process is there, or cannot be."""
        self._begun.add(number)
        self._tell()

    def _fails(self, number: int, problem: str, pause: float) -> None:
        """This process could not make the dataset, for this reason, and after such a pause: try again later."""
        assert self._loop is not None
        pause = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause))
        if not self.running:
            self.problem = line_of(problem, MOST_PROBLEM)
        self._begins(number)
        now = self._loop.time()
        if not self.lasting and self.idle and not self._processes and now - self._asked > _UNWANTED_S:
            self.given_up = True
        if self.given_up or self._closing.is_set():
            return
        if self._logged.admits(now):
            text = (
                "process %d has no dataset, and tries again in %.1f s (%d more failures since the last such line): %s"
            )
            _log.warning(text, number, pause, self._logged.take_left_out(), problem)
        self._keep(number, pause)

    def _died(self, number: int, made: _Process, pause: float) -> None:
        process = made.process
        with contextlib.suppress(ValueError):
            self._read(number, made)
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.death_fd)
        if process.channel.fileno() >= 0:
            loop.remove_reader(process.channel.fileno())
            loop.remove_writer(process.channel.fileno())
        error = process.death()
        at = made.killed_for or self._at(made)
        self.deaths += not made.problem
        for connection, end in list(made.connections.items()):
            blamed = connection == at or (not at and len(made.connections) == 1)
            shared = not at and len(made.connections) > 1 and self._asynchronous
            end.died(DeathReport(error.pid, error.exitcode, error.reason, error.trace, blamed, shared))
        for future in made.plans.values():
            if not future.done():
                future.set_exception(ConnectionError("the process that made the plan died"))
        times = _times(made)
        self._tasks_of_dead += times.number
        self._busy_of_dead += times.total
        del self._processes[number]
        process.release()
        if self._closing.is_set() or (self._info is not None and self._info.problem):
            return
        if made.ready:
            _log.warning("process %d of %s died and is replaced: %s", number, self.setup.target, error, extra=self._by)
            self._keep(number)
        else:
            died = f"{self.setup.target}: its process died before it had the dataset: {error}"
            self._fails(number, made.problem or died, pause)

    @property
    def _asynchronous(self) -> bool:
        return self.setup.threads or (self._info is not None and self._info.asynchronous)

    # ---------------------------------------------------------------------------------------------- connections

    async def open(
        self, opening: Opening, info: DatasetInfo, end: Callable[[Any, int], WorkerConnection]
    ) -> tuple[WorkerConnection, int, int]:
        """Open a connection in the process with the fewest. Returns the node's end, its number, and the process's id.

        Args:
            opening: the loader's request.
            info: that the loader was given of the dataset. Those of a process that was made since may be others.
            end: makes the node's end, of the socket and the connection's number.

        Raises:
            NotMade: no process has the dataset.
            ConnectionError: the process died.
        """
        healthy = asyncio.get_running_loop().time() - _FAILED_S
        made = min(await self._some(), key=lambda each: (each.failed_at > healthy, len(each.connections)))
        self._requests += 1
        number = self._requests
        ours, theirs = channel_pair()
        try:
            asked = ConnectionOpening(
                number, opening.loader, opening.worker, opening.setup, opening.catalog, opening.start, info
            )
            self._ask(made, OPEN, asked, [theirs.fileno()])
            made.connections[number] = connection = end(ours, number)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return connection, number, made.process.pid

    async def plan(self, request: PlanRequest) -> Any:
        """Have a plan made. Returns it, or the error that was raised, in the service's codec.

        Raises:
            NotMade: no process has the dataset.
            ConnectionError: the process died.
        """
        made = (await self._some())[0]
        self._requests += 1
        number = self._requests
        future = made.plans[number] = asyncio.get_running_loop().create_future()
        try:
            self._ask(made, PLAN, (number, request))
            return await future
        finally:
            made.plans.pop(number, None)

    async def look(self, pids: Sequence[int]) -> list[tuple[int, str, str]]:
        """What those of these processes do that are here: id, state, and the stacks of its threads."""
        async with self._looking:
            there = [each.process for each in self._processes.values() if each.process.pid in pids]
            reports = await look(there, _STACKS_S)
        return [(process.pid, report.state, report.text) for process, report in zip(there, reports, strict=True)]

    def _ask(self, made: _Process, kind: int, request: Any, fds: Sequence[int] = ()) -> None:
        """Send a process of ours a request."""
        if not made.process.channel.send(wire.pack(kind, pickle.dumps(request)), fds):
            asyncio.get_running_loop().add_writer(made.process.channel.fileno(), self._flush, made)

    def _flush(self, made: _Process) -> None:
        done = True
        with contextlib.suppress(ConnectionError):  # it is dying, which its sentinel reports
            done = made.process.channel.flush()
        if done:
            asyncio.get_running_loop().remove_writer(made.process.channel.fileno())

    def close_connection(self, number: int) -> None:
        """The node's end of this connection is closed."""
        for made in self._processes.values():
            if made.connections.pop(number, None) is not None and self._at(made) == number:
                asyncio.get_running_loop().call_later(_ABANDONED_S, self._end_abandoned, made, number)

    def _end_abandoned(self, made: _Process, number: int) -> None:
        """Nobody wants the task that a process is at; if it does not end, the others would wait for it for ever."""
        if not made.process.released and self._at(made) == number:
            made.killed_for = number
            made.process.kill_for("It was at a task of a loader that is gone.")

    def _at(self, made: _Process) -> int:
        """The connection whose task the process carries out; 0: none, or several."""
        return int(total(made.process.recorder.block, CONNECTION_KEY))

    def kill(self, number: int) -> None:
        """A connection's loader says that a task takes too long: kill the process. If it is at another connection's
        task, this one only waits: it ends, so that the loader goes elsewhere.
        """
        for made in self._processes.values():
            if number not in made.connections:
                continue
            if self._at(made) == number or self._asynchronous:
                made.killed_for = number
                made.process.kill_for(_KILLED)
            else:
                report = DeathReport(made.process.pid, None, _BUSY, "", blamed=False, shared=False)
                made.connections[number].died(report)
            return

    async def close(self) -> None:
        """End all processes, and wait for that."""
        self._closing.set()  # and no task is cancelled: the process that one is about to have would be lost
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        processes = [each.process for each in self._processes.values()]
        for process in processes:
            loop.remove_reader(process.death_fd)
            loop.remove_reader(process.channel.fileno())
            loop.remove_writer(process.channel.fileno())
        self._processes.clear()
        await in_thread(partial(shutdown.run, processes))
        self._lifeline.close()
