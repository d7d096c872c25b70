from __future__ import annotations

from typing import Any

import pytest

from asyncloader.base.events import (
    Action,
    Assign,
    Deliver,
    Died,
    Fail,
    Finish,
    Poisoned,
    PositionedIndex,
    Pull,
    Replace,
    Task,
)
from asyncloader.epoch.reassignment import quarantined
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.errors import TaskQuarantined, WorkerDied


def started(workers: int = 2, credits: int = 2, offers: int = 0, max_restarts: int = 3, **options: Any) -> Scheduler:
    """A scheduler that has started and was offered the indices 0 to ``offers - 1``."""
    scheduler = Scheduler(workers=workers, credits=credits, max_restarts=max_restarts, **options)
    scheduler.started()
    for index in range(offers):
        scheduler.offered(index)
    return scheduler


def death(worker: int, pid: int = 17, **options: Any) -> Died:
    return Died(worker, WorkerDied(worker, pid, -9), **options)


def dies(scheduler: Scheduler, worker: int, *pids: int, **options: Any) -> None:
    """The worker dies once per pid, and is replaced each time."""
    for pid in pids:
        scheduler.died(death(worker, pid, **options))
        scheduler.replaced(worker)


def task(seq: int) -> Task:
    return Task(0, seq, seq)


def failure(actions: list[Action]) -> BaseException:
    (fail,) = actions
    assert isinstance(fail, Fail)
    return fail.error


def test_new_tasks_for_a_worker_that_is_down_wait_behind_the_old_ones() -> None:
    """The sampler is still read, and the order of each worker's tasks is kept."""
    s = started(credits=2, offers=2)
    s.died(death(0))
    assert s.offered(2) == []
    assert s.offered(3) == [Assign(1, task(3))]
    assert s.replaced(0) == [Assign(0, task(0), suspect=True), Assign(0, task(2))]


def test_a_task_that_another_worker_took_over_counts_there() -> None:
    """The next tasks go to the worker that has fewer, with those that it took over."""
    s = started(workers=2, credits=5, offers=4, assignment="least_loaded")
    s.died(death(1))  # over task 1; task 3 goes to worker 0, which has 0, 2 and 3 then
    s.replaced(1)
    s.completed(1, 1, None)
    for index in (4, 5, 6):
        assert s.offered(index) == [Assign(1, task(index))]


def test_the_third_death_over_a_task_delivers_it_as_poisoned() -> None:
    """`Poisoned` with all three deaths is delivered instead of the batch; the replacement makes the others."""
    s = started(workers=1, offers=2)
    dies(s, 0, 17, 18)
    again = s.died(death(0, 19))
    assert again[0] == Replace(0)
    (deliver,) = again[1:]
    assert isinstance(deliver, Deliver)
    poisoned = deliver.outcome
    assert isinstance(poisoned, Poisoned)
    assert poisoned.task == task(0)
    assert [error.pid for error in poisoned.deaths] == [17, 18, 19]
    assert s.replaced(0) == [Assign(0, task(1))]


def test_what_is_pulled_for_a_poisoned_task_comes_behind_what_was_lost() -> None:
    """A pull may be answered before the actions behind it are done, so the pull is the last action.

    Otherwise a worker's tasks would not be in the order that shows over which of them it died.
    """
    s = started(workers=2, credits=2, offers=4, assignment="least_loaded", reorder_window=4)
    # Worker 0 has tasks 0 and 2; worker 1 has 1 and 3.
    dies(s, 1, 17, 18)  # over task 1; task 3 goes to worker 0
    s.offered(4)
    assert [seq for seq, owner in s._owner.items() if owner == 1] == [1, 4]
    *others, last = s.died(death(1, 19))
    assert others == [Replace(1), Assign(0, task(4))]
    assert isinstance(last, Pull)


def test_an_obstacle_ends_the_epoch() -> None:
    """If the stream cannot be read on, the worker is not replaced: the death is raised with the reason."""
    s = started(iterable=True)
    error = failure(s.died(death(0, obstacle="It was not replaced, because ...")))
    assert isinstance(error, WorkerDied)
    assert error.advice == "It was not replaced, because ..."
    assert error.pid == 17
    assert s.over


def test_without_restarts_the_advice_names_the_option() -> None:
    """With restarts used up the advice has their number."""
    assert "set max_worker_restarts" in str(failure(started(offers=2, max_restarts=0).died(death(0))))
    s = started(offers=2, max_restarts=1)
    s.died(death(0, at_work=False))
    s.replaced(0)
    assert "replaced 1 times" in str(failure(s.died(death(0, at_work=False))))


def test_a_quarantine_says_why_we_killed_its_workers() -> None:
    """The reason of the last death follows the worker's stderr, and then the advice."""
    first = WorkerDied(0, 17, -9)
    last = WorkerDied(0, 18, -9, "The loader killed it: it was at one task for 5.0 seconds.", trace="a stack")
    text = str(quarantined(Poisoned(task(4), (first, last))))
    *_, words, advice = text.splitlines()
    assert advice.startswith("The loader killed it: it was at one task for 5.0 seconds. Load these")
    assert words == "a stack"


@pytest.mark.parametrize("index", [[3, 4], PositionedIndex(40, [3, 4])], ids=["plain", "placed"])
def test_a_poisoned_task_beyond_the_restarts_ends_the_epoch(index: Any) -> None:
    """The error is the quarantine, which says more than the last death; it has the dataset's indices."""
    s = started(workers=1, max_restarts=2)
    s.offered(index)
    dies(s, 0, 17, 18)
    error = failure(s.died(death(0, 19)))
    assert isinstance(error, TaskQuarantined)
    assert error.indices == [3, 4]
    assert error.deaths == ((0, 17, -9), (0, 18, -9), (0, 19, -9))
    assert "The epoch ends with it. Worker 0 had been replaced 2 times" in str(error)


@pytest.mark.parametrize("index", [[3, 4], PositionedIndex(40, [3, 4])], ids=["plain", "placed"])
def test_beyond_the_restarts_a_death_from_outside_names_the_indices(index: Any) -> None:
    """A death from outside is no quarantine, however often the task was struck; the advice names the worker's task."""
    s = started(workers=1, max_restarts=3)
    s.offered(index)
    dies(s, 0, 17, 18, 19, outside=True)
    error = failure(s.died(death(0, 20, outside=True)))
    assert isinstance(error, WorkerDied)
    assert error.pid == 20
    assert error.advice == (
        "It was at the task for indices [3, 4]. Worker 0 had been replaced 3 times in this epoch (max_worker_restarts)."
    )


def test_a_death_over_several_tasks_tells_how_many() -> None:
    """The task that killed the worker is unknown: the advice has the number of tasks and the first task's indices."""
    s = started(workers=1, credits=3, offers=3, concurrent=True, max_restarts=0)
    assert "It was at 3 tasks, the first of them for indices 0. To have a worker" in str(failure(s.died(death(0))))


def test_a_stream_cannot_go_on_behind_a_poisoned_task() -> None:
    """Even with restarts left the epoch ends: the samples behind the task cannot be reached."""
    s = started(workers=1, iterable=True, max_restarts=9)
    dies(s, 0, 17, 18)
    error = failure(s.died(death(0, 19)))
    assert isinstance(error, TaskQuarantined)
    assert error.indices is None
    assert "A stream cannot go on behind it." in str(error)


def test_a_stream_that_ends_on_trial_leaves_no_suspects() -> None:
    """The tasks of a copy that has ended are void, and none of them is a suspect any more."""
    s = started(workers=1, credits=2, iterable=True, concurrent=True)
    s.died(death(0))
    assert s.replaced(0) == [Assign(0, Task(0, 0, None), suspect=True)]
    assert s.exhausted(0, 0) == [Finish()]
    assert not s._recovery._deaths
