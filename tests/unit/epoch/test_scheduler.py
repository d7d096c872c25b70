from __future__ import annotations

from typing import Any

import pytest

from asyncloader.base.events import (
    Assign,
    Deliver,
    Died,
    Fail,
    Pull,
    Task,
)
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.errors import WorkerDied


def started(workers: int = 2, credits: int = 2, offers: int = 0, **options: Any) -> Scheduler:
    """A scheduler that has started and was offered the indices 0 to ``offers - 1``."""
    scheduler = Scheduler(workers=workers, credits=credits, **options)
    scheduler.started()
    for index in range(offers):
        scheduler.offered(index)
    return scheduler


def test_start_asks_for_all_credits() -> None:
    """At the start the sampler is asked for credits x workers indices, the number that torch draws."""
    assert Scheduler(workers=3, credits=2).started() == [Pull(6)]


def ahead(reorder_window: int, credits: int = 1) -> Scheduler:
    """Two workers: worker 0 has not answered task 0 yet, and worker 1 has answered its first tasks."""
    return started(
        workers=2, credits=credits, offers=2 * credits, assignment="least_loaded", reorder_window=reorder_window
    )


def test_held_back_batches_let_others_run_ahead() -> None:
    """While the head of the line is slow, each waiting batch makes room for one more, up to `reorder_window`."""
    s = ahead(2)
    assert s.completed(1, 1, "B") == [Pull(1)]
    assert s.offered("c") == [Assign(1, Task(0, 2, "c"))]
    assert s.completed(1, 2, "C") == [Pull(1)]
    assert s.offered("d") == [Assign(1, Task(0, 3, "d"))]
    assert s.completed(1, 3, "D") == []
    assert s.undelivered == 4


def test_what_ran_ahead_is_made_up_for() -> None:
    """Once the head was answered, a credit returns only when fewer batches than the credits are undelivered."""
    s = ahead(2)
    s.completed(1, 1, "B")
    s.offered("c")
    s.completed(1, 2, "C")
    s.offered("d")
    assert s.completed(0, 0, "A") == [Deliver(0, 0, "A"), Deliver(1, 1, "B"), Deliver(2, 1, "C")]
    assert s.delivered(0) == []
    assert s.delivered(1) == []
    assert s.delivered(2) == [Pull(1)]
    assert s.offered("e") == [Assign(0, Task(0, 4, "e"))]
    assert s.completed(0, 4, "E") == [Pull(1)]


def test_run_ahead_may_be_lowered() -> None:
    """A smaller window, for less memory, means fewer tasks from then on; outstanding tasks stay."""
    s = ahead(2)
    s.completed(1, 1, "B")
    s.offered("c")
    s.reorder_window = 1
    assert s.completed(1, 2, "C") == []
    s.reorder_window = 2
    assert s.completed(0, 0, "A")[-1] == Deliver(2, 1, "C")
    assert s.delivered(0) == []
    assert s.delivered(1) == [Pull(1)]


def test_one_worker_does_not_hold_everything() -> None:
    """A worker has at most its credits plus `reorder_window` undelivered batches: its ring has that number of slots."""
    s = started(workers=2, credits=1, offers=2, assignment="least_loaded", reorder_window=1)
    s.completed(1, 1, "B")
    assert s.offered("c") == [Assign(1, Task(0, 2, "c"))]
    s.completed(1, 2, "C")
    s.completed(0, 0, "A")
    s.delivered(0)
    assert s.delivered(1) == [Pull(1)]
    assert s.offered("d") == [Assign(0, Task(0, 3, "d"))]


def test_an_offer_beyond_what_may_run_ahead_is_refused() -> None:
    """The error has the number of undelivered batches and the limits."""
    s = ahead(1)
    s.offered("c")
    with pytest.raises(ValueError, match="3 undelivered, 1 credits x 2 workers, 1 ahead"):
        s.offered("d")


def test_the_first_turn_may_be_anybodys() -> None:
    """A stream that is resumed in its middle begins with the worker whose turn it was."""
    s = Scheduler(workers=3, credits=1, iterable=True, first_worker=2)
    assert s.started() == [
        Assign(2, Task(0, 0, None)),
        Assign(0, Task(0, 1, None)),
        Assign(1, Task(0, 2, None)),
    ]
    s = started(workers=3, first_worker=1)
    assert [s.offered(i)[0].worker for i in range(4)] == [1, 2, 0, 1]  # type: ignore[union-attr]


def test_round_robin_out_of_order_skips_a_worker_at_its_share() -> None:
    """With in_order=False a worker that has its share outstanding is passed over."""
    s = started(credits=1, offers=2, in_order=False)
    s.completed(1, 1, "B")
    s.delivered(1)
    assert s.offered("c") == [Assign(1, Task(0, 2, "c"))]
    s.completed(1, 2, "C")
    s.delivered(2)
    assert s.offered("d") == [Assign(1, Task(0, 3, "d"))]


def test_exhausted_worker_gets_no_more_and_its_tasks_are_void() -> None:
    """When a copy ends, its other tasks are void. The workers that still have data keep their credits."""
    s = started(iterable=True)  # tasks 0 and 2 at worker 0, 1 and 3 at worker 1
    s.completed(1, 1, "B")
    assert s.exhausted(0, 0) == [Deliver(1, 1, "B")]
    assert set(s.outstanding) == {3}
    assert s.delivered(1) == [Assign(1, Task(0, 4, None))]


def test_death_ends_the_epoch_with_its_error() -> None:
    """A worker's death is a `Fail`; later events have no effect."""
    s = started(offers=2)
    error = WorkerDied(0, 17, -9)
    (fail,) = s.died(Died(0, error))
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, WorkerDied)
    assert (fail.error.pid, fail.error.exitcode) == (17, -9)
    assert "max_worker_restarts" in str(fail.error)
    assert s.over
    assert s.completed(1, 1, "B") == []
    assert s.died(Died(1, error)) == []


def test_abandon_gives_what_nobody_will_take() -> None:
    """Abandoning the epoch returns the answers that wait for the head of the line, once; then the epoch is over."""
    s = started(offers=4)
    s.completed(1, 1, "B")
    s.completed(1, 3, "D")
    assert s.abandon() == [Deliver(1, 1, "B"), Deliver(3, 1, "D")]
    assert s.abandon() == []
    assert s.completed(0, 0, "A") == []
    assert s.over


@pytest.mark.parametrize(("workers", "credits"), [(0, 1), (1, 0), (-1, 2)])
def test_sizes_must_be_positive(workers: int, credits: int) -> None:
    """Without workers or credits nothing can be loaded; the error has both values."""
    with pytest.raises(ValueError, match=f"workers={workers}, credits={credits}"):
        Scheduler(workers=workers, credits=credits)


def test_offer_beyond_the_credits_is_refused() -> None:
    """An index beyond the credits is an error of the caller; the message has the counts."""
    s = started(workers=2, credits=1, offers=2)
    with pytest.raises(ValueError, match="beyond the credits: 2 undelivered, 1 credits x 2 workers, 0 ahead"):
        s.offered("c")


def test_answer_that_nobody_waits_for_is_refused() -> None:
    """An unknown or repeated answer is an error."""
    s = started(offers=1)
    with pytest.raises(ValueError, match="task 5 was answered but not outstanding"):
        s.completed(0, 5, "?")
    s.completed(0, 0, "A")
    with pytest.raises(ValueError, match="task 0 was answered but not outstanding"):
        s.completed(0, 0, "A")
