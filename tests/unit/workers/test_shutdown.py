"""Real processes that exit, hang, stop, or cannot be ended."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from asyncloader.workers import shutdown
from asyncloader.workers.default_signals import set_worker_signals
from asyncloader.workers.fetch.setup import Links
from asyncloader.workers.process import WorkerProcess, wait_for_deaths
from asyncloader.workers.shutdown import BUDGET, run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux what processes are doing")

FORK = multiprocessing.get_context("fork")


class Context:
    """A multiprocessing context whose processes run `body` instead of a worker, with a worker's descriptors."""

    def __init__(self, body: Callable[[socket.socket], object]) -> None:
        self._body = body

    def get_start_method(self) -> str:
        return "fork"

    def Process(self, *, args: tuple[int, Links, Any], **options: Any) -> Any:  # noqa: N802 - multiprocessing's name
        def run() -> None:
            set_worker_signals()
            self._body(socket.socket(fileno=args[1].control.fd))

        options["target"] = run
        return FORK.Process(**options)


class Started:
    """Starts processes, and makes sure that none is left whatever a test does."""

    def __init__(self) -> None:
        self.all: list[WorkerProcess] = []
        self._lifeline, self._write = os.pipe()

    def __call__(
        self,
        body: Callable[[Callable[[], object], socket.socket], object],
        kind: type[WorkerProcess] = WorkerProcess,
        *,
        ready: bool = True,
    ) -> WorkerProcess:
        """Start a process; returns once the process has called its first argument."""
        ready_read, ready_write = os.pipe()
        context = Context(lambda control: body(lambda: os.write(ready_write, b"!"), control))
        process = kind(context, len(self.all), cast("Any", None), self._lifeline, None)
        self.all.append(process)
        assert select.select([ready_read], [], [], 20.0)[0]
        os.close(ready_read)
        os.close(ready_write)
        process.ready = ready
        return process

    def close(self) -> None:
        for process in self.all:
            process.process.kill()
            process.process.join()
            process.process.close()
        os.close(self._lifeline)
        os.close(self._write)


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    started.close()


def goes(ready: Callable[[], object], control: socket.socket) -> None:
    ready()
    while control.recv(100):
        pass


def hangs(ready: Callable[[], object], _: socket.socket) -> None:
    ready()
    threading.Event().wait()


def ignores_sigterm(ready: Callable[[], object], control: socket.socket) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hangs(ready, control)


class Clock:
    """A clock that stands still, with a waiting function: processes get no more time than they need.

    Waiting for processes that exit takes no time on it; processes that do not exit take all of it.
    """

    def __init__(self, *stubborn: WorkerProcess) -> None:
        self.now = 0.0
        self.stubborn: set[WorkerProcess] = set(stubborn)
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, processes: list[WorkerProcess], seconds: float) -> list[WorkerProcess]:
        self.waits.append(seconds)
        wait_for_deaths([p for p in processes if p not in self.stubborn], 20.0 if seconds else 0.0)
        alive = wait_for_deaths(processes, 0.0)
        self.now += seconds if alive else 0.0
        return alive


def test_worker_that_goes_when_asked(start: Started) -> None:
    """The worker exits by itself (exit code 0), and all its descriptors are closed."""
    one, two = start(goes), start(goes)
    assert run([one, two]) == []
    assert [p.process.exitcode for p in (one, two)] == [0, 0]
    assert one.released
    assert one.channel.fileno() == -1


def test_worker_that_hangs_is_terminated(start: Started) -> None:
    """A process that ignores the request is ended by SIGTERM, after the time for requests."""
    one, two = start(goes), start(hangs)
    clock = Clock(two)
    clock.stubborn.discard(one)

    def wait(processes: list[WorkerProcess], seconds: float) -> list[WorkerProcess]:
        if clock.now >= 5.0:
            clock.stubborn.clear()
        return clock.wait(processes, seconds)

    assert run([one, two], clock=clock, wait=wait) == []
    assert [p.process.exitcode for p in (one, two)] == [0, -signal.SIGTERM]
    assert clock.now == 5.0


def test_worker_that_ignores_sigterm_is_killed(start: Started) -> None:
    """A process that ignores SIGTERM is ended by SIGKILL, 6.5 seconds after the beginning."""
    one = start(ignores_sigterm)
    clock = Clock(one)

    def wait(processes: list[WorkerProcess], seconds: float) -> list[WorkerProcess]:
        if clock.now >= 6.5:
            clock.stubborn.clear()
        return clock.wait(processes, seconds)

    assert run([one], clock=clock, wait=wait) == []
    assert one.process.exitcode == -signal.SIGKILL
    assert clock.now == 6.5


def test_stopped_worker_is_killed_at_once(start: Started) -> None:
    """A worker that is stopped by SIGSTOP gets no request, and no time for it."""
    one = start(hangs)
    os.kill(one.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)
    clock = Clock()
    assert run([one], clock=clock, wait=clock.wait) == []
    assert one.process.exitcode == -signal.SIGKILL
    assert clock.now == 0.0


def test_worker_that_boots_is_terminated_at_once(start: Started) -> None:
    """A process that has not reported READY gets no time for a request."""
    one = start(hangs, ready=False)
    clock = Clock()
    assert run([one], clock=clock, wait=clock.wait) == []
    assert one.process.exitcode == -signal.SIGTERM
    assert clock.now == 0.0


def test_dead_worker_is_reaped(start: Started) -> None:
    """A process that was dead before is released, and its exit code is kept."""
    one = start(hangs)
    one.kill()
    wait_for_deaths([one], 20.0)
    assert run([one]) == []
    assert one.process.exitcode == -signal.SIGKILL
    assert one.released


class Unkillable(WorkerProcess):
    """Like a process in an uninterruptible sleep: signals have no effect."""

    def kill(self) -> None:
        """Do nothing."""

    def terminate(self) -> None:
        """Do nothing."""


def test_what_cannot_be_killed_is_given_up_by_name(start: Started) -> None:
    """After 5 seconds in all a warning names it; it is closed, and not waited for, now or at exit."""
    one, two = start(hangs, Unkillable), start(goes)
    clock = Clock(one)
    with pytest.warns(RuntimeWarning, match=rf"left behind: worker 0 \(pid {one.pid}, sleeping\)\. SIGKILL did not"):
        assert run([one, two], clock=clock, wait=clock.wait) == [one]
    assert clock.now == BUDGET
    assert one.process.is_alive()
    assert one.process not in multiprocessing.active_children()
    assert one.channel.fileno() == -1
    assert two.process.exitcode == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), RuntimeError("from a signal handler")])
@pytest.mark.parametrize("at", [0, 1])
def test_interruption_hurries_and_is_raised_once(start: Started, error: BaseException, at: int) -> None:
    """Ctrl-C while waiting kills the remaining processes at once; it is raised when all have ended."""
    one, two = start(hangs), start(ignores_sigterm)
    clock, calls = Clock(), 0

    def wait(processes: list[WorkerProcess], seconds: float) -> list[WorkerProcess]:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise error
        return clock.wait(processes, seconds)

    with pytest.raises(type(error)) as caught:
        run([one, two], clock=clock, wait=wait)
    assert caught.value is error
    assert caught.value.__context__ is None
    assert [p.process.exitcode for p in (one, two)] == [-signal.SIGKILL, -signal.SIGKILL]
    assert all(p.released for p in (one, two))
    assert clock.now == 0.0


def test_interrupted_for_ever_ends_all_the_same(start: Started) -> None:
    """Holding Ctrl-C down gives one KeyboardInterrupt, in time, and no zombie but the unkillable process."""
    one = start(hangs, Unkillable)
    clock = Clock(one)

    def wait(processes: list[WorkerProcess], seconds: float) -> list[WorkerProcess]:
        clock.now += min(seconds, 0.25)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run([one], clock=clock, wait=wait)
    assert clock.now == BUDGET
    assert "left behind: worker 0" in "".join(caught.value.__notes__)
    assert one.released


def test_broken_waiting_ends_all_the_same(start: Started) -> None:
    """If waiting itself always fails, every process is killed and released, and the first failure is raised."""
    one = start(ignores_sigterm)
    calls = 0

    def wait(_: list[WorkerProcess], __: float) -> list[WorkerProcess]:
        nonlocal calls
        calls += 1
        raise OSError(f"failure {calls}")

    with pytest.raises(OSError, match="failure 1"):
        run([one], clock=lambda: 0.0, wait=wait)
    one.process.join()
    assert one.process.exitcode == -signal.SIGKILL
    assert one.released


def test_half_made_process_does_not_keep_the_others(start: Started) -> None:
    """An object whose construction was interrupted is dropped; the others are ended as usual."""
    one = start(goes)
    half = WorkerProcess.__new__(WorkerProcess)
    half.released = False
    assert run([half, one]) == []
    assert one.process.exitcode == 0


def test_action_that_fails_does_not_keep_the_others(start: Started) -> None:
    """A process whose signals cannot be sent goes through the same steps as the others, which end."""

    class Refusing(WorkerProcess):
        def request_stop(self) -> None:
            raise PermissionError

        def terminate(self) -> None:
            raise PermissionError

    one, two = start(goes, Refusing), start(goes)
    clock = Clock(one)

    def wait(processes: list[WorkerProcess], seconds: float) -> list[WorkerProcess]:
        if clock.now >= 6.5:
            clock.stubborn.clear()
        return clock.wait(processes, seconds)

    assert run([one, two], clock=clock, wait=wait) == []
    assert [p.process.exitcode for p in (one, two)] == [-signal.SIGKILL, 0]


def test_the_whole_budget_is_its_parts() -> None:
    """The times for all steps add up to at most the budget, so that there is time to die of SIGKILL."""
    assert shutdown._ASK_SECONDS + shutdown._TERMINATE_SECONDS + shutdown._KILL_SECONDS <= BUDGET
