"""The node's side of its worker processes: starts them, opens lanes in them, and replaces those that die.

Data path: node -> [host_process] -> lane_host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from asyncloader.counters import LANE_KEY, StageTimes, stage_times, total
from asyncloader.service.handshake import Opening
from asyncloader.service.lane_host import FACTS, OPEN, PLAN, PLANNED, Facts, HostSetup, LaneOpening
from asyncloader.service.served_shards import PlanRequest
from asyncloader.workers import shutdown
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import channel_pair
from asyncloader.workers.ipc.lifeline import Lifeline
from asyncloader.workers.process import WorkerProcess, look
from asyncloader.workers.setup_payload import preload_in_fork_server

__all__ = ["Death", "HostProcesses", "LaneEnd"]

_log = logging.getLogger("asyncloader")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_ABANDONED_S = 10.0
_STACKS_S = 1.0
_KILLED = "Its loader had it killed: it was at one task for too long."
_BUSY = "Its process was at another loader's task."


class Death(NamedTuple):
    """What a loader is told of a process that died.

    Attributes:
        pid: its process id.
        exitcode: as of `WorkerDied`.
        reason: as of `WorkerDied`.
        trace: as of `WorkerDied`.
        blamed: whether it died at this lane's task, and at no other's.
        shared: whether it may have been at another lane's task, too.
    """

    pid: int
    exitcode: int | None
    reason: str
    trace: str
    blamed: bool
    shared: bool


class LaneEnd(Protocol):
    """What holds the node's end of a lane."""

    def died(self, death: Death) -> None:
        """The lane's process died."""
        ...


class _Process:
    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.lanes: dict[int, LaneEnd] = {}
        self.plans: dict[int, asyncio.Future[Any]] = {}
        self.ready = False
        self.killed_for = 0
        """The lane whose loader had it killed; 0: none."""


def _times(made: _Process) -> StageTimes:
    return stage_times(made.process.recorder.block, "fetch")


class HostProcesses:
    """The processes of one definition with one set of arguments.

    Args:
        setup: what they are started with.
        number: how many there are.
    """

    def __init__(self, setup: HostSetup, number: int) -> None:
        self.setup = setup
        self.number = number
        self.deaths = 0
        self._looking = asyncio.Lock()  # a pipe has one reader
        self._requests = 0  # lanes and plans that were asked for
        self._users = 0
        self._tasks_of_dead, self._busy_of_dead = 0, 0.0
        self._context = multiprocessing.get_context("forkserver")
        self._lifeline = Lifeline()
        self._processes: dict[int, _Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._facts: asyncio.Future[Facts] | None = None
        self._ready = asyncio.Event()
        self._begun: set[int] = set()
        self._all_begun = asyncio.Event()
        self._closed = False

    def start(self) -> None:
        """Start the processes, without waiting for them. In the node's loop."""
        self._loop = asyncio.get_running_loop()
        self._facts = self._loop.create_future()
        for number in range(self.number):
            self._keep(number)

    async def facts(self) -> Facts:
        """What the dataset is, as soon as one process has made it."""
        assert self._facts is not None
        return await asyncio.shield(self._facts)

    @property
    def running(self) -> int:
        """How many processes are ready."""
        return sum(each.ready for each in self._processes.values())

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """While somebody is about to open a lane."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    @property
    def idle(self) -> bool:
        """Whether nobody has a lane, or is about to."""
        return not self._users and not any(each.lanes for each in self._processes.values())

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
        await asyncio.sleep(pause)
        try:
            process = await asyncio.to_thread(self._make, number)
        except OSError as error:
            _log.warning("process %d of %s cannot be started: %s", number, self.setup.target, error)
            self._begins(number)
            self._keep(number, min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause)))
            return
        if self._closed:
            await asyncio.to_thread(shutdown.run, [process])
            return
        made = self._processes[number] = _Process(process)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.channel.fileno(), self._read, number, made)
        loop.add_reader(process.death_fd, self._died, number, made, pause)

    def _make(self, number: int) -> WorkerProcess:
        preload_in_fork_server(self._context)
        pidfd = os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else None
        try:
            return WorkerProcess(self._context, number, self.setup, self._lifeline.fd, pidfd)
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def _read(self, number: int, made: _Process) -> None:
        for kind, body in made.process.channel.receive():
            if kind == FACTS:
                facts: Facts = pickle.loads(body)
                made.ready = not facts.problem
                if made.ready:
                    self._ready.set()
                self._begins(number)
                assert self._facts is not None
                if not self._facts.done():
                    self._facts.set_result(facts)
            elif kind == PLANNED:
                asked, answer = pickle.loads(body)
                future = made.plans.pop(asked, None)
                if future is not None and not future.done():
                    future.set_result(answer)
            elif kind == wire.LOG:
                level, text, _, _ = pickle.loads(body)
                _log.log(level, "%s", text)
        if made.process.channel.ended:
            asyncio.get_running_loop().remove_reader(made.process.channel.fileno())

    def _begins(self, number: int) -> None:
        """This process is there, or cannot be."""
        self._begun.add(number)
        if len(self._begun) == self.number:
            self._all_begun.set()

    def _died(self, number: int, made: _Process, pause: float) -> None:
        process = made.process
        with contextlib.suppress(ValueError):
            self._read(number, made)
        self._begins(number)
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.death_fd)
        if process.channel.fileno() >= 0:
            loop.remove_reader(process.channel.fileno())
            loop.remove_writer(process.channel.fileno())
        error = process.death()
        at = made.killed_for or self._at(made)
        self.deaths += 1
        for lane, end in list(made.lanes.items()):
            blamed = lane == at or (not at and len(made.lanes) == 1)
            shared = not at and len(made.lanes) > 1 and self._asynchronous
            end.died(Death(error.pid, error.exitcode, error.reason, error.trace, blamed, shared))
        for future in made.plans.values():
            if not future.done():
                future.set_exception(ConnectionError("the process that made the plan died"))
        times = _times(made)
        self._tasks_of_dead += times.number
        self._busy_of_dead += times.total
        del self._processes[number]
        if not any(each.ready for each in self._processes.values()):
            self._ready.clear()
        process.release()
        if self._closed or (self._facts is not None and self._facts.done() and self._facts.result().problem):
            return
        _log.warning("process %d of %s died and is replaced: %s", number, self.setup.target, error)
        # One that dies at its start, again and again, is not worth a processor.
        self._keep(number, 0.0 if made.ready else min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause)))

    @property
    def _asynchronous(self) -> bool:
        told = self._facts is not None and self._facts.done() and self._facts.result().asynchronous
        return told or self.setup.threads

    # ---------------------------------------------------------------------------------------------- lanes

    async def open(self, opening: Opening, end: Callable[[Any, int], LaneEnd]) -> tuple[LaneEnd, int, int]:
        """Open a lane in the process that has the fewest. Returns the node's end, the number, and the process's id.

        Args:
            opening: the loader's request.
            end: makes the node's end, of the socket and the lane's number.
        """
        await self._all_begun.wait()  # or those that come first would all share the first process
        await self._ready.wait()
        made = min((each for each in self._processes.values() if each.ready), key=lambda each: len(each.lanes))
        self._requests += 1
        number = self._requests
        ours, theirs = channel_pair()
        try:
            asked = LaneOpening(number, opening.session, opening.worker, opening.setup, opening.catalog, opening.start)
            self._ask(made, OPEN, asked, [theirs.fileno()])
            made.lanes[number] = lane = end(ours, number)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return lane, number, made.process.pid

    async def plan(self, request: PlanRequest) -> Any:
        """Have a plan made. Returns it, or the error that was raised, in the service's dialect.

        Raises:
            ConnectionError: the process died.
        """
        await self._ready.wait()
        made = next(each for each in self._processes.values() if each.ready)
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

    def close_lane(self, number: int) -> None:
        """The node's end of this lane is closed."""
        for made in self._processes.values():
            if made.lanes.pop(number, None) is not None and self._at(made) == number:
                asyncio.get_running_loop().call_later(_ABANDONED_S, self._end_abandoned, made, number)

    def _end_abandoned(self, made: _Process, number: int) -> None:
        """Nobody wants the task that a process is at; if it does not end, the others would wait for it for ever."""
        if not made.process.released and self._at(made) == number:
            made.killed_for = number
            made.process.kill_for("It was at a task of a loader that is gone.")

    def _at(self, made: _Process) -> int:
        """The lane whose task the process carries out; 0: none, or several."""
        return int(total(made.process.recorder.block, LANE_KEY))

    def kill(self, number: int) -> None:
        """A lane's loader says that a task takes too long: kill the process. If it is at another lane's task, this one
        only waits, and its lane ends, so that the loader goes elsewhere.
        """
        for made in self._processes.values():
            if number not in made.lanes:
                continue
            if self._at(made) == number or self._asynchronous:
                made.killed_for = number
                made.process.kill_for(_KILLED)
            else:
                made.lanes[number].died(Death(made.process.pid, None, _BUSY, "", blamed=False, shared=False))
            return

    async def close(self) -> None:
        """End all processes, and wait for that."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        processes = [each.process for each in self._processes.values()]
        for process in processes:
            loop.remove_reader(process.death_fd)
            loop.remove_reader(process.channel.fileno())
            loop.remove_writer(process.channel.fileno())
        self._processes.clear()
        await asyncio.to_thread(shutdown.run, processes)
        self._lifeline.close()
