"""Tasks that wait for the consumer to drop a batch: workers and a consumer as models, over real rings."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from math import inf
from operator import le
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.workers.held_tasks import HeldTasks
from asyncloader.workers.ipc import wire
from asyncloader.workers.memory.holding_cost import HoldingCost
from asyncloader.workers.memory.ring import Anchor
from asyncloader.workers.memory.ring_manager import LARGE_SLOT, RingManager
from tests.drawn import scaled

NBYTES = LARGE_SLOT


class Epoch:
    """A pool's managers and their workers, which take their tasks in order, and the consumer of their batches."""

    def __init__(self, workers: int, credits: int) -> None:
        self.managers = [RingManager(credits, None) for _ in range(workers)]
        self.now, self.timer = 0.0, inf
        self.waits_since: float | None = None
        self.held = HeldTasks(self.managers, clock=lambda: self.now)
        self.held.wanted = True
        self.credits = credits
        self.inboxes: list[deque[tuple[int, int]]] = [deque() for _ in range(workers)]  # number, slot
        self.sent: list[list[int]] = [[] for _ in range(workers)]
        self.ready: dict[int, tuple[RingManager, Any, int]] = {}
        self.next_task = self.next_batch = 0
        self.views: deque[Anchor] = deque()
        self.trimmed: list[int] = []
        self.used: list[int] = []
        for manager in self.managers:  # a batch was seen
            manager.replacement()
            manager.assign(0, -1)
            manager.answered(0, -1, wire.ONEOFF, NBYTES)
        for _ in range(workers * credits):
            self.assign()

    def assign(self) -> None:
        """The scheduler's next task, for the workers in turn."""
        worker, seq = self.next_task % len(self.managers), self.next_task
        self.next_task += 1
        if self.managers[worker].large and self.held.hold(worker, 0, seq, b""):
            self.send_held()
        else:
            self.send(worker, 0, seq, b"")

    def send_held(self) -> None:
        """As the pool does."""
        self.timer = self.now + self.held.send(self.send)

    def send(self, worker: int, epoch: int, seq: int, packed: bytes) -> None:
        """As the pool does."""
        del packed
        manager = self.managers[worker]
        if (ring := manager.replacement()) is not None:
            ring.close_fd()
        _, slot = manager.assign(epoch, seq)
        if manager.unneeded is not None:
            assert manager.ring is not None
            assert manager.unneeded in manager.ring._free
            self.trimmed.append(manager.unneeded)
            manager.unneeded = None
        self.inboxes[worker].append((seq, slot))
        self.sent[worker].append(seq)

    def work(self, worker: int, seconds: float = 1.0) -> bool:
        """The worker has made its next batch, in this time; False if it has no task. The time does not pass: workers
        work side by side.
        """
        if not self.inboxes[worker]:
            return False
        seq, slot = self.inboxes[worker].popleft()
        manager = self.managers[worker]
        assert slot >= 0
        self.ready[seq] = manager, manager.answered(0, seq, slot, NBYTES), slot
        manager.cost.made(seconds)
        if self.held.holding:
            self.send_held()
        return True

    def wait(self) -> None:
        """All workers are without a task, and the consumer waits: time passes until the timer ends that."""
        assert self.timer < inf
        self.now = self.timer
        self.send_held()

    def ask(self, kept: int = 1) -> bool:
        """The consumer asks for the next batch, and keeps the last `kept`; False if it waits for it."""
        if self.next_batch not in self.ready:
            self.held.awaiting = 1
            self.waits_since = self.now if self.waits_since is None else self.waits_since
        if self.held.holding:
            self.held.reclaim()
            self.send_held()
        if self.next_batch not in self.ready:
            return False
        self.held.awaiting = 0
        if self.waits_since is not None:
            self.held.waited += self.now - self.waits_since
            self.waits_since = None
        _, ring, slot = self.ready.pop(self.next_batch)
        self.next_batch += 1
        assert ring.may_lend()
        view = ring.lend(slot, NBYTES)
        self.assign()
        self.views.append(view)
        del view
        while len(self.views) > kept:
            self.views.popleft()
        return True

    def touched(self) -> list[int]:
        """Slots of each ring that have memory."""
        return [0 if manager.ring is None else len(manager.ring.touched) for manager in self.managers]

    def close(self) -> None:
        """Free the rings."""
        self.views.clear()
        for manager in self.managers:
            manager.close()


@contextlib.contextmanager
def epoch(workers: int, credits: int) -> Generator[Epoch]:
    made = Epoch(workers, credits)
    try:
        yield made
    finally:
        made.close()


@settings(max_examples=scaled(60), deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.lists(st.integers(0, 4), max_size=150))
def test_no_batch_stays_behind(workers: int, credits: int, kept: int, steps: list[int]) -> None:
    """Whatever the workers' and the consumer's speeds: who waits gets the batch, and workers get tasks in order."""
    with epoch(workers, credits) as each:
        waiting = False
        for step in steps:
            if step < workers:
                each.work(step)
                waiting = waiting and not each.ask(kept)  # woken by the answer
            elif not waiting:
                waiting = not each.ask(kept)
        # All workers work while the consumer waits: it gets every batch.
        for _ in range(3 * workers * credits):
            while not each.ask(kept):
                if not sum(each.work(worker) for worker in range(workers)):
                    each.wait()
        for worker, sent in enumerate(each.sent):
            assert sent == [*range(worker, worker + workers * len(sent), workers)]


def run(workers: int, credits: int, batches: int, made_in: Callable[[int], float], taken_in: float) -> Epoch:
    """Run an epoch in simulated time.

    Args:
        workers: number of workers.
        credits: tasks that each may have outstanding.
        batches: number of batches that the consumer takes.
        made_in: seconds in which a worker makes the batch of this number.
        taken_in: seconds of the consumer's work between two batches.
    """
    with epoch(workers, credits) as each:
        busy = [inf] * workers  # until when
        asks, waiting = 0.0, False
        while each.next_batch < batches:
            for worker, inbox in enumerate(each.inboxes):
                if inbox and busy[worker] == inf:
                    busy[worker] = each.now + made_in(inbox[0][0])
            each.now = min(*busy, asks, each.timer)
            if each.now == each.timer:
                each.send_held()
            for worker, until in enumerate(busy):
                if until == each.now:
                    busy[worker] = inf
                    each.work(worker, made_in(each.inboxes[worker][0][0]))
            if waiting or each.now == asks:
                waiting = not each.ask()
                asks = inf if waiting else each.now + taken_in
        each.used = each.touched()
        return each


MADE_IN: dict[str, Callable[[int], float]] = {
    "even": lambda seq: 1.0,
    "by worker": lambda seq: 1.0 + 0.1 * (seq % 2),
    "a little uneven": lambda seq: Random(seq).uniform(0.9, 1.1),
    "uneven": lambda seq: max(0.1, Random(seq).gauss(1.0, 0.2)),
    "very uneven": lambda seq: Random(seq).expovariate(1.0),
    "sometimes long": lambda seq: 1.0 + 10.0 * (seq % 20 == 7),
}


@pytest.mark.parametrize("made", MADE_IN)
@pytest.mark.parametrize("taken_in", [0.001, 0.1, 0.45, 0.9, 3.0])
@pytest.mark.parametrize(("workers", "credits"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (5, 2)])
def test_slots_are_saved_at_little_cost(
    workers: int, credits: int, made: str, taken_in: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch takes as long as if no task were held back, but for 1 %, and never uses more slots."""
    saving = run(workers, credits, 600, MADE_IN[made], taken_in)
    monkeypatch.setattr(HeldTasks, "hold", lambda *_: False)
    free = run(workers, credits, 600, MADE_IN[made], taken_in)
    assert saving.now <= 1.01 * free.now
    assert all(map(le, saving.used, free.used))
    least = [max(2, credits)] * workers
    if workers > 1 and (made == "even" or (taken_in == 3.0 and made != "sometimes long")):
        assert saving.used == least


def test_memory_that_a_burst_took_comes_back() -> None:
    """A third slot that uneven batches took is given back when batches have been even for a while."""
    uneven = MADE_IN["very uneven"]
    assert run(2, 2, 300, uneven, 0.1).used == [3, 3]
    after = run(2, 2, 6000, lambda seq: uneven(seq) if seq < 300 else 1.0, 0.1)
    assert after.used == [2, 2]
    assert len(after.trimmed) >= 2


def test_a_long_time_of_work_pays_for_no_long_wait() -> None:
    """The cost is counted over a few tasks: what may be lost does not grow with the run."""
    cost = HoldingCost()
    for _ in range(100_000):
        cost.made(1.0)
    assert 0.1 < cost.left(0.0) < 1.0


def test_small_slots_and_other_consumers_hold_nothing() -> None:
    """Neither where the consumer does not take part, nor where slots are small."""
    with epoch(1, 2) as each:
        each.held.wanted = False
        each.work(0)
        each.work(0)
        each.ask()
        assert not each.held.holding
        assert [len(inbox) for inbox in each.inboxes] == [1]
    manager = RingManager(2, None)
    manager.replacement()
    assert not manager.large
    manager.close()


@pytest.mark.parametrize("end", ["void", "abandon", "close", "clear", "successor"])
def test_tasks_end_with_their_epoch_or_worker(end: str) -> None:
    """Held tasks are forgotten where the tasks that were sent are: the scheduler gives them to others, or to none."""
    with epoch(1, 2) as each:
        each.work(0)
        each.ask()
        assert each.held.holding
        manager = each.managers[0]
        assert len(manager.held) == 1
        each.held.clear() if end == "clear" else getattr(manager, end)()
        assert not manager.held
        each.held.send(each.send)
        assert not each.held.holding
        assert each.sent == [[0, 1]]
