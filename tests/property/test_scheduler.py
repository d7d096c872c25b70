"""The scheduler in a simulated pipeline, with random speeds, ends, credits and deaths: invariants hold at every step.

No batch is lost or repeated, nothing stalls, and only guilty tasks are quarantined.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.base.events import Action, Assign, Died, Fail, Finish, Poisoned
from asyncloader.epoch import reassignment
from asyncloader.epoch.reassignment import Reassignment
from asyncloader.epoch.scheduler import Assignment, Scheduler
from asyncloader.errors import TaskQuarantined, WorkerDied
from tests.drawn import scaled
from tests.property.scheduler_world import PLENTY, World, assignments, map_world, randoms


@settings(deadline=None, max_examples=scaled(600))
@given(
    options=st.fixed_dictionaries(
        {
            "workers": st.integers(1, 4),
            "credits": st.sampled_from([1, 2, 3, 14]),
            "count": st.integers(0, 40),
            "in_order": st.booleans(),
            "assignment": assignments,
            "reorder_window": st.integers(0, 12),
            "first_worker": st.integers(0, 3),
            "concurrent": st.booleans(),
            "poison": st.frozensets(st.integers(0, 29), max_size=3),
            "kills": st.integers(0, 6),
            "retirements": st.integers(0, 3),
            "prompt": st.booleans(),
            "varying": st.booleans(),
            "slow": st.none() | st.integers(0, 3),
        }
    ),
    random=randoms,
)
def test_every_index_comes_once_whatever_dies(options: dict[str, Any], random: Random) -> None:
    """With enough restarts each index is delivered once, as a batch or as poisoned, in order when asked, within the
    credits.

    A quarantined task was struck three times by deaths that it may have caused: at the head of a blocking worker's
    tasks, or the second and third time alone.
    """
    world = map_world(random, **options)
    world.run()
    world.check_delivered()
    world.check_end()


@settings(deadline=None, max_examples=scaled(200))
@given(
    options=st.fixed_dictionaries(
        {
            "workers": st.integers(1, 3),
            "credits": st.integers(1, 4),
            "assignment": assignments,
            "reorder_window": st.integers(0, 6),
            "concurrent": st.booleans(),
            "poison": st.frozensets(st.integers(0, 15), max_size=3),
            "kills": st.integers(0, 12),
        }
    ),
    random=randoms,
)
def test_no_innocent_task_is_quarantined(options: dict[str, Any], random: Random) -> None:
    """Kills from outside, however many, quarantine no task if they are recognizable as such, nor otherwise unless
    they strike a suspect's trial; neither do guilty neighbours. A poisonous task is found, and has killed three
    workers at most.
    """
    world = map_world(random, count=16, spared=True, **options)
    world.run()
    world.check_delivered()
    world.check_end()
    quarantined = {item.outcome.task.index for item in world.delivered if isinstance(item.outcome, Poisoned)}
    assert quarantined == options["poison"]


@settings(deadline=None, max_examples=scaled(200))
@given(
    options=st.fixed_dictionaries(
        {
            "workers": st.integers(1, 3),
            "credits": st.integers(1, 3),
            "in_order": st.booleans(),
            "assignment": assignments,
            "concurrent": st.booleans(),
            "max_restarts": st.integers(0, 2),
            "poison": st.frozensets(st.integers(0, 11), max_size=2),
            "kills": st.integers(0, 6),
            "retirements": st.integers(0, 4),
            "prompt": st.booleans(),
        }
    ),
    random=randoms,
)
def test_the_epoch_ends_with_the_first_death_beyond_the_restarts(options: dict[str, Any], random: Random) -> None:
    """A worker may die `max_restarts` times; the next death, and nothing else, is a `Fail`. Leaving by itself does
    not count. Batches before the failure were delivered once, and in order.
    """
    world = map_world(random, **options)
    world.run()  # its own checks hold that a Fail follows that death and no other
    world.check_delivered()
    if any(worker.deaths > options["max_restarts"] for worker in world.workers):
        assert isinstance(world.last[0], Fail)
    else:
        world.check_end()


@settings(deadline=None, max_examples=scaled(300))
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    credits=st.integers(1, 3),
    in_order=st.booleans(),
    assignment=assignments,
    first_worker=st.integers(0, 3),
    concurrent=st.booleans(),
    max_restarts=st.sampled_from([0, 1, PLENTY, PLENTY]),
    poisoned=st.booleans(),
    kills=st.integers(0, 6),
    retirements=st.integers(0, 3),
    spared=st.booleans(),
    random=randoms,
)
def test_every_copy_of_a_stream_is_read_to_its_end(
    lengths: list[int],
    credits: int,
    in_order: bool,
    assignment: Assignment,
    first_worker: int,
    concurrent: bool,
    max_restarts: int,
    poisoned: bool,
    kills: int,
    retirements: int,
    spared: bool,
    random: Random,
) -> None:
    """Replacements read on: each batch of each copy is delivered once, in its copy's order.

    A poisonous place ends the epoch, by three deaths over it; another place does only if it was struck by kills that
    were not recognizable as coming from outside.
    """
    scheduler = Scheduler(
        workers=len(lengths),
        credits=credits,
        in_order=in_order,
        iterable=True,
        assignment=assignment,
        first_worker=first_worker % len(lengths),
        max_restarts=max_restarts,
        concurrent=concurrent,
    )
    worker = random.randrange(len(lengths))
    poison = frozenset({(worker, lengths[worker] // 2)}) if poisoned and lengths[worker] else frozenset()
    world = World(
        scheduler,
        random,
        concurrent,
        max_restarts,
        lengths=lengths,
        poison=poison,
        kills=kills,
        retirements=retirements,
        spared=spared,
    )
    world.run()
    world.check_delivered()
    for number in range(len(lengths)):
        places = [item.outcome.place for item in world.delivered if item.worker == number]
        assert places == list(range(len(places)))
    if world.last == [Finish()]:
        assert not poison
        world.check_end()
        return
    (fail,) = world.last
    assert isinstance(fail, Fail)
    if isinstance(fail.error, TaskQuarantined):
        assert poison or not spared
    else:
        assert isinstance(fail.error, WorkerDied)
        assert any(each.deaths > max_restarts for each in world.workers)


@settings(deadline=None)
@given(workers=st.integers(1, 4), credits=st.integers(1, 3), ahead=st.integers(0, 12), random=randoms)
def test_a_slow_consumer_holds_nothing_back(workers: int, credits: int, ahead: int, random: Random) -> None:
    """Answers that arrive in order are never held back, so that `reorder_window` allows no further task."""
    world = map_world(
        random, workers=workers, credits=credits, count=60, assignment="least_loaded", reorder_window=ahead
    )

    def in_turn(moves: list[tuple[str, int]]) -> tuple[str, int]:
        head = min(world.scheduler.outstanding, default=-1)
        return random.choice([m for m in moves if m[0] != "answer" or world.workers[m[1]].queue[0].seq == head])

    world.run(in_turn)
    world.check_end()
    assert world.most <= credits * workers


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
    world = map_world(
        random,
        workers=workers,
        credits=credits,
        count=80,
        in_order=in_order,
        assignment=assignment,
        concurrent=True,
    )
    most = min(low, credits) * workers
    steps, settled = 0, False

    def choose(moves: list[tuple[str, int]]) -> tuple[str, int]:
        nonlocal steps, settled
        steps += 1
        if steps == when:
            world.scheduler.credits, world.changed = min(low, credits), True
        in_hand = world.scheduler.undelivered + (0 if world.ended_sampler else world.pulls)
        settled = settled or (steps > when and in_hand <= most)
        assert not settled or in_hand <= most
        assert not settled or in_hand == most or world.ended_sampler
        return random.choice(moves)

    world.run(choose)
    world.check_end()


def stream_world(random: Random, lengths: list[int], credits: int) -> World:
    scheduler = Scheduler(workers=len(lengths), credits=credits, iterable=True)
    return World(scheduler, random, concurrent=False, max_restarts=PLENTY, lengths=lengths)


@settings(deadline=None, max_examples=scaled(300))
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    credits=st.integers(1, 8),
    lowered=st.booleans(),
    random=randoms,
)
def test_streams_come_in_the_same_order_whatever_the_credits(
    lengths: list[int], credits: int, lowered: bool, random: Random
) -> None:
    """Raised and lowered at any time, or lowered for good: each worker's batches come once, in turn with those of the
    others that have some left. The void tasks of those that have ended count as some of those that were too many.
    """
    world = stream_world(random, lengths, credits)

    def choose(moves: list[tuple[str, int]]) -> tuple[str, int]:
        world.scheduler.credits = 1 if lowered else random.randint(1, credits)
        return random.choice(moves)

    world.run(choose)
    world.check_end()
    turns = [w for turn in range(max(lengths)) for w in range(len(lengths)) if turn < lengths[w]]
    assert [item.worker for item in world.delivered] == turns


@given(workers=st.integers(1, 4), low=st.integers(1, 3), high=st.integers(4, 8), random=randoms)
def test_a_streams_tasks_follow_the_credits(workers: int, low: int, high: int, random: Random) -> None:
    """Up with the next delivery, down with the next ones."""
    world = stream_world(random, [1000] * workers, high)
    world.scheduler.credits = low
    world.handle(world.scheduler.started)
    for credits in (low, high, low, high):
        world.scheduler.credits = credits
        for _ in range(20 * high * workers):
            world.move(*random.choice(world.moves()))
        while not world.line:
            world.move(*random.choice(world.moves()))
        assert world.scheduler.undelivered == credits * workers


# -------------------------------------------------------------------------- tests of the simulation's own checks


class Forgetful(Scheduler):
    """A planted bug: a dead worker's tasks are not assigned again."""

    def _assign_again(self, seq: int, worker: int) -> list[Action]:
        return []


class Hasty(Scheduler):
    """A planted bug: a dead worker's tasks are sent at once to the worker that is down."""

    def _assign_again(self, seq: int, worker: int) -> list[Action]:
        return [Assign(worker, self._unanswered_tasks[seq], self._recovery.suspected(seq))]


class Twofold(Scheduler):
    """A planted bug: a dead worker's tasks are also assigned under new numbers."""

    def _assign_again(self, seq: int, worker: int) -> list[Action]:
        return [*super()._assign_again(seq, worker), *self.offered(self._unanswered_tasks[seq].index)]


class Endless(Scheduler):
    """A planted bug: the restarts are never used up."""

    def died(self, event: Died) -> list[Action]:
        self._recovery.max_restarts = PLENTY
        return super().died(event)


@pytest.mark.parametrize("kind", [Forgetful, Hasty, Twofold, Endless])
def test_the_world_notices_a_planted_bug(kind: type[Scheduler]) -> None:
    """A scheduler that loses, doubles or misdirects tasks, or restarts without limit, is found in a few runs."""
    with pytest.raises((AssertionError, ValueError)):  # noqa: PT012 - which of them finds it is chance
        for seed in range(20):
            random = Random(seed)
            scheduler = kind(workers=2, credits=2, max_restarts=1)
            world = World(scheduler, random, concurrent=False, max_restarts=1, indices=list(range(12)), kills=4)
            world.run()
            world.check_delivered()


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("kills", [2, 4])
def test_the_world_notices_another_number_of_trials(
    concurrent: bool, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is tried once too little, or once too often, is found."""
    monkeypatch.setattr(reassignment, "KILLS", kills)
    world = map_world(Random(1), concurrent=concurrent, poison=frozenset({3}))
    with pytest.raises(AssertionError):  # noqa: PT012
        world.run()
        world.check_delivered()


def test_the_world_notices_suspects_that_are_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspects that are sent together to a concurrent worker are found."""
    monkeypatch.setattr(Reassignment, "next_for", lambda self, worker, _: next(iter(popped(self, worker)), None))
    world = map_world(Random(1), concurrent=True, poison=frozenset({3}))
    with pytest.raises(AssertionError, match="alone"):
        world.run()


def popped(books: Reassignment, worker: int) -> list[int]:
    waiting = books._waiting[worker]
    return [waiting.popleft()] if waiting and not books._down[worker] else []
