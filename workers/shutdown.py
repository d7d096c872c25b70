r"""The end of worker processes: one state machine with one deadline for all of them.

Data path: none; it is how a pool stops, in whatever state it and its workers are.

    RUNNING --> ASKED --2 s--> TERMINATED --1.5 s--> KILLED --the rest of 5 s--> RELEASED
        \________\______________\__ stopped, or in a hurry ___/

Every process climbs this ladder by itself and never down; what is not needed is skipped: one that still boots cannot
hear a request and is terminated at once, one that is stopped (SIGSTOP) hears nothing but SIGKILL. One that has ended is
reaped at the next look. One that SIGKILL does not end (it sleeps uninterruptibly in a file system that does not answer)
is given up: what we hold of it is closed, it is named, and nobody waits for it.

*Pure part*: `Shutdown` is told the time and which processes live, and says what to do next and how long to wait.
*Driver*: `run` does so. It blocks, in any thread, starts none (at exit there are none to be had), and changes no signal
handler. Whatever is raised while it waits, Ctrl-C above all, makes it hurry: everything is killed and reaped at once,
and then it is raised, once. Only an exception that strikes twice within the few instructions between two turns can get
past it.
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

__all__ = ["BUDGET", "Shutdown", "State", "Step", "run"]

BUDGET = 5.0
"""Seconds for all of it."""
_ASK_SECONDS = 2.0  # for a worker to finish what it is at
_TERMINATE_SECONDS = 1.5  # for one that SIGTERM reaches
_KILL_SECONDS = 0.5  # at least so long after SIGKILL, should the main process itself have been held up until then
_FAILURES = 3  # so often waiting may raise an error of its own before all are killed and let go


# --------------------------------------------------------------------------------------------------- the pure part


class State(enum.IntEnum):
    """How far a process, or all of them, have come."""

    RUNNING = 0
    ASKED = 1
    TERMINATED = 2
    KILLED = 3
    RELEASED = 4


class Step(NamedTuple):
    """What to do now, by the processes' numbers; then wait for deaths, `wait` seconds at most, and look again."""

    ask: tuple[int, ...] = ()
    terminate: tuple[int, ...] = ()
    kill: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    """These have ended: reap them, and confirm each by `Shutdown.released`."""
    give_up: tuple[int, ...] = ()
    """These will not end: let go of them, and confirm each by `Shutdown.released`."""
    wait: float = 0.0


class Shutdown:
    """The state machine for `count` processes, numbered from 0. Pure: no clock, no processes.

    Args:
        count: how many.
        now: when it begins; seconds on any clock that does not run backwards.
    """

    def __init__(self, count: int, now: float) -> None:
        self._deadline = now + BUDGET
        self._states = [State.RUNNING] * count
        self._due = [now] * count  # when a process that still lives climbs on
        self._hurry = False
        self._given_up: list[int] = []

    @property
    def state(self) -> State:
        """That of the process that is least far."""
        return min(self._states, default=State.RELEASED)

    @property
    def over(self) -> bool:
        """Nothing is left to do."""
        return self.state is State.RELEASED

    @property
    def given_up(self) -> tuple[int, ...]:
        """Those that were let go of while they lived."""
        return tuple(self._given_up)

    def hurry(self) -> None:
        """The next step kills all that live, also those that it killed before: that may not have been carried out."""
        self._hurry = True

    def released(self, number: int) -> None:
        """Process `number` was released or given up, and is not this machine's business any more."""
        self._states[number] = State.RELEASED

    def step(
        self, now: float, alive: Collection[int], booting: Collection[int] = (), stopped: Collection[int] = ()
    ) -> Step:
        """What to do at this time.

        Args:
            now: the time.
            alive: the processes that have not ended, as far as is known.
            booting: those among them that cannot hear a request.
            stopped: those among them that only SIGKILL reaches.
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
            following = self._following(number, now, number in booting, hurry or number in stopped, hurry)
            if following is State.RELEASED:
                give_up.append(number)
                if number not in self._given_up:
                    self._given_up.append(number)
            elif following is not None:
                to_do[following].append(number)
                self._states[number] = following
                if following > state:  # killed again, it gets no more time
                    self._due[number] = self._next_due(following, now)
        left = [
            self._due[number]
            for number, state in enumerate(self._states)
            if state is not State.RELEASED and number in alive and number not in give_up
        ]
        return Step(
            tuple(to_do[State.ASKED]),
            tuple(to_do[State.TERMINATED]),
            tuple(to_do[State.KILLED]),
            tuple(release),
            tuple(give_up),
            max(0.0, min(left, default=now) - now),
        )

    def _following(self, number: int, now: float, booting: bool, kill: bool, again: bool) -> State | None:
        """Where a living process climbs to now; None: it stays."""
        state, due = self._states[number], now >= self._due[number]
        if state is State.KILLED and due:
            return State.RELEASED
        if again or (kill and state < State.KILLED):
            return State.KILLED
        if state is State.RUNNING:
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
"""Waits until all have ended or the seconds are over; gives those that live."""


def run(
    processes: Sequence[WorkerProcess], *, clock: Callable[[], float] = monotonic, wait: Wait = wait_for_deaths
) -> list[WorkerProcess]:
    """End all processes and let go of them. Blocks, 5 seconds at most; any thread.

    Two threads, or two calls, must not end the same processes at the same time; one after the other they may.

    Returns:
        Those that were given up because SIGKILL did not end them. A `RuntimeWarning` has named them.

    Raises:
        BaseException: what was raised meanwhile (KeyboardInterrupt), after everything has ended all the same.
    """
    driver = _Driver(processes, clock, wait)
    try:
        driver.finish()
    except BaseException as error:  # between two of its turns: it catches all others itself
        driver.error = driver.error or error
        driver.machine.hurry()
        driver.finish()
    given_up = [driver.processes[number] for number in driver.machine.given_up]
    words = _describe_given_up(given_up)
    if driver.error is not None:
        if given_up:
            driver.error.add_note(words)
        raise driver.error
    if given_up:
        warnings.warn(words, RuntimeWarning, stacklevel=2)
    return given_up


class _Driver:
    def __init__(self, processes: Sequence[WorkerProcess], clock: Callable[[], float], wait: Wait) -> None:
        self.processes = [process for process in processes if not process.released]
        self.error: BaseException | None = None
        self.machine = Shutdown(len(self.processes), clock())
        self._clock = clock
        self._wait = wait
        self._left = set(range(len(self.processes)))  # not reaped, not given up
        self._alive = {number for number, process in enumerate(self.processes) if _is_whole(process)}
        self._polled = False
        self._failures = 0

    def finish(self) -> None:
        """Take steps until it is over, whatever is raised."""
        while not self.machine.over:
            try:
                self._advance()
            except BaseException as error:
                self.error = self.error or error
                self.machine.hurry()
                self._failures += isinstance(error, Exception)
                if self._failures >= _FAILURES:  # waiting itself fails, and will again
                    self._let_go(self._left)

    def _advance(self) -> None:
        # One that was only half made has no descriptor to be waited for. It is killed, if it can be, and let go.
        self._let_go({number for number in self._left if not _is_whole(self.processes[number])})
        if not self._polled:
            self._polled = True
            self._poll(0.0)
        stopped = {n for n in self._alive if process_state(self.processes[n].pid).startswith("stopped")}
        booting: set[int] = set()
        if self.machine.state is State.RUNNING:
            booting = {n for n in self._alive - stopped if _still_booting(self.processes[n])}
        step = self.machine.step(self._clock(), self._alive, booting, stopped)
        for number in (*step.ask, *step.terminate):
            _try(self.processes[number].request_stop)
        for number in step.terminate:
            _try(self.processes[number].terminate)
        for number in step.kill:
            _try(self.processes[number].kill)
        for number in step.release:
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

    def _let_go(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            _try(self.processes[number].kill)
            _abandon(self.processes[number])
            self._ended(number)

    def _ended(self, number: int) -> None:
        self._alive.discard(number)
        self._left.discard(number)
        self.machine.released(number)


def _abandon(process: WorkerProcess) -> None:
    """Let go of a process that has perhaps not ended: `release` without the wait for it. Idempotent."""
    process.released = True
    # Or multiprocessing's own exit hook would wait for it without end.
    with contextlib.suppress(AttributeError):
        multiprocessing.process._children.discard(process.process)  # type: ignore[attr-defined]
    _try(process._close)


def _is_whole(process: WorkerProcess) -> bool:
    try:
        return process.death_fd >= 0 and process.pid > 0
    except Exception:
        return False


def _still_booting(process: WorkerProcess) -> bool:
    """It still boots (spawn: a second or more): it reads no request yet, and has nothing to lose."""
    try:
        return not process.ready and wire.READY not in [kind for kind, _ in process.channel.receive()]
    except Exception:
        return True


def _try(action: Callable[[], object]) -> None:
    # A signal that could not be sent changes nothing: the process climbs on, and is given up at last.
    with contextlib.suppress(Exception):
        action()


def _describe_given_up(processes: Sequence[WorkerProcess]) -> str:
    named = ", ".join(f"worker {p.worker_id} (pid {p.pid}, {process_state(p.pid)})" for p in processes)
    return (
        f"left behind: {named}. SIGKILL did not end it within {BUDGET:g} s, as when a process waits for a file system "
        "that does not answer; it ends when that does. Look at the storage that the dataset reads from."
    )
