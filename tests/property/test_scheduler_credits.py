"""Credits are lowered when batches turn out to be large, and raised again: no batch is lost, and nothing stalls."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.epoch.scheduler import Assignment, Scheduler
from tests.drawn import scaled
from tests.property.recovery_world import map_world
from tests.property.scheduler_world import World, assignments, check_each_once, check_end, randoms


@settings(deadline=None, max_examples=scaled(300))
@given(
    workers=st.integers(1, 4),
    credits=st.integers(1, 12),
    count=st.integers(0, 60),
    in_order=st.booleans(),
    assignment=assignments,
    ahead=st.integers(0, 6),
    first_worker=st.integers(0, 3),
    random=randoms,
)
def test_credits_may_change_at_any_time(
    workers: int,
    credits: int,
    count: int,
    in_order: bool,
    assignment: Assignment,
    ahead: int,
    first_worker: int,
    random: Random,
) -> None:
    """Each index is delivered once, in order when asked; no index is pulled beyond the credits of that moment."""
    scheduler = Scheduler(
        workers=workers,
        credits=credits,
        in_order=in_order,
        assignment=assignment,
        reorder_window=ahead if in_order and assignment == "least_loaded" else 0,
        first_worker=first_worker % workers,
    )
    world = World(scheduler, random, list(range(100, 100 + count)), [], fifo=False)
    world.start()
    while moves := world.moves():
        world.move(*random.choice(moves))
        scheduler.credits = random.randint(1, credits)
        world.raised = True
    check_each_once(world)


@settings(deadline=None)
@given(
    workers=st.integers(1, 3),
    credits=st.integers(2, 8),
    low=st.integers(1, 3),
    when=st.integers(1, 30),
    assignment=assignments,
    in_order=st.booleans(),
    random=randoms,
)
def test_lowered_credits_are_kept_to(
    workers: int, credits: int, low: int, when: int, assignment: Assignment, in_order: bool, random: Random
) -> None:
    """Once the earlier tasks are delivered, the number of tasks in hand stays at the bound of the lowered credits."""
    scheduler = Scheduler(workers=workers, credits=credits, assignment=assignment, in_order=in_order)
    low = min(low, credits)
    world = World(scheduler, random, list(range(80)), [], fifo=False)
    world.start()
    steps, settled = 0, False
    while moves := world.moves():
        world.move(*random.choice(moves))
        steps += 1
        if steps == when:
            scheduler.credits, world.raised = low, True
        in_hand = scheduler.undelivered + (0 if world.ended_sampler else world.pulls)
        settled = settled or (steps > when and in_hand <= low * workers)
        if settled:
            assert in_hand <= low * workers
            assert world.ended_sampler or world.last or in_hand == low * workers
    check_end(world)


@settings(deadline=None, max_examples=scaled(300))
@given(
    options=st.fixed_dictionaries(
        {
            "workers": st.integers(1, 3),
            "credits": st.integers(1, 14),
            "count": st.integers(0, 30),
            "in_order": st.booleans(),
            "assignment": assignments,
            "reorder_window": st.integers(0, 4),
            "poison": st.frozensets(st.integers(0, 29), max_size=2),
            "kills": st.integers(0, 5),
            "retirements": st.integers(0, 2),
            "varying": st.booleans(),
        }
    ),
    random=randoms,
)
def test_workers_with_many_tasks_in_hand_may_die(options: dict[str, Any], random: Random) -> None:
    """Each index is delivered once, as a batch or as poisoned. Suspects are tried alone, and a death over many tasks
    convicts none of them: a task is given up only after two more deaths when it was alone.
    """
    world = map_world(random, concurrent=True, **options)
    world.run()
    world.check_delivered()
    world.check_end()


@settings(deadline=None, max_examples=scaled(300))
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    credits=st.integers(1, 8),
    random=randoms,
)
def test_streams_come_in_the_same_order_whatever_the_credits(lengths: list[int], credits: int, random: Random) -> None:
    """Raised and lowered at any time: each worker's batches come once, in turn with those of the others that have some
    left.
    """
    workers = len(lengths)
    scheduler = Scheduler(workers=workers, credits=credits, iterable=True)
    scheduler.credits = random.randint(1, credits)
    world = World(scheduler, random, [], lengths, fifo=True)
    world.credits = credits
    world.start()
    while moves := world.moves():
        world.move(*random.choice(moves))
        if not random.randrange(8):
            scheduler.credits = random.randint(1, credits)
    check_end(world)
    turns = [worker for turn in range(max(lengths)) for worker in range(workers) if turn < lengths[worker]]
    assert [item.worker for item in world.delivered] == turns


@given(workers=st.integers(1, 4), low=st.integers(1, 3), high=st.integers(4, 8), random=randoms)
def test_a_streams_tasks_follow_the_credits(workers: int, low: int, high: int, random: Random) -> None:
    """Up with the next delivery, down with the next ones."""
    scheduler = Scheduler(workers=workers, credits=high, iterable=True)
    scheduler.credits = low
    world = World(scheduler, random, [], [1000] * workers, fifo=True)
    world.credits = high
    world.start()
    for credits in (low, high, low, high):
        scheduler.credits = credits
        for _ in range(20 * high * workers):
            world.move(*random.choice(world.moves()))
        while not world.line:
            world.move(*random.choice(world.moves()))
        assert scheduler.undelivered == credits * workers


@given(credits=st.integers(2, 8), lengths=st.lists(st.integers(0, 3), min_size=1, max_size=3), random=randoms)
def test_workers_that_end_after_credits_were_lowered(credits: int, lengths: list[int], random: Random) -> None:
    """Their void tasks count as some of those that were too many: the others are never left without one."""
    scheduler = Scheduler(workers=1 + len(lengths), credits=credits, iterable=True)
    world = World(scheduler, random, [], [60, *lengths], fifo=True)
    world.start()
    scheduler.credits = 1
    while moves := world.moves():
        world.move(*random.choice(moves))
    check_end(world)
