"""Simulates the pipeline around the scheduler: sampler, workers and consumer, which move at random.

The asserts check invariants at every step. `recovery_world.py` simulates workers that die.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from asyncloader.base.events import (
    Action,
    Assign,
    Deliver,
    Finish,
    Pull,
    Task,
)
from asyncloader.epoch.scheduler import Scheduler

assignments = st.sampled_from(["round_robin", "least_loaded"])
randoms = st.randoms(use_true_random=False)


@dataclass
class World:
    """Sampler, workers and consumer, each of which moves when `random` says so."""

    scheduler: Scheduler
    random: Random
    indices: list[int]  # map datasets: the sampler's indices
    lengths: list[int]  # iterable datasets: batches in each worker's copy
    fifo: bool  # workers answer in the order of their tasks
    pulls: int = 0
    offered: int = 0
    ended_sampler: bool = False
    queues: list[deque[Task]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    void: set[int] = field(default_factory=set)
    made: list[int] = field(default_factory=list)  # batches that each worker has made
    line: deque[Deliver] = field(default_factory=deque)
    assigned: dict[int, int] = field(default_factory=dict)
    delivered: list[Deliver] = field(default_factory=list)
    last: list[Action] = field(default_factory=list)
    answers: int = 0  # in order: the number of answers, whether handed on or held back
    handed_on: int = 0
    raised: bool = False  # `reorder_window` was changed: it counts from the next answer or delivery on
    most: int = 0  # the most tasks that were undelivered at one time

    def __post_init__(self) -> None:
        self.ahead = self.scheduler.reorder_window  # the scheduler's own may be lowered later
        self.credits = self.scheduler.credits  # this, too
        self.turn = self.scheduler._next_worker
        self.queues = [deque() for _ in range(self.scheduler.workers)]
        self.made = [0] * self.scheduler.workers

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.last, f"{action} after the end"
            if isinstance(action, Pull):
                self.pulls += action.number
                assert action.number > 0
                assert self.scheduler.undelivered + self.pulls <= self.limit()  # also after it was lowered
            elif isinstance(action, Assign):
                self.assign(action)
            elif isinstance(action, Deliver):
                self.handed_on += 1
                self.line.append(action)
            else:
                self.last.append(action)
        self.most = max(self.most, self.scheduler.undelivered)
        assert self.scheduler.undelivered <= self.credits * self.scheduler.workers + self.ahead
        assert sum(map(len, self.queues)) == len(self.scheduler.outstanding)
        if not (self.scheduler.iterable or self.ended_sampler or self.last or self.raised):
            assert self.scheduler.undelivered + self.pulls >= self.limit()  # no credit is idle

    def limit(self) -> int:
        """Return the number of tasks that may be undelivered or asked for now."""
        held = self.answers - self.handed_on if self.scheduler.assignment == "least_loaded" else 0
        return self.scheduler.credits * self.scheduler.workers + min(held, self.scheduler.reorder_window)

    def loads(self) -> list[int]:
        """Return the number of undelivered tasks of each worker."""
        taken = self.void.union(item.seq for item in self.delivered)
        found = [0] * self.scheduler.workers
        for seq, worker in self.assigned.items():
            found[worker] += seq not in taken
        return found

    def assign(self, action: Assign) -> None:
        worker, task, _ = action
        assert worker not in self.gone
        assert task.seq == len(self.assigned)
        if self.scheduler.assignment == "least_loaded":
            share = self.credits + self.ahead
            free = [w for w, load in enumerate(self.loads()) if w not in self.gone and load < share]
            assert worker in free
            assert len(self.queues[worker]) == min(len(self.queues[w]) for w in free)
        elif self.scheduler.in_order and not self.scheduler.iterable:
            assert worker == (task.seq + self.turn) % len(self.queues)
        self.assigned[task.seq] = worker
        self.queues[worker].append(task)

    def moves(self) -> list[tuple[str, int]]:
        found = [("answer", w) for w, queue in enumerate(self.queues) if queue]
        if self.line:
            found.append(("take", 0))
        if self.pulls and not self.ended_sampler and not self.scheduler.iterable:
            found.append(("offer", 0))
        return found

    def move(self, what: str, worker: int) -> None:
        if what == "take":
            item = self.line.popleft()
            self.delivered.append(item)
            self.carry_out(self.scheduler.delivered(item.seq))
        elif what == "offer":
            self.offer()
        elif self.scheduler.iterable and self.made[worker] == self.lengths[worker]:
            seq = self.queues[worker][0].seq
            self.void |= {task.seq for task in self.queues[worker]}
            self.queues[worker].clear()
            self.gone.add(worker)
            self.carry_out(self.scheduler.exhausted(worker, seq))
        else:
            queue = self.queues[worker]
            place = 0 if self.fifo or self.scheduler.iterable else self.random.randrange(len(queue))
            task = queue[place]
            del queue[place]
            self.made[worker] += 1
            self.answers += 1
            self.carry_out(self.scheduler.completed(worker, task.seq, (worker, task)))

    def offer(self) -> None:
        if self.offered == len(self.indices):
            self.ended_sampler = True
            self.carry_out(self.scheduler.sampler_ended())
        else:
            self.pulls -= 1
            self.offered += 1
            (assign,) = self.scheduler.offered(self.indices[self.offered - 1])  # no index is lost
            self.carry_out([assign])

    def start(self) -> None:
        self.carry_out(self.scheduler.started())

    def run(self) -> None:
        self.start()
        while moves := self.moves():
            self.move(*self.random.choice(moves))


def check_end(world: World) -> None:
    """Check an epoch that ended by itself, with everything delivered once."""
    assert world.last == [Finish()]
    assert world.scheduler.over
    assert world.scheduler.undelivered == 0
    seqs = [item.seq for item in world.delivered]
    assert len(set(seqs)) == len(seqs)
    for item in world.delivered:
        assert item.outcome[0] == item.worker == world.assigned[item.seq]
    if world.scheduler.in_order:
        assert seqs == sorted(seqs)


def check_each_once(world: World) -> None:
    """Check an epoch that ended with each index delivered once, in order when asked."""
    check_end(world)
    given = [item.outcome[1].index for item in world.delivered]
    assert (given if world.scheduler.in_order else sorted(given)) == world.indices
