"""Assignment of shards: whatever the pace, deaths and interruptions, the run equals that of workers in lockstep.

The parts are real (`assignment_world.py`). The expected batches follow from the rule (`assignment_rule.py`) or, with a
shuffle buffer, from a run in which everything happens at once.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from tests.drawn import scaled
from tests.property.assignment_cases import Case
from tests.property.assignment_rule import expected
from tests.property.assignment_world import World, passed

EXAMPLES = int(os.environ.get("ASYNCLOADER_CONFIGURATIONS") or scaled(150))
SETTINGS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any epoch of up to about fifty samples."""
    size = st.one_of(st.integers(0, 3), st.integers(0, 12))
    shards = draw(st.lists(st.lists(size, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6).map(tuple))
    samples = sum(map(sum, shards))
    number = st.integers(0, max(0, samples - 1))
    return Case(
        shards=shards,
        group=draw(st.sampled_from([1, 1, 3])),
        workers=draw(st.integers(1, 5)),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 6))),
        credits=draw(st.integers(1, 4)),
        shuffle=draw(st.one_of(st.just(0), st.integers(1, 12))),
        unit=draw(st.sampled_from([1, 1 << 20, 1 << 22])),
        sized=draw(st.booleans()),
        chunk=draw(st.integers(1, 5)),
        bad=draw(st.one_of(st.just(frozenset[int]()), st.frozensets(number, max_size=4))),
        broken=draw(st.one_of(st.just(frozenset[int]()), st.frozensets(number, max_size=1))),
        replaces=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        every=draw(st.sampled_from([1, 1, 3])),
    )


def run(case: Case, seed: int | None = None, deaths: int = 0, stops: tuple[int, ...] = ()) -> list[list[int]]:
    """Return all batches of a run that is saved and resumed after each of `stops` further batches."""

    async def parts() -> list[list[int]]:
        random = None if seed is None else Random(seed)
        batches: list[list[int]] = []
        state: dict[str, Any] | None = None
        for stop in (*stops, None):
            world = World(case, random, state, deaths)
            state = await world.run(stop)
            batches += world.batches
            if state is None:
                break
            state = passed(state)
        return batches

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(parts())


def check_epoch(case: Case, batches: list[list[int]]) -> None:
    """Check that each readable sample or its replacement was delivered once, in full batches except for the last."""
    size = case.batch_size or 1
    flat = sorted(number for batch in batches for number in batch)
    there = there_of(case)
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert len(flat) == len(set(flat))
    if case.drop_last:
        assert set(flat) <= set(there)
        assert len(flat) == len(there) // size * size
    else:
        assert flat == there


def there_of(case: Case) -> list[int]:
    """Return the samples of an epoch, ascending."""
    there = [number for number in range(case.samples) if number not in case.lost()]
    return [*case.substitutes(), *there] if case.skips and case.replaces else there


def check(case: Case, seed: int, deaths: int, stops: tuple[int, ...]) -> None:
    lockstep = run(case)
    check_epoch(case, lockstep)
    if not case.shuffle and not case.lost():
        assert lockstep == expected(case)
    assert run(case, seed) == lockstep, "another pace"
    assert run(case, seed, deaths) == lockstep, "deaths"
    assert run(case, seed, 0, stops) == lockstep, "resumed"
    assert run(case, seed, deaths, stops) == lockstep, "resumed, and deaths"


# Worker 3 gives back a sample, and its end is delivered, while workers with lower indices have delivered nothing. When
# the epoch is resumed they repeat their requests, and must not get samples that had not been given back when they asked
# first.
GIVEN_BACK = Case(
    shards=((1, 7, 0, 2), (0,)), workers=4, batch_size=3, credits=1, sized=False, chunk=1, broken=frozenset({9})
)

# The unreadable end of a range is given back together with a sample of the next range of the shard.
LOST_BESIDE = Case(shards=((1, 1),), sized=False, chunk=1, broken=frozenset({0}), in_order=False)

STOPS = st.lists(st.integers(0, 8), max_size=4).map(tuple)


@pytest.mark.thorough
@settings(max_examples=EXAMPLES, **SETTINGS)
@example(GIVEN_BACK, 0, 0, (2,))
@given(cases(), st.integers(0, 1 << 32), st.integers(0, 4), STOPS)
def test_an_epoch_is_that_of_workers_in_lockstep(case: Case, seed: int, deaths: int, stops: tuple[int, ...]) -> None:
    """Each sample once, full batches, and equal batches whatever the pace, the deaths and the interruptions."""
    event(f"{case.samples // 10 * 10} samples or more")
    check(case, seed, deaths, stops)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=20 * EXAMPLES, **SETTINGS)
@given(cases(), st.integers(0, 1 << 32), st.integers(0, 4), STOPS)
def test_many_epochs_are_those_of_workers_in_lockstep(
    case: Case, seed: int, deaths: int, stops: tuple[int, ...]
) -> None:
    """This holds for many more cases."""
    check(case, seed, deaths, stops)


@pytest.mark.thorough
@settings(max_examples=EXAMPLES, **SETTINGS)
@example(LOST_BESIDE, 0, 0, ())
@given(cases(), st.integers(0, 1 << 32), st.integers(0, 4), STOPS)
def test_out_of_order_every_sample_comes_once(case: Case, seed: int, deaths: int, stops: tuple[int, ...]) -> None:
    """With ``in_order=False`` the order depends on the pace; the samples and their number do not."""
    case = replace(case, in_order=False, drop_last=False, every=1)
    batches = run(case, seed, deaths, stops)
    size = case.batch_size or 1
    assert sorted(n for batch in batches for n in batch) == there_of(case)
    assert sum(len(batch) < size for batch in batches) <= 1


@pytest.mark.thorough
@settings(max_examples=EXAMPLES // 3, **SETTINGS)
@given(cases(), st.integers(0, 1 << 32), st.integers(0, 3))
def test_a_sample_that_raises_costs_its_batch_and_no_other_sample(case: Case, seed: int, deaths: int) -> None:
    """With ``on_error="raise"`` the consumer continues after an error: all others follow, in a reproducible order."""
    case = replace(case, skips=False, drop_last=False)
    lockstep = run(case)
    there = [number for number in range(case.samples) if number not in case.lost()]
    assert sorted(number for batch in lockstep for number in batch) == there
    assert run(case, seed) == run(case, seed, deaths) == lockstep


def test_a_sample_that_comes_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks fail for a log that assigns a range twice, or drops a range."""
    from asyncloader.remote.assignment import AssignmentLog

    case = Case(shards=((4,), (4,), (4,), (4,)))
    check(case, 1, 1, (2,))
    real = AssignmentLog.source
    for wrong in (lambda assigner, number: real(assigner, 0 if number == 2 else number), lambda assigner, number: ()):
        monkeypatch.setattr(AssignmentLog, "source", wrong)
        with pytest.raises(AssertionError):
            check(case, 1, 1, (2,))
