"""Changes the number of an epoch's workers while it runs, as the tuner decides: for ``num_workers="auto"``.

Data path: beside the pipeline, in its loop's thread. `tuning.py` measures, `telemetry/tuner.py` has the rules.

Workers that a trial leaves out are *excused*: they get no tasks, and live on until it is decided, so that a trial costs
no start. A decision ends them, the last one first, once they have answered their tasks.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from asyncloader.cpus import usable_cpus
from asyncloader.epoch.respawn import Request, WorkerRespawner
from asyncloader.epoch.resume_points import ResumePoints
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.epoch.tuning import TunedSetting
from asyncloader.events import Event, Excused, Joined, Resized
from asyncloader.options.auto import AutoWorkers
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.telemetry.tuner import MOST_WAITING_WORKERS, Decision, most_in_memory
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.growing_pool import GrowingPool
from asyncloader.workers.memory.segment import memory_limit
from asyncloader.workers.memory_limit import private_bytes
from asyncloader.workers.source import WorkerHandle

if sys.platform != "win32":
    import resource

_STARTING_S = 60.0  # for a worker to begin, before a trial of them is given up
_FILES = 7  # descriptors of this process that a worker takes
_LOOKED_AT = 4  # workers whose memory is counted, in milliseconds each: the first, which have grown the longest


class WorkerCount(TunedSetting):
    """The number of workers of one epoch.

    Args:
        auto: the loader's choice, which outlives the epoch.
        config: the epoch's options.
    """

    units = "worker", "workers"

    def __init__(self, auto: AutoWorkers, config: EpochConfig) -> None:
        super().__init__(auto)
        # Not the options themselves: the loop refers to this, and must not keep the user's dataset and functions.
        self._overlaps, self._local = config.concurrent and not config.planned, config.workers is None
        self._most_workers = config.most_workers
        self._early: dict[int, WorkerHandle] = {}  # workers that were made before those with lower numbers
        self._requested = 0  # workers that exist, or were requested
        self._at_work = 0  # workers that get tasks
        self._ends_surplus = False
        self._starts_at_once = max(1, usable_cpus() // 2)
        self._starting_until: float | None = None

    def start(
        self,
        pool: Any,
        scheduler: Scheduler,
        respawner: WorkerRespawner,
        handle: Callable[[Event], None],
        notices: deque[Any],
        resume_points: ResumePoints,
        starts: list[EpochStart],
    ) -> None:
        """Take the parts of the epoch, before `EpochTuning.start`.

        Args:
            pool: the workers, a `GrowingPool`.
            scheduler: the epoch's.
            respawner: starts workers.
            handle: passes an event to the scheduler, and carries out what follows.
            notices: for the consumer, which gets the number of workers.
            resume_points: the epoch's.
            starts: how the workers began. Each that is added is noted in both, and begins as the first did, because any
                worker makes any batch.
        """
        self._pool: GrowingPool = pool
        self._scheduler, self._respawner = scheduler, respawner
        self._handle, self._notices, self._resume_points, self._starts = handle, notices, resume_points, starts
        self._requested = self._at_work = len(pool.processes)

    # ------------------------------------------------------------------------------------- called by the pipeline

    def answered(self, worker: int) -> None:
        """A worker has answered a task, or has died: end the last workers, if they are not needed and have no tasks."""
        if worker >= self._at_work and self._ends_surplus:
            # Not here: this runs while the pool reads that worker's frames, or takes note of its death.
            asyncio.get_running_loop().call_soon(self._end_surplus)

    def started(self) -> None:
        """A worker has begun: request further ones, a few at a time, because start-up code takes the others' CPUs."""
        if self._starting_until is None:
            return  # none is missing
        begun = sum(process.started for process in self._pool.processes)
        while self._requested < min(self.auto.number, begun + self._starts_at_once):
            worker, self._requested = self._requested, self._requested + 1
            self._starting_until = perf_counter() + _STARTING_S
            self._respawner.request(Request(worker, self._starts[0], b"", self._pool.epoch, joins=True))

    def made(self, made: WorkerHandle | Exception, request: Request) -> None:
        """Take a requested worker, or the error that prevented it."""
        if isinstance(made, Exception):
            self._give_up(f"no further worker could be started: {type(made).__name__}: {made}")
            return
        if request.worker < len(self._pool.processes) or request.worker in self._early:
            self._respawner.discard_soon(made)  # requested twice: the first request had been given up, and came late
            return
        self._early[request.worker] = made
        while (worker := self._early.pop(len(self._pool.processes), None)) is not None:
            try:
                taken = self._pool.extend(worker)
            except Exception as error:
                self._respawner.discard_soon(worker)
                self._give_up(f"{error}")
                return
            if not taken:
                self._respawner.discard_soon(worker)
                return
            self._starts.append(self._starts[0])
            self._resume_points.add_worker(self._starts[0])
            self._put_to_work()
        if self._ends_surplus:
            self._end_surplus()

    def close(self) -> None:
        """Discard the workers that were not taken."""
        self._ends_surplus = False
        for worker in self._early.values():
            self._respawner.discard_soon(worker)
        self._early.clear()
        self._handle = _ignored  # it refers to the pipeline, which refers to this

    # ------------------------------------------------------------------------------------------ called by the tuning

    @property
    def value(self) -> int:
        """Workers that get tasks."""
        return self._at_work

    def pending(self, now: float) -> bool:
        """Whether workers have yet to begin, and were not given up."""
        if self._starting_until is None:
            return False
        begun = self._at_work >= self.auto.number and all(
            process.started for process in self._pool.processes[: self._at_work]
        )
        if not begun:
            if now < self._starting_until:
                return True
            self._give_up(f"further workers have not begun within {_STARTING_S:g} s")
        self._starting_until = None
        return False

    def room(self, waits: bool) -> tuple[int, str]:
        """Within CPUs, open files and memory."""
        cpus = usable_cpus()
        # Samples that are awaited, or read by threads, need no more workers than CPUs: `concurrency` overlaps them.
        # Those of a stream come one after the other.
        most = cpus if self._overlaps else max(cpus, MOST_WAITING_WORKERS)
        limit = f"the {cpus} CPUs" if most == cpus else "reads that wait"
        # The workers were told that there are no more, when there may have been fewer CPUs.
        most = min(most, self._most_workers)
        there = len(self._pool.processes)
        if self._local and (files := _most_files()) < _FILES * most:
            most, limit = max(there, files // _FILES), f"half of the open files of a process (ulimit -n): {files}"
        # Only where more may be tried now: the kernel walks through all pages of a worker to count them.
        tuner = self.auto.tuner
        tried = tuner.largest(most) if waits and self._local else 0
        if tried <= there or not tuner.may_try(tried) or (room := memory_limit()[0]) is None:
            return most, limit
        rings = max(ring.nbytes for ring in self._pool.rings)
        private = max(private_bytes(process.pid) for process in self._pool.processes[:_LOOKED_AT])
        largest = max(1 << 20, rings + private)
        if (fit := most_in_memory(there, largest, room)) < most:
            free = room + there * largest
            most, limit = fit, f"half of {free >> 20:,} MiB, free without workers, at {largest >> 20:,} MiB each,"
        return most, limit

    def carry_out(self, before: int, decision: Decision) -> None:
        """Change the number; without workers to be had, return to the one before."""
        if decision.value > len(self._pool.processes) and (obstacle := self._pool.obstacle()):
            self._give_up(obstacle)
            return
        self.tell(before, decision)
        self._set(decision.value, ends_surplus=decision.kept)

    def apply(self, value: int) -> None:
        """Also ends workers that an earlier epoch had tried, and that live on."""
        self._set(value, ends_surplus=True)

    def _give_up(self, reason: str) -> None:
        """No further worker can be had: return to the number before the trial, or go on with those at work."""
        decision = self.auto.tuner.failed(reason, self._at_work)
        self._starting_until = None
        self._requested = len(self._pool.processes)
        if decision is not None:
            self.note(f"goes to {decision.value} {self.units[decision.value != 1]}: {decision.reason}")
            self.apply(decision.value)

    # ------------------------------------------------------------------------------------------------- changing

    def _set(self, workers: int, *, ends_surplus: bool) -> None:
        self._ends_surplus = ends_surplus
        while self._at_work > workers:
            self._at_work -= 1
            self._handle(Excused(self._at_work))
        self._put_to_work()
        if workers > self._at_work:
            self._starting_until = perf_counter() + _STARTING_S
            self.started()
        self._notices.append(Resized(self._at_work))
        if ends_surplus:
            self._end_surplus()

    def _put_to_work(self) -> None:
        while self._at_work < min(self.auto.number, len(self._pool.processes)):
            worker = self._at_work
            # It ended while it was excused, and had no task to be replaced for.
            gone = self._pool.vacant(worker) and not self._scheduler.replaces(worker)
            if gone and self._pool.obstacle():
                return
            self._at_work += 1
            # Before the event: the scheduler asks for more indices, which the consumer takes from the sampler.
            self._notices.append(Resized(self._at_work))
            self._handle(Joined(worker, gone))

    def _end_surplus(self) -> None:
        """End the last workers, as long as they have no tasks. Not within the pool's callbacks."""
        # A trial, or the end of the epoch, may have come since this was asked for.
        before = len(self._pool.processes)
        while self._ends_surplus and (last := len(self._pool.processes) - 1) >= self._at_work:
            if self._scheduler.unanswered(last) or self._scheduler.replaces(last):
                break
            self._pool.shorten()
        if len(self._pool.processes) < before:
            self._pool.dismiss_soon()
        self._requested = max(len(self._pool.processes), min(self._requested, self.auto.number))


def _most_files() -> int:
    """Return how many open files workers may take of those that this process may have: half."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2


def _ignored(event: Event) -> None:
    del event
