"""A model test of the rule that prevents deadlocks of the rings: credits, slots and copies.

The real scheduler, ring managers, rings and opener run between a model worker, which is a queue of tasks, and a
model consumer, which is a set of batches that it holds arbitrarily long. Every batch is filled with its own number,
so a slot that is overwritten while a view of it exists is detected at once.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncloader.base.events import Action, Assign, Deliver, Pull
from asyncloader.delivery.opener import Opener
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.inbox import Answer
from asyncloader.workers.ipc import segment, wire
from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.layout import FIRST_SLOT_BYTES, PAGE, slot_count
from asyncloader.workers.ipc.ring import Ring
from asyncloader.workers.ipc.ring_manager import RingManager
from asyncloader.workers.ipc.template import Template
from tests.drawn import scaled

SMALL, LARGE, HUGE = 40, FIRST_SLOT_BYTES // 8 + 100, FIRST_SLOT_BYTES // 8 * 3  # in int64, of the stamp


class Job(NamedTuple):
    """A task in a worker's queue, with the slot that it may write to."""

    epoch: int
    seq: int
    ring: Ring
    slot: int


class Machine(RuleBasedStateMachine):
    """One loader's life: epochs that end or are abandoned, with a consumer that keeps any batches."""

    @initialize(
        workers=st.integers(1, 3),
        credits=st.integers(1, 3),
        bounded=st.booleans(),
        in_order=st.booleans(),
        least_loaded=st.booleans(),
    )
    def make(self, workers: int, credits: int, bounded: bool, in_order: bool, least_loaded: bool) -> None:
        ring_bytes = slot_count(credits) * PAGE if bounded else None
        self.workers, self.credits = workers, credits
        self.in_order, self.least_loaded = in_order, least_loaded
        self.managers = [RingManager(credits, ring_bytes) for _ in range(workers)]
        self.rings: list[list[Ring]] = [[] for _ in range(workers)]
        self.jobs: list[deque[Job]] = [deque() for _ in range(workers)]
        self.statistics = Statistics()
        self.stamp = 0
        self.copies = 0
        self.line: deque[Deliver] = deque()
        self.held: list[tuple[int, torch.Tensor, Ring | None]] = []
        self.draining: set[int] = set()  # workers that have not dropped an abandoned epoch yet
        self.answered: dict[int, Answer] = {}  # of this epoch, made and not yet opened
        self.epoch = -1
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.opener = Opener(self.statistics)
        self.scheduler = Scheduler(
            workers=self.workers,
            credits=self.credits,
            in_order=self.in_order,
            assignment="least_loaded" if self.least_loaded else "round_robin",
            epoch=self.epoch,
        )
        self.carry_out(self.scheduler.started())

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Pull):
                for _ in range(action.number):
                    self.carry_out(self.scheduler.offered(None))
            elif isinstance(action, Assign):
                self.assign(action)
            else:
                assert isinstance(action, Deliver)
                self.line.append(action)

    def assign(self, action: Assign) -> None:
        """Assign as the pool does: a grown ring first, then a slot, then the task."""
        worker, task, _ = action
        manager = self.managers[worker]
        fresh = manager.replacement()
        if fresh is not None:
            fresh.close_fd()
            self.rings[worker].append(fresh)
        number, slot = manager.assign(task.epoch, task.seq)
        ring = self.rings[worker][-1]
        assert ring.number == number
        mine = [seq for seq, owner in self.scheduler._owner.items() if owner == worker]
        if slot == wire.NO_SLOT:
            # THE RULE: within its credits a task gets a slot, whatever the consumer holds.
            assert worker in self.draining or len(mine) > self.credits
        self.jobs[worker].append(Job(task.epoch, task.seq, ring, slot))

    # ------------------------------------------------------------------------------------------ the worker

    @precondition(lambda self: any(self.jobs))
    @rule(data=st.data(), count=st.sampled_from([SMALL, SMALL, SMALL, SMALL, LARGE, HUGE, 0]))
    def answer_one(self, data: st.DataObject, count: int) -> None:
        """A worker answers any of its tasks, as an asynchronous worker may."""
        worker = data.draw(st.sampled_from([w for w, jobs in enumerate(self.jobs) if jobs]))
        self.answer(worker, data.draw(st.integers(0, len(self.jobs[worker]) - 1)), count)

    @precondition(lambda self: any(self.jobs))
    @rule(slow=st.integers(-2, 2))
    def answer_all_but(self, slow: int) -> None:
        """Every worker answers all its tasks, except for a slow worker, whose task may be the first in order."""
        for worker, jobs in enumerate(self.jobs):
            while jobs and worker != slow:
                self.answer(worker, 0, SMALL)

    def answer(self, worker: int, place: int, count: int) -> None:
        jobs = self.jobs[worker]
        job = jobs[place]
        del jobs[place]
        self.stamp += 1
        batch = torch.full((count,), self.stamp)
        encoded = Encoder().encode((self.stamp, batch))
        slot, fd = job.slot, None
        if not encoded.nbytes:
            slot = wire.NO_SLOT
        elif slot >= 0 and encoded.nbytes <= job.ring.slot_bytes:
            encoded.write(job.ring._memory, slot * job.ring.slot_bytes)
        else:
            slot, fd = wire.ONEOFF, segment.create(encoded.nbytes)
            encoded.write(segment.map_segment(fd, encoded.nbytes), 0)
        result = wire.Result(job.epoch, job.seq, slot, encoded.nbytes, 0, 1, 0.0, same=False)
        ring = self.managers[worker].answered(job.epoch, job.seq, slot, encoded.nbytes)
        assert (ring is job.ring) == (slot >= 0)
        answer = Answer(result, Template(encoded.template), ring, fd)
        if job.epoch != self.epoch:
            answer.discard()
            return
        self.answered[job.seq] = answer
        self.carry_out(self.scheduler.completed(worker, job.seq, answer))

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def reset_done(self, data: st.DataObject) -> None:
        """A worker has dropped the tasks of older epochs, and reports it."""
        worker = data.draw(st.sampled_from(sorted(self.draining)))
        self.jobs[worker] = deque(job for job in self.jobs[worker] if job.epoch == self.epoch)
        self.managers[worker].reset_done(self.epoch)
        self.draining.discard(worker)

    # ------------------------------------------------------------------------------------------ the consumer

    @precondition(lambda self: self.line)
    @rule(keep=st.booleans())
    def take_one(self, keep: bool) -> None:
        """The consumer takes the next batch, and perhaps keeps it."""
        self.take(keep)

    @rule(count=st.integers(1, 30))
    def hoard(self, count: int) -> None:
        """The consumer takes and keeps many batches in a row, as fast as the workers make them."""
        for _ in range(count):
            if not self.line:
                self.answer_all_but(-1)
            if self.line:
                self.take(keep=True)
        if len(self.held) > 40:
            del self.held[10:]

    def take(self, keep: bool) -> None:
        item = self.line.popleft()
        answer: Answer = item.outcome
        del self.answered[item.seq]
        copied = self.opener.will_copy(answer)
        self.copies += copied
        stamp, batch = self.opener.open(answer)
        assert bool((batch == stamp).all())
        if keep:
            self.held.append((stamp, batch, None if copied else answer.ring))
        del batch, answer
        self.carry_out(self.scheduler.delivered(item.seq))

    @precondition(lambda self: self.held)
    @rule(every=st.integers(1, 4))
    def drop_many(self, every: int) -> None:
        """The consumer drops all its batches, or every second, third or fourth of them."""
        del self.held[::every]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """The consumer drops any of its batches."""
        del self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @precondition(lambda self: len(self.held) > 1)
    @rule(sure=st.integers(0, 2))
    def fork(self, sure: int) -> None:
        """The process forks, or the rings are made to believe so: lent slots are never used again."""
        for ring in (ring for rings in self.rings for ring in rings if not sure):
            ring.retire()

    @rule(sure=st.integers(0, 2))
    def abandon(self, sure: int) -> None:
        """The consumer leaves the epoch and begins another; the workers still have tasks of the old epoch."""
        if sure:
            return
        for answer in self.answered.values():
            answer.discard()
        self.answered.clear()
        self.line.clear()
        self.draining = set(range(self.workers))
        self.begin()

    # ---------------------------------------------------------------------------------------------- invariants

    @invariant()
    def held_batches_never_change(self) -> None:
        for stamp, batch, _ in self.held:
            assert bool((batch == stamp).all())

    @invariant()
    def copies_are_counted(self) -> None:
        if self.epoch_began():
            assert self.statistics.ring_copies == self.copies

    @invariant()
    def no_slot_is_in_two_states(self) -> None:
        if not self.epoch_began():
            return
        for worker, rings in enumerate(self.rings):
            for ring in rings:
                ring.reclaim()
                free = list(ring._free)
                held = filter(None, self.managers[worker].tasks.values())
                tasks = [slot for owner, slot in held if owner is ring]
                ready = [a.result.slot for a in self.answered.values() if a.ring is ring]
                states = [*free, *tasks, *ready, *ring._leases, *ring.retired]
                assert sorted(states) == list(range(ring.slots)), (free, tasks, ready, ring)
                lent = sum(lender is ring for _, _, lender in self.held)
                assert len(ring._leases) <= lent
                if worker not in self.draining:
                    assert len(tasks) + len(ready) <= self.credits * self.workers
                assert len(ring._leases) + len(ring.retired) <= ring.slots - ring.credits

    def epoch_began(self) -> bool:
        return getattr(self, "epoch", -1) >= 0

    def teardown(self) -> None:
        """Once the consumer has dropped all batches and the epoch is over, every slot that was not retired is free."""
        if not self.epoch_began():
            return
        for answer in self.answered.values():
            answer.discard()
        self.answered.clear()
        self.line.clear()
        self.held.clear()
        gc.collect()
        for worker, manager in enumerate(self.managers):
            manager.reset_done(self.epoch + 1)
            for ring in self.rings[worker]:
                ring.reclaim()
                assert sorted([*ring._free, *ring.retired]) == list(range(ring.slots))
                assert ring.leased == 0
            manager.close()
        del self.scheduler, self.managers, self.rings, self.jobs


Machine.TestCase.settings = settings(
    max_examples=scaled(100), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestNoDeadlock = Machine.TestCase
