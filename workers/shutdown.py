r"""Ends worker processes: one state machine, with one deadline for all of them.

Data path: none; this is how a pool stops, whatever state it and its workers are in.

    RUNNING --> ASKED --5 s--> TERMINATED --1.5 s--> KILLED --the rest of 8 s--> RELEASED
        \________\______________\__ stopped, or in a hurry ___/

Every process advances by itself, never back, and skips states that cannot help. A process that has ended is reaped at
the next step. One that SIGKILL does not end (it sleeps uninterruptibly in a file system that does not answer) is given
up: its resources here are closed, a warning names it, and it is not waited for.

*Pure part*: `Shutdown` gets the time and the set of living processes, and says what to do next and how long to wait.
*Driver*: `run` does it. It blocks, in any thread, starts no threads (at exit none can be started), and changes no
signal handlers. If an exception is raised while it waits, Ctrl-C above all, it hurries: everything is killed and reaped
at once, and then the exception is raised, once. Only an exception that strikes twice within the few instructions
between two steps can escape earlier.
"""

from __future__ import annotations

import contextlib
import enum
import multiprocessing.process
import warnings
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import NamedTuple

from asyncloader.workers.ipc import wire
from asyncloader.workers.process import WorkerProcess, wait_for_deaths
from asyncloader.workers.stacks import process_state

BUDGET = 8.0
"""Seconds for the whole shutdown."""
_ASK_SECONDS = 5.0  # for a worker to finish its batch, as torch waits
_TERMINATE_SECONDS = 1.5  # for a worker to end on SIGTERM
_KILL_SECONDS = 0.5  # at least this long after SIGKILL, even if the main process itself was held up
_FAILURES = 3  # errors of waiting itself after which all processes are killed and given up


# --------------------------------------------------------------------------------------------------- the pure part


class State(enum.IntEnum):
    """The state of one process, or of the whole shutdown."""

    RUNNING = 0
    ASKED = 1
    TERMINATED = 2
    KILLED = 3
    RELEASED = 4


class ShutdownStep(NamedTuple):
    """What to do now, by process number. Then wait for deaths, at most `wait` seconds, and take the next step."""

    ask: tuple[int, ...] = ()
    terminate: tuple[int, ...] = ()
    kill: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    """These have ended: reap them, and confirm each by `Shutdown.released`."""
    give_up: tuple[int, ...] = ()
    """These will not end: close their resources, and confirm each by `Shutdown.released`."""
    wait: float = 0.0


class Shutdown:
    """The state machine for `count` processes, numbered from 0. Pure: no clock, no processes.

    Args:
        count: number of processes.
        now: the current time, in seconds on any monotonic clock.
    """

    def __init__(self, count: int, now: float) -> None:
        self._deadline = now + BUDGET
        self._states = [State.RUNNING] * count
        self._due = [now] * count  # when a living process advances to the next state
        self._hurry = False
        self._given_up: list[int] = []

    @property
    def state(self) -> State:
        """The least advanced state of all processes."""
        return min(self._states, default=State.RELEASED)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.state is State.RELEASED

    @property
    def given_up(self) -> tuple[int, ...]:
        """The processes that were given up while they lived."""
        return tuple(self._given_up)

    def hurry(self) -> None:
        """Have the next step kill all living processes, even killed ones: the kill may have been interrupted."""
        self._hurry = True

    def released(self, number: int) -> None:
        """Process `number` was released or given up, and is ignored from now on."""
        self._states[number] = State.RELEASED

    def step(
        self, now: float, alive: Collection[int], booting: Collection[int] = (), stopped: Collection[int] = ()
    ) -> ShutdownStep:
        """What to do at this time.

        Args:
            now: the time.
            alive: the processes that have not ended, as far as is known.
            booting: those of them that do not read requests yet.
            stopped: those of them that react only to SIGKILL.
        """
        hurry, self._hurry = self._hurry, False
        to_do: dict[State, list[int]] = {state: [] for state in State}
        release: list[int] = []
        give_up: list[int] = []
        for number, state in enumerate(self._states):
            if state is State.RELEASED:
                continue
            if number not in alive:
                release.append(number)
                continue
            # A process that is stopped (SIGSTOP) reacts only to SIGKILL.
            following = self._following(number, now, number in booting, hurry or number in stopped, hurry)
            if following is State.RELEASED:
                give_up.append(number)
                # If Ctrl-C strikes before `released` confirms it, the next step gives it up again.
                if number not in self._given_up:
                    self._given_up.append(number)
            elif following is not None:
                to_do[following].append(number)
                self._states[number] = following
                if following > state:  # a second kill does not extend the deadline
                    self._due[number] = self._next_due(following, now)
        left = [
            self._due[number]
            for number, state in enumerate(self._states)
            if state is not State.RELEASED and number in alive and number not in give_up
        ]
        return ShutdownStep(
            tuple(to_do[State.ASKED]),
            tuple(to_do[State.TERMINATED]),
            tuple(to_do[State.KILLED]),
            tuple(release),
            tuple(give_up),
            max(0.0, min(left, default=now) - now),
        )

    def _following(self, number: int, now: float, booting: bool, kill: bool, again: bool) -> State | None:
        """Return the next state of a living process; None if it stays."""
        state, due = self._states[number], now >= self._due[number]
        # Before the test for a hurry, which would kill again a process that SIGKILL has not ended.
        if state is State.KILLED and due:
            return State.RELEASED
        if again or (kill and state < State.KILLED):
            return State.KILLED
        if state is State.RUNNING:
            # A process that still boots reads no request.
            return State.TERMINATED if booting else State.ASKED
        return State(state + 1) if due else None

    def _next_due(self, state: State, now: float) -> float:
        if state is State.ASKED:
            return now + _ASK_SECONDS
        if state is State.TERMINATED:
            return now + _TERMINATE_SECONDS
        return max(self._deadline, now + _KILL_SECONDS)


# ------------------------------------------------------------------------------------------------------ the driver

Wait = Callable[[list[WorkerProcess], float], list[WorkerProcess]]
"""Waits until all have ended or the seconds are over; returns those still alive."""


def run(
    processes: Sequence[WorkerProcess], *, clock: Callable[[], float] = monotonic, wait: Wait = wait_for_deaths
) -> list[WorkerProcess]:
    """End all processes and release their resources. Blocks, 8 seconds at most; any thread.

    Two threads must not end the same processes at the same time; one after the other is fine.

    Returns:
        The processes that were given up because SIGKILL did not end them. A `RuntimeWarning` names them.

    Raises:
        BaseException: raised while it waited (KeyboardInterrupt). All processes have ended nevertheless.
    """
    driver = _Driver(processes, clock, wait)
    try:
        driver.finish()
    except BaseException as error:  # struck between two steps; `finish` catches all others
        driver.error = driver.error or error
        driver.machine.hurry()
        driver.finish()
    given_up = [driver.processes[number] for number in driver.machine.given_up]
    message = _describe_given_up(given_up)
    if driver.error is not None:
        if given_up:
            driver.error.add_note(message)
        raise driver.error
    if given_up:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return given_up


class _Driver:
    def __init__(self, processes: Sequence[WorkerProcess], clock: Callable[[], float], wait: Wait) -> None:
        self.processes = [process for process in processes if not process.released]
        self.error: BaseException | None = None
        self.machine = Shutdown(len(self.processes), clock())
        self._clock = clock
        self._wait = wait
        self._left = set(range(len(self.processes)))  # neither reaped nor given up
        self._alive = {number for number, process in enumerate(self.processes) if _is_complete(process)}
        self._polled = False
        self._failures = 0

    def finish(self) -> None:
        """Take steps until the shutdown is over, whatever is raised."""
        while not self.machine.over:
            try:
                self._advance()
            except BaseException as error:
                self.error = self.error or error
                self.machine.hurry()
                # Ctrl-C does not count, however often it comes: it says nothing about the next wait.
                self._failures += isinstance(error, Exception)
                if self._failures >= _FAILURES:  # waiting itself fails, and would fail again
                    self._kill_and_abandon(self._left)

    def _advance(self) -> None:
        # A process whose creation was interrupted has no descriptor to wait for: kill it, if possible, and give it up.
        self._kill_and_abandon({number for number in self._left if not _is_complete(self.processes[number])})
        # Before the first step, which would otherwise signal processes that have ended already.
        if not self._polled:
            self._polled = True
            self._poll(0.0)
        # Looked up before each step: a worker may be stopped, or continued, at any moment.
        stopped = {n for n in self._alive if process_state(self.processes[n].pid).startswith("stopped")}
        booting: set[int] = set()
        if self.machine.state is State.RUNNING:
            booting = {n for n in self._alive - stopped if _still_booting(self.processes[n])}
        step = self.machine.step(self._clock(), self._alive, booting, stopped)
        for number in (*step.ask, *step.terminate):
            # Also before SIGTERM: a worker that boots was not asked before, and the program's main module, which it
            # imports, may have set a handler for SIGTERM.
            _try(self.processes[number].request_stop)
        for number in step.terminate:
            _try(self.processes[number].terminate)
        for number in step.kill:
            _try(self.processes[number].kill)
        for number in step.release:
            # It counts as released even if that raises: it has ended, and `finish` must end, too.
            _try(self.processes[number].release)
            self._ended(number)
        for number in step.give_up:
            _abandon(self.processes[number])
            self._ended(number)
        if not self.machine.over:
            self._poll(step.wait)

    def _poll(self, seconds: float) -> None:
        numbers = sorted(self._alive)
        alive = self._wait([self.processes[number] for number in numbers], seconds)
        self._alive = {number for number in numbers if self.processes[number] in alive}

    def _kill_and_abandon(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            _try(self.processes[number].kill)
            _abandon(self.processes[number])
            self._ended(number)

    def _ended(self, number: int) -> None:
        self._alive.discard(number)
        self._left.discard(number)
        self.machine.released(number)


def _abandon(process: WorkerProcess) -> None:
    """Release a process that has perhaps not ended, without waiting for it. Idempotent."""
    # First: if Ctrl-C strikes below, the process is not ended a second time.
    process.released = True
    # Otherwise multiprocessing's exit hook would wait for it forever.
    with contextlib.suppress(AttributeError):
        multiprocessing.process._children.discard(process.process)  # type: ignore[attr-defined]
    _try(process._close)


def _is_complete(process: WorkerProcess) -> bool:
    try:
        return process.death_fd >= 0 and process.pid > 0
    except Exception:
        return False


def _still_booting(process: WorkerProcess) -> bool:
    """Whether the process still starts up (with spawn for a second or more): it reads no requests yet."""
    try:
        # The frames may be read here: the pool has been detached, and no answer is wanted any more.
        return not process.ready and wire.READY not in [kind for kind, _ in process.channel.receive()]
    except Exception:
        return True


def _try(action: Callable[[], object]) -> None:
    # If a signal cannot be sent, the process advances to the next state nevertheless, and is given up at last.
    with contextlib.suppress(Exception):
        action()


def _describe_given_up(processes: Sequence[WorkerProcess]) -> str:
    named = ", ".join(f"worker {p.worker_id} (pid {p.pid}, {process_state(p.pid)})" for p in processes)
    return (
        f"left behind: {named}. SIGKILL did not end it within {BUDGET:g} s, as when a process waits for a file system "
        "that does not answer; it ends when that does. Look at the storage that the dataset reads from."
    )
