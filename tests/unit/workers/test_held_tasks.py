"""Tasks that wait for the consumer to drop a batch: workers and a consumer as models, over real rings."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.workers.held_tasks import HeldTasks
from asyncloader.workers.ipc import wire
from asyncloader.workers.memory.ring import Anchor
from asyncloader.workers.memory.ring_manager import LARGE_SLOT, TRY_TASKS, RingManager
from tests.drawn import scaled

NBYTES = LARGE_SLOT


class Epoch:
    """A pool's managers and their workers, which take their tasks in order, and the consumer of their batches."""

    def __init__(self, workers: int, credits: int) -> None:
        self.managers = [RingManager(credits, None) for _ in range(workers)]
        self.held = HeldTasks(self.managers)
        self.held.wanted = True
        self.credits = credits
        self.inboxes: list[deque[tuple[int, int]]] = [deque() for _ in range(workers)]  # number, slot
        self.sent: list[list[int]] = [[] for _ in range(workers)]
        self.ready: dict[int, tuple[RingManager, Any, int]] = {}
        self.next_task = self.next_batch = 0
        self.views: deque[Anchor] = deque()
        self.trimmed: list[int] = []
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
            self.held.send(self.send)
        else:
            self.send(worker, 0, seq, b"")

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

    def work(self, worker: int) -> bool:
        """The worker makes its next batch; False if it has no task."""
        if not self.inboxes[worker]:
            return False
        seq, slot = self.inboxes[worker].popleft()
        manager = self.managers[worker]
        assert slot >= 0
        self.ready[seq] = manager, manager.answered(0, seq, slot, NBYTES), slot
        return True

    def ask(self, kept: int = 1) -> bool:
        """The consumer asks for the next batch, and keeps the last `kept`; False if it waits for it."""
        if self.next_batch not in self.ready:
            self.held.awaiting = 1
        if self.held.holding:
            self.held.reclaim()
            self.held.send(self.send)
        if self.next_batch not in self.ready:
            return False
        self.held.awaiting = 0
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
                assert sum(each.work(worker) for worker in range(workers))
        for worker, sent in enumerate(each.sent):
            assert sent == [*range(worker, worker + workers * len(sent), workers)]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("credits", [1, 2, 3])
def test_a_slow_consumer_has_one_batch_less_in_memory(workers: int, credits: int) -> None:
    """Each worker has `credits` slots, the consumer's batch among them, unless the consumer would have to wait."""
    with epoch(workers, credits) as each:
        for worker in range(workers):
            while each.work(worker):
                pass
        waits = 0
        for _ in range(30 * workers):
            while not each.ask():
                waits += 1
                for worker in range(workers):
                    each.work(worker)
            for worker in range(workers):
                while each.work(worker):
                    pass
        scarce = workers * credits <= 2
        assert waits <= 3 * scarce  # it has learned
        assert each.touched() == [max(2, credits) + (scarce and workers == 1)] * workers


@pytest.mark.parametrize("workers", [1, 3])
def test_a_fast_consumer_never_costs_a_worker_its_next_task(workers: int) -> None:
    """Once a worker was idle while the consumer waited, it always has a task, but for a try now and then."""
    with epoch(workers, 2) as each:
        idle = 0
        for round_ in range(10 * TRY_TASKS):
            while each.ask():
                pass
            for worker in range(workers):
                assert each.work(worker) or round_ == 0
                idle += not each.inboxes[worker]
        assert idle <= 12 * workers


def test_memory_that_a_burst_took_comes_back() -> None:
    """A fast consumer's third slot is given back when the consumer has been slow for a while, and stays untouched."""
    with epoch(2, 2) as each:
        for _ in range(8):
            while each.ask():
                pass
            each.work(0)
            each.work(1)
        assert each.touched() == [3, 3]
        for _ in range(40 * TRY_TASKS):
            for worker in (0, 1):
                while each.work(worker):
                    pass
            each.ask()
        assert each.touched() == [2, 2]
        assert len(each.trimmed) == 2


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
