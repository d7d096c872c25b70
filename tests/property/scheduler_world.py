"""Simulates the pipeline around the scheduler, with workers that die, leave and are replaced after a while.

The asserts check invariants at every step. `run` ends with the epoch, or fails if no part can move any more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from asyncloader.base.events import (
    Action,
    Assign,
    Deliver,
    Died,
    Fail,
    Finish,
    Poisoned,
    Pull,
    Replace,
    Task,
)
from asyncloader.epoch.scheduler import Assignment, Scheduler
from asyncloader.errors import TaskQuarantined, WorkerDied

PLENTY = 1000  # restarts

assignments = st.sampled_from(["round_robin", "least_loaded"])
randoms = st.randoms(use_true_random=False)


class Made(NamedTuple):
    """A batch: its worker and its task; `place` counts the batches of one copy of an iterable dataset."""

    worker: int
    task: Task
    place: int


class Strike(NamedTuple):
    """A death over a task: the process, the tasks that it had in hand, in the order in which they were sent, and
    whether the death is known to come from outside.
    """

    pid: int
    hand: tuple[int, ...]
    outside: bool


@dataclass
class Worker:
    number: int
    pid: int
    queue: list[Task] = field(default_factory=list)  # in the order in which they were sent
    up: bool = True  # the process exists
    started: bool = True  # its start-up code has run
    asked: bool = False  # a replacement has been requested
    ended: bool = False  # whether its copy of an iterable dataset has ended
    made: int = 0  # batches, counted over its processes
    deaths: int = 0


@dataclass
class World:
    """Sampler, workers, consumer and faults, each of which moves when `random` chooses it."""

    scheduler: Scheduler
    random: Random
    concurrent: bool
    max_restarts: int
    indices: list[int] = field(default_factory=list)  # map datasets: the sampler's indices
    lengths: list[int] = field(default_factory=list)  # iterable datasets: batches in each worker's copy
    poison: frozenset[Any] = frozenset()  # indices, or (worker, place), over which a worker dies
    kills: int = 0  # kills from outside, whether recognizable as such or not
    retirements: int = 0
    spared: bool = False  # no kill that looks like a task's doing strikes a task that was struck before
    prompt: bool = False  # indices are offered as soon as they are asked for
    varying: bool = False  # batches turn out larger or smaller: credits and the window are lowered and raised
    slow: int | None = None  # this worker answers only when no other move is possible
    most: int = 0  # the most tasks that were undelivered at one time
    depth: int = 0  # events that are being handled
    pulls: int = 0
    offered: int = 0
    ended_sampler: bool = False
    pids: int = 100
    workers: list[Worker] = field(default_factory=list)
    tasks: dict[int, Task] = field(default_factory=dict)  # all tasks that were ever assigned
    whose: dict[int, int] = field(default_factory=dict)  # task -> the worker that it was first given to
    strikes: dict[int, list[Strike]] = field(default_factory=dict)
    trials: set[tuple[int, int]] = field(default_factory=set)  # a worker's process, and a suspect task that it was sent
    answered: set[int] = field(default_factory=set)
    void: set[int] = field(default_factory=set)
    # poisonous index or place -> number of workers that it killed
    killed_by: dict[Any, int] = field(default_factory=dict)
    line: deque[Deliver] = field(default_factory=deque)
    delivered: list[Deliver] = field(default_factory=list)
    last: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turn = self.scheduler._next_worker
        self.most_credits = self.scheduler.credits
        self.most_ahead = self.scheduler.reorder_window
        self.changed = self.varying  # whether credits or the window were lowered and raised
        for number in range(self.scheduler.workers):
            self.pids += 1
            self.workers.append(Worker(number, self.pids))

    # ------------------------------------------------------------------------------------------ actions

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.last, f"{action} after the end"
            if isinstance(action, Pull):
                assert action.number > 0
                self.pulls += action.number
                assert self.scheduler.undelivered + self.pulls <= self.limit()  # also after it was lowered
                while self.prompt and self.pulls and not self.ended_sampler:
                    self.offer()
            elif isinstance(action, Assign):
                self.assign(action)
            elif isinstance(action, Replace):
                worker = self.workers[action.worker]
                assert not worker.up
                assert not worker.asked
                assert not worker.ended
                worker.asked = True
            elif isinstance(action, Deliver):
                self.line.append(action)
            else:
                self.last.append(action)

    def handle(self, decide: Callable[..., list[Action]], *arguments: Any) -> None:
        self.depth += 1
        self.carry_out(decide(*arguments))
        self.depth -= 1
        if not (self.last or self.depth):
            self.check()

    def check(self) -> None:
        """Check the invariants that hold between any two events."""
        scheduler = self.scheduler
        self.most = max(self.most, scheduler.undelivered)
        assert scheduler.undelivered <= self.most_credits * scheduler.workers + self.most_ahead
        sent = [task.seq for worker in self.workers for task in worker.queue]
        assert len(set(sent)) == len(sent)
        waiting = scheduler.outstanding.keys() - set(sent)
        assert len(scheduler.outstanding) == len(sent) + len(waiting)
        for worker in self.workers:
            given = [seq for seq in scheduler.outstanding if scheduler._owner[seq] == worker.number]
            assert [seq for seq in given if seq in sent] == [task.seq for task in worker.queue]  # else it blames others
            held = waiting & set(scheduler._recovery._waiting[worker.number])
            waiting -= held
            assert not held or not worker.up or (self.concurrent and self.tries(worker)), f"{held} wait for nothing"
        assert not waiting, f"{waiting} are forgotten"
        if not (scheduler.iterable or self.ended_sampler or self.changed):
            assert scheduler.undelivered + self.pulls >= self.limit()  # no credit is idle

    def limit(self) -> int:
        """Return the number of tasks that may be undelivered or asked for now."""
        scheduler = self.scheduler
        held = len(scheduler._reorder) if scheduler.assignment == "least_loaded" else 0
        return scheduler.credits * scheduler.workers + min(held, scheduler.reorder_window)

    def tries(self, worker: Worker) -> bool:
        """Whether the worker carries out a task that it was sent as a suspect."""
        return bool(worker.queue) and (worker.pid, worker.queue[0].seq) in self.trials

    def assign(self, action: Assign) -> None:
        worker, task = self.workers[action.worker], action.task
        assert worker.up, f"{action} for a worker that is down"
        assert not worker.ended
        assert self.tasks.setdefault(task.seq, task) == task
        assert task.seq not in self.answered | self.void
        assert task not in worker.queue
        first = self.whose.setdefault(task.seq, action.worker)
        if self.scheduler.assignment == "round_robin":
            assert action.worker == first
            if self.scheduler.in_order and not self.scheduler.iterable:
                assert first == (task.seq + self.turn) % len(self.workers)
        elif all(each.up for each in self.workers) and self.pids == 100 + len(self.workers):  # none has died
            self.check_least_loaded(worker)
        assert action.suspect == (task.seq in self.strikes)
        if self.concurrent:
            assert not self.tries(worker), "a suspect is to be tried alone"
            assert not (action.suspect and worker.queue), "a suspect is to be tried alone"
        worker.queue.append(task)
        if action.suspect:
            self.trials.add((worker.pid, task.seq))

    def check_least_loaded(self, worker: Worker) -> None:
        """Of the workers that have less than their share undelivered, it has the fewest tasks."""
        loads = Counter(self.scheduler._owner.values())
        loads[worker.number] -= 1  # this task
        share = self.most_credits + self.most_ahead
        free = [other for other in self.workers if not other.ended and loads[other.number] < share]
        assert worker in free
        assert len(worker.queue) == min(len(other.queue) for other in free)

    # -------------------------------------------------------------------------------------------- moves

    def moves(self) -> list[tuple[str, int]]:
        """Return the moves that are possible without a fault; there are some as long as the epoch is not over."""
        found = [("answer", w.number) for w in self.workers if w.up and w.started and w.queue]
        found += [("start", w.number) for w in self.workers if w.up and not w.started]
        found += [("replace", w.number) for w in self.workers if w.asked]
        if self.line:
            found.append(("take", 0))
        if self.pulls and not self.ended_sampler:
            found.append(("offer", 0))
        return found

    def faults(self) -> list[tuple[str, int]]:
        up = [w for w in self.workers if w.up]
        found: list[tuple[str, int]] = []
        if self.kills:
            found += [("crash", w.number) for w in up if not (self.spared and w.started and self.tries(w))]
            found += [("kill", w.number) for w in up]
        if self.retirements:
            found += [("leave", w.number) for w in up if w.started and not w.ended]
        return found

    def run(self, choose: Callable[[list[tuple[str, int]]], tuple[str, int]] | None = None) -> None:
        """Move until the epoch is over. `choose` chooses among the moves, by default at random."""
        choose = choose or self.random.choice
        self.handle(self.scheduler.started)
        while not self.last:
            moves = self.moves()
            assert moves, f"nothing can move, and the epoch is not over: {self.scheduler}"
            faults = self.faults()
            if faults and self.random.random() < 0.25:
                self.move(*self.random.choice(faults))
            else:
                self.move(*choose([move for move in moves if move != ("answer", self.slow)] or moves))
            if self.varying:
                self.scheduler.credits = self.random.randint(1, self.most_credits)
                self.scheduler.reorder_window = self.random.randint(0, self.most_ahead)
        self.check_over()
        self.delivered += self.line

    def check_over(self) -> None:
        """What still comes when the epoch is over gives no action, and open tasks stay open."""
        unanswered = self.scheduler.outstanding
        for worker in self.workers:
            for task in worker.queue:
                assert self.scheduler.completed(worker.number, task.seq, None) == []
        for item in self.line:
            assert self.scheduler.delivered(item.seq) == []
        assert self.scheduler.outstanding == unanswered

    def move(self, what: str, number: int) -> None:
        worker = self.workers[number]
        if what == "take":
            item = self.line.popleft()
            self.delivered.append(item)
            self.handle(self.scheduler.delivered, item.seq)
        elif what == "offer":
            self.offer()
        elif what == "answer":
            self.answer(worker)
        elif what == "start":
            worker.started = True
        elif what == "replace":
            self.pids += 1
            worker.pid, worker.up, worker.started, worker.asked = self.pids, True, False, False
            self.handle(self.scheduler.replaced, number)
        elif what in ("crash", "kill"):
            self.kills -= 1
            self.die(worker, outside=what == "kill")
        else:
            self.retirements -= 1
            self.die(worker, left=True)

    def offer(self) -> None:
        if self.offered == len(self.indices):
            self.ended_sampler = True
            self.handle(self.scheduler.sampler_ended)
            return
        self.pulls -= 1
        self.offered += 1
        self.handle(self.scheduler.offered, self.indices[self.offered - 1])

    def answer(self, worker: Worker) -> None:
        iterable = self.scheduler.iterable
        if iterable and worker.made == self.lengths[worker.number]:
            seq = worker.queue[0].seq
            mine = {s for s in self.scheduler.outstanding if self.scheduler._owner[s] == worker.number}
            self.void |= mine
            worker.queue.clear()
            worker.ended = True
            self.handle(self.scheduler.exhausted, worker.number, seq)
            return
        place = self.random.randrange(len(worker.queue)) if self.concurrent and not iterable else 0
        task = worker.queue[place]
        what = (worker.number, worker.made) if iterable else task.index
        if what in self.poison:
            self.killed_by[what] = self.killed_by.get(what, 0) + 1
            self.die(worker)
            return
        del worker.queue[place]
        worker.made += 1
        self.answered.add(task.seq)
        self.handle(self.scheduler.completed, worker.number, task.seq, Made(worker.number, task, worker.made - 1))

    def die(self, worker: Worker, *, left: bool = False, outside: bool = False) -> None:
        hand = tuple(task.seq for task in worker.queue)
        at_work = worker.started
        blamed = hand if self.concurrent else hand[:1]
        worker.queue.clear()
        worker.up = False
        struck: set[int] = set()
        if not left:
            worker.deaths += 1
            if at_work:
                for seq in blamed:
                    self.strikes.setdefault(seq, []).append(Strike(worker.pid, hand, outside))
                    struck.add(seq)
        guilty = {seq for seq in struck if len(self.held_against(seq)) >= 3}
        self.answered |= guilty
        death = WorkerDied(worker.number, worker.pid, -9)
        self.handle(self.scheduler.died, Died(worker.number, death, at_work, left, outside=outside))
        fails = worker.deaths > self.max_restarts or bool(guilty and self.scheduler.iterable)
        assert fails == (bool(self.last) and isinstance(self.last[0], Fail))
        if fails:
            self.check_failure(worker, blamed, sorted(guilty))

    def held_against(self, seq: int) -> list[Strike]:
        """Return the strikes that the task may have caused."""
        return [strike for strike in self.strikes.get(seq, ()) if not strike.outside]

    # ---------------------------------------------------------------------------------------------- ends

    def check_failure(self, worker: Worker, blamed: Sequence[int], guilty: list[int]) -> None:
        (fail,) = self.last
        assert isinstance(fail, Fail)
        if guilty:
            assert isinstance(fail.error, TaskQuarantined)
            assert [pid for _, pid, _ in fail.error.deaths] == [strike.pid for strike in self.held_against(guilty[0])]
        else:
            assert isinstance(fail.error, WorkerDied)
            assert fail.error.pid == worker.pid
            assert "max_worker_restarts" in fail.error.advice
            if blamed and worker.started and not self.scheduler.iterable:
                assert f"for indices {self.tasks[blamed[0]].index}. " in fail.error.advice

    def check_delivered(self) -> None:
        """At any end: no task is delivered twice, order is kept, and a quarantined task was struck three times."""
        seqs = [item.seq for item in self.delivered]
        assert len(set(seqs)) == len(seqs)
        if self.scheduler.in_order:
            assert seqs == sorted(seqs)
        for item in self.delivered:
            assert self.tasks[item.seq] == (item.outcome.task)
            if isinstance(item.outcome, Poisoned):
                self.check_poisoned(item.outcome)
            else:
                assert isinstance(item.outcome, Made)
                assert len(self.held_against(item.seq)) < 3
        assert all(number <= 3 for number in self.killed_by.values())

    def check_poisoned(self, poisoned: Poisoned) -> None:
        task = poisoned.task
        strikes = self.held_against(task.seq)
        assert [death.pid for death in poisoned.deaths] == [strike.pid for strike in strikes]
        assert len(strikes) == 3
        if self.concurrent:
            assert {strike.hand for strike in strikes[1:]} == {(task.seq,)}  # they leave no doubt
        else:
            assert {strike.hand[0] for strike in strikes} == {task.seq}
        assert not self.spared or task.index in self.poison, "an innocent task in quarantine"

    def check_end(self) -> None:
        """Check an epoch that ended by itself: all was delivered, and no record of a fault remains."""
        assert self.last == [Finish()]
        assert self.scheduler.over
        assert self.scheduler.undelivered == 0
        recovery = self.scheduler._recovery
        assert not any(recovery._waiting)
        assert all(seq is None for seq in recovery._alone)
        assert not recovery._deaths
        outcomes = [item.outcome for item in self.delivered]
        if self.scheduler.iterable:
            for worker, length in enumerate(self.lengths):
                assert [made.place for made in outcomes if made.worker == worker] == list(range(length))
            return
        indices = [outcome.task.index for outcome in outcomes]
        assert (indices if self.scheduler.in_order else sorted(indices)) == self.indices
        poisoned = {outcome.task.index for outcome in outcomes if isinstance(outcome, Poisoned)}
        assert self.poison.intersection(self.indices) <= poisoned


def map_world(
    random: Random,
    *,
    workers: int = 2,
    credits: int = 2,
    count: int = 12,
    in_order: bool = True,
    assignment: Assignment = "round_robin",
    reorder_window: int = 0,
    first_worker: int = 0,
    concurrent: bool = False,
    max_restarts: int = PLENTY,
    **options: Any,
) -> World:
    """A world whose sampler gives the indices below `count`. `reorder_window` and `first_worker` are ignored where
    they do not apply; `options` are those of `World`.
    """
    scheduler = Scheduler(
        workers=workers,
        credits=credits,
        in_order=in_order,
        assignment=assignment,
        reorder_window=reorder_window if in_order and assignment == "least_loaded" else 0,
        first_worker=first_worker % workers,
        max_restarts=max_restarts,
        concurrent=concurrent,
    )
    return World(scheduler, random, concurrent, max_restarts, indices=list(range(count)), **options)
