"""The scheduler of streams in a simulated pipeline: the sequence of batches follows from the streams alone."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.base.events import (
    Action,
    Assign,
    Deliver,
    Died,
    Finish,
    Replace,
)
from asyncloader.epoch.stream_scheduler import StreamScheduler, StreamTurns
from asyncloader.errors import WorkerDied
from tests.property.scheduler_world import randoms


class _Workers:
    """Workers that carry out their tasks in order, and read on in each stream where their predecessor stopped."""

    def __init__(self, scheduler: StreamScheduler, lengths: list[int], workers: int) -> None:
        self.scheduler = scheduler
        self.lengths = lengths
        self.made = [0] * len(lengths)
        self.tasks = [deque[tuple[int, int]]() for _ in range(workers)]  # number and stream
        self.down: list[int] = []
        self.ready: deque[tuple[int, tuple[int, int]]] = deque()
        self.taken: list[tuple[int, int]] = []
        self.finished = False
        self.most = 0

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Assign):
                assert action.worker == action.task.index % len(self.tasks)
                self.tasks[action.worker].append((action.task.seq, action.task.index))
            elif isinstance(action, Deliver):
                assert action.stream == action.outcome[0]
                self.ready.append((action.seq, action.outcome))
            elif isinstance(action, Replace):
                self.down.append(action.worker)
            else:
                assert isinstance(action, Finish)
                self.finished = True
        self.most = max(self.most, self.scheduler.undelivered)

    def answer(self, worker: int) -> None:
        seq, stream = self.tasks[worker].popleft()
        assert self.scheduler.copy(worker, seq) == stream
        if self.made[stream] == self.lengths[stream]:
            self.act(self.scheduler.exhausted(worker, seq))
            return
        self.made[stream] += 1
        self.act(self.scheduler.completed(worker, seq, (stream, self.made[stream] - 1)))

    def die(self, worker: int) -> None:
        self.tasks[worker].clear()
        # Killed from outside, so that no task is suspected.
        self.act(self.scheduler.died(Died(worker, WorkerDied(worker, 1, -9, ""), outside=True)))

    def replace(self) -> None:
        self.act(self.scheduler.replaced(self.down.pop()))

    def take(self) -> None:
        seq, outcome = self.ready.popleft()
        self.taken.append(outcome)
        self.act(self.scheduler.delivered(seq))


def in_turn(lengths: list[int], first: int) -> list[tuple[int, int]]:
    """Return the stream and the number of each batch: one of each stream that has data left, again and again."""
    order = [*range(first, len(lengths)), *range(first)]
    return [(stream, number) for number in range(max(lengths)) for stream in order if number < lengths[stream]]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    workers=st.integers(1, 7),
    credits=st.integers(1, 3),
    first=st.integers(0, 6),
    in_order=st.booleans(),
    deaths=st.integers(0, 3),
    random=randoms,
)
def test_the_sequence_is_that_of_the_streams(
    lengths: list[int], workers: int, credits: int, first: int, in_order: bool, deaths: int, random: Random
) -> None:
    """Whatever the number of workers, their speeds and their deaths: one batch of each stream that has data left, in
    turn; as a set if they may come in any order. No more batches are outstanding than there are credits.
    """
    workers, first = min(workers, len(lengths)), first % len(lengths)
    turns = StreamTurns(len(lengths), first, workers)
    scheduler = StreamScheduler(turns, workers=workers, credits=credits, in_order=in_order, max_restarts=9)
    world = _Workers(scheduler, lengths, workers)
    world.act(scheduler.started())
    while not world.finished:
        moves = [("answer", worker) for worker in range(workers) if world.tasks[worker]]
        moves += [("take", 0)] * bool(world.ready) + [("replace", 0)] * bool(world.down)
        kind, worker = random.choice(moves)
        if deaths and kind == "answer" and random.random() < 0.2:
            deaths -= 1
            world.die(worker)
        elif kind == "answer":
            world.answer(worker)
        else:
            world.take() if kind == "take" else world.replace()
    expected = in_turn(lengths, first)
    assert world.taken == expected if in_order else sorted(world.taken) == sorted(expected)
    assert not scheduler.undelivered
    assert world.most <= credits * workers


def test_an_impossible_answer_is_refused() -> None:
    """The end of a stream at a task that no worker has, or a second delivery, is a fault of the caller."""
    scheduler = StreamScheduler(StreamTurns(2), workers=1, credits=2)
    scheduler.started()
    with pytest.raises(ValueError, match="task 7 was answered but not outstanding"):
        scheduler.exhausted(0, 7)
    scheduler.completed(0, 0, "batch")
    scheduler.delivered(0)
    with pytest.raises(ValueError, match="delivered twice"):
        scheduler.delivered(0)
