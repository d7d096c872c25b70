from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncloader.base.events import Died
from asyncloader.epoch.reassignment import KILLS, Reassignment
from asyncloader.errors import WorkerDied


class Deaths:
    """Makes deaths, each of a process of its own."""

    def __init__(self) -> None:
        self.pid = 100

    def __call__(self, worker: int = 0, *, at_work: bool = True, left: bool = False, outside: bool = False) -> Died:
        self.pid += 1
        return Died(worker, WorkerDied(worker, self.pid, -9), at_work, left, outside=outside)


@pytest.fixture
def death() -> Deaths:
    return Deaths()


def blocking(workers: int = 2, max_restarts: int = 3) -> Reassignment:
    return Reassignment(workers, max_restarts, concurrent=False)


def concurrent(workers: int = 2, max_restarts: int = 3) -> Reassignment:
    return Reassignment(workers, max_restarts, concurrent=True)


def replaced(recovery: Reassignment, worker: int, lost: list[int]) -> list[int]:
    """The worker is replaced while the lost tasks wait for it. Returns the tasks sent to the replacement at once."""
    recovery.down(worker)
    for seq in lost:
        recovery.wait(worker, seq)
    recovery.up(worker)
    return sent(recovery, worker, in_hand=0)


def sent(recovery: Reassignment, worker: int, in_hand: int) -> list[int]:
    found: list[int] = []
    while (seq := recovery.next_for(worker, in_hand + len(found))) is not None:
        found.append(seq)
    return found


# ------------------------------------------------------------------------------------------------ suspects


def test_a_blocking_worker_died_of_its_first_task(death: Deaths) -> None:
    """A worker that processes its tasks in order can have died of the first only."""
    recovery = blocking()
    assert recovery.died(death(), [4, 6, 8]) == []
    assert [seq for seq in (4, 6, 8) if recovery.suspected(seq)] == [4]
    assert [error.pid for error in recovery.deaths(4)] == [101]
    assert recovery.deaths(6) == ()


def test_a_concurrent_worker_died_of_any_of_its_tasks(death: Deaths) -> None:
    """A worker that has several tasks in hand may have died of each of them."""
    recovery = concurrent()
    assert recovery.died(death(), [4, 6, 8]) == []
    assert all(recovery.suspected(seq) for seq in (4, 6, 8))


@pytest.mark.parametrize("kind", [blocking, concurrent])
def test_what_had_not_been_sent_is_no_suspect(kind: Callable[[], Reassignment], death: Deaths) -> None:
    """Tasks that were not yet sent to the worker cannot have killed it."""
    recovery = kind()
    recovery.down(0)
    for seq in (4, 6):
        recovery.wait(0, seq)
    assert recovery.in_hand(0, 2) == 0
    assert recovery.died(death(), [4, 6]) == []
    assert not recovery.suspected(4)
    assert not recovery.suspected(6)


@pytest.mark.parametrize("kind", [blocking, concurrent])
def test_a_death_at_start_up_blames_no_task(kind: Callable[[], Reassignment], death: Deaths) -> None:
    """Only the user's start-up code had run: any number of such deaths poisons no task."""
    recovery = kind()
    for _ in range(KILLS + 1):
        assert recovery.died(death(at_work=False), [0, 1]) == []
        assert replaced(recovery, 0, [0, 1]) == [0, 1]
    assert not recovery.suspected(0)


@pytest.mark.parametrize("kind", [blocking, concurrent])
def test_retirement_blames_nobody(kind: Callable[[], Reassignment], death: Deaths) -> None:
    """A worker that left by itself was killed by no task; earlier suspects remain suspects."""
    recovery = kind()
    recovery.died(death(), [0])
    replaced(recovery, 0, [0])
    assert recovery.died(death(left=True), [0, 1]) == []
    assert len(recovery.deaths(0)) == 1
    assert not recovery.suspected(1)


# --------------------------------------------------------------------------------------------------- poison


@pytest.mark.parametrize("kind", [blocking, concurrent])
def test_three_deaths_poison_a_task(kind: Callable[[], Reassignment], death: Deaths) -> None:
    """The third death over a task poisons it, on any worker; all three deaths are reported in their order."""
    recovery = kind()
    assert recovery.died(death(0), [5]) == []
    assert recovery.died(death(1), [5]) == []
    assert recovery.died(death(0), [5]) == [5]
    assert [(error.worker_id, error.pid) for error in recovery.deaths(5)] == [(0, 101), (1, 102), (0, 103)]


@pytest.mark.parametrize("kind", [blocking, concurrent])
def test_deaths_from_outside_poison_nothing(kind: Callable[[], Reassignment], death: Deaths) -> None:
    """Any number of them, before and between the task's own deaths, poisons nothing.

    The task is a suspect nevertheless, and the restarts are used up.
    """
    recovery = kind()
    for _ in range(KILLS + 1):
        assert recovery.died(death(outside=True), [5]) == []
    assert recovery.suspected(5)
    assert recovery.deaths(5) == ()
    assert not recovery.may_replace(0)
    for _ in range(KILLS - 1):
        assert recovery.died(death(1), [5]) == []
        assert recovery.died(death(1, outside=True), [5]) == []
    assert recovery.died(death(1), [5]) == [5]
    assert len(recovery.deaths(5)) == KILLS


# -------------------------------------------------------------------------------------------------- isolation


def test_suspects_of_a_concurrent_worker_are_tried_alone(death: Deaths) -> None:
    """Suspects are sent one at a time, in order; the tasks behind them together, after the last suspect's answer."""
    recovery = concurrent()
    recovery.died(death(), [0, 1])
    recovery.down(0)
    for seq in (0, 1, 2, 3):  # 2 and 3 arrived while it was down
        recovery.wait(0, seq)
    recovery.up(0)
    assert sent(recovery, 0, in_hand=0) == [0]
    assert not recovery.free(0)
    recovery.answered(0, 0)
    assert sent(recovery, 0, in_hand=0) == [1]
    recovery.answered(0, 1)
    assert sent(recovery, 0, in_hand=0) == [2, 3]
    assert recovery.free(0)
    assert not recovery.active


def test_a_suspect_waits_for_the_tasks_in_hand() -> None:
    """A suspect is sent only when every other task in hand has been answered."""
    recovery = concurrent()
    recovery.died(Deaths()(), [7])
    recovery.wait(0, 7)
    assert recovery.next_for(0, 2) is None
    assert recovery.next_for(0, 1) is None
    assert recovery.next_for(0, 0) == 7


def test_a_death_over_a_suspect_that_is_tried_blames_it_alone(death: Deaths) -> None:
    """The death does not count against the suspects that waited, and the task is tried alone once more."""
    recovery = concurrent()
    recovery.died(death(), [0, 1, 2])
    assert replaced(recovery, 0, [0, 1, 2]) == [0]
    assert recovery.died(death(), [0, 1, 2]) == []
    assert replaced(recovery, 0, [0, 1, 2]) == [0]
    assert recovery.died(death(), [0, 1, 2]) == [0]
    assert [len(recovery.deaths(seq)) for seq in (1, 2)] == [1, 1]
    assert replaced(recovery, 0, [1, 2]) == [1]


# -------------------------------------------------------------------------------------------- waiting tasks


def test_all_is_normal_until_a_death_and_again_after_the_recovery(death: Deaths) -> None:
    """`active` is False before any death and after the recovery, so the scheduler need not ask."""
    recovery = blocking()
    assert not recovery.active
    recovery.died(death(), [0])
    recovery.down(0)
    assert recovery.active
    recovery.wait(0, 0)
    assert recovery.next_for(0, 0) is None  # still down
    assert recovery.in_hand(0, 1) == 0
    recovery.up(0)
    assert sent(recovery, 0, in_hand=0) == [0]
    recovery.answered(0, 0)
    assert sent(recovery, 0, in_hand=0) == []
    assert not recovery.active


def test_a_worker_that_ended_gets_nothing(death: Deaths) -> None:
    """Tasks that waited for the worker are void, and so is a suspect on trial."""
    recovery = concurrent()
    recovery.died(death(), [0, 1])
    assert replaced(recovery, 0, [0, 1]) == [0]
    recovery.void(0)
    assert recovery.next_for(0, 0) is None
    assert recovery.free(0)


# -------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("most", [0, 1, 3])
def test_each_worker_has_its_own_restarts(most: int, death: Deaths) -> None:
    """A worker is replaced `max_restarts` times, however often the others are."""
    recovery = blocking(max_restarts=most)
    for _ in range(most):
        recovery.died(death(0), [])
        assert recovery.may_replace(0)
    recovery.died(death(0), [])
    assert not recovery.may_replace(0)
    assert recovery.may_replace(1)
