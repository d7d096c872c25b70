"""The scheduler in a simulated pipeline, with random speeds and random ends: invariants hold at every step."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.base.events import Died, Fail, Finish
from asyncloader.epoch.scheduler import Assignment, Scheduler
from asyncloader.errors import WorkerDied
from tests.property.scheduler_world import World, assignments, check_each_once, check_end, randoms


@settings(deadline=None)
@given(
    workers=st.integers(1, 4),
    credits=st.integers(1, 3),
    count=st.integers(0, 25),
    in_order=st.booleans(),
    fifo=st.booleans(),
    assignment=assignments,
    first_worker=st.integers(0, 3),
    random=randoms,
)
def test_map_dataset_delivers_every_index_once(
    workers: int,
    credits: int,
    count: int,
    in_order: bool,
    fifo: bool,
    assignment: Assignment,
    first_worker: int,
    random: Random,
) -> None:
    """Whatever the workers' speeds, each index is delivered once (in order when asked), within the credits."""
    scheduler = Scheduler(
        workers=workers, credits=credits, in_order=in_order, assignment=assignment, first_worker=first_worker % workers
    )
    world = World(scheduler, random, list(range(100, 100 + count)), [], fifo)
    world.run()
    check_each_once(world)


@settings(deadline=None)
@given(
    workers=st.integers(1, 4),
    credits=st.integers(1, 3),
    count=st.integers(0, 40),
    ahead=st.integers(0, 12),
    fifo=st.booleans(),
    varying=st.booleans(),
    slow=st.integers(0, 3),
    random=randoms,
)
def test_workers_run_ahead_within_their_bound(
    workers: int,
    credits: int,
    count: int,
    ahead: int,
    fifo: bool,
    varying: bool,
    slow: int,
    random: Random,
) -> None:
    """As far as batches are held back, and `reorder_window` allows, more tasks are assigned; each index is delivered
    once. The shell may lower and raise `reorder_window` at any time. One worker answers only when no other move is
    possible.
    """
    scheduler = Scheduler(workers=workers, credits=credits, assignment="least_loaded", reorder_window=ahead)
    world = World(scheduler, random, list(range(100, 100 + count)), [], fifo)
    world.start()
    while moves := world.moves():
        others = [move for move in moves if move != ("answer", slow)]
        world.move(*random.choice(others or moves))
        if varying:
            scheduler.reorder_window = random.randint(0, ahead)
            world.raised = True
    check_each_once(world)


@settings(deadline=None)
@given(workers=st.integers(1, 4), credits=st.integers(1, 3), ahead=st.integers(0, 12), random=randoms)
def test_a_slow_consumer_holds_nothing_back(workers: int, credits: int, ahead: int, random: Random) -> None:
    """Answers that arrive in order are never held back, so that `reorder_window` allows no further task."""
    scheduler = Scheduler(workers=workers, credits=credits, assignment="least_loaded", reorder_window=ahead)
    world = World(scheduler, random, list(range(60)), [], fifo=True)
    world.start()
    while moves := world.moves():
        head = min(scheduler.outstanding, default=-1)
        in_turn = [move for move in moves if move[0] != "answer" or world.queues[move[1]][0].seq == head]
        world.move(*random.choice(in_turn))
        assert world.most <= credits * workers
    check_end(world)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    credits=st.integers(1, 3),
    in_order=st.booleans(),
    assignment=assignments,
    first_worker=st.integers(0, 3),
    random=randoms,
)
def test_iterable_dataset_delivers_all_of_every_copy(
    lengths: list[int], credits: int, in_order: bool, assignment: Assignment, first_worker: int, random: Random
) -> None:
    """Copies that end at different times are all read to their end; the open tasks of an ended copy are void."""
    scheduler = Scheduler(
        workers=len(lengths),
        credits=credits,
        in_order=in_order,
        iterable=True,
        assignment=assignment,
        first_worker=first_worker % len(lengths),
    )
    world = World(scheduler, random, [], lengths, fifo=True)
    world.run()
    check_end(world)
    assert world.made == lengths
    assert len(world.delivered) == sum(lengths)


@settings(deadline=None)
@given(steps=st.integers(0, 30), iterable=st.booleans(), in_order=st.booleans(), random=randoms)
def test_death_at_any_time_is_the_last_word(steps: int, iterable: bool, in_order: bool, random: Random) -> None:
    """A death gives one `Fail`; later events give no action, and the tasks that were open stay open."""
    scheduler = Scheduler(workers=2, credits=2, iterable=iterable, in_order=in_order)
    world = World(scheduler, random, list(range(40)), [40, 40], fifo=True)
    world.start()
    for _ in range(steps):
        world.move(*random.choice(world.moves()))
    unanswered = scheduler.outstanding
    world.carry_out(scheduler.died(Died(1, WorkerDied(1, 17, -9))))
    (fail,) = world.last
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, WorkerDied)
    assert fail.error.pid == 17
    assert scheduler.outstanding == unanswered
    while any(world.queues) or world.line:
        what, worker = random.choice([move for move in world.moves() if move[0] != "offer"])
        if what == "take":
            assert scheduler.delivered(world.line.popleft().seq) == []
        else:
            assert scheduler.completed(worker, world.queues[worker].popleft().seq, None) == []


def test_world_notices_a_second_end() -> None:
    """The simulation's check against an action after the end works."""
    world = World(Scheduler(workers=1, credits=1), Random(0), [], [], fifo=True)
    world.carry_out([Finish()])
    with pytest.raises(AssertionError, match="after the end"):
        world.carry_out([Finish()])
