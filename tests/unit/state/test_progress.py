"""Positions of epochs whose batches are delivered in any order, some of them as errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.state.epoch_counter import EpochClock, Tally
from asyncloader.state.progress import Progress
from tests.drawn import scaled

EXPECTS = {"mode": "seeded", "kind": "map", "seed": 0, "batch_size": 1, "drop_last": False, "order": "stream"}


def made(resumed: dict[str, Any] | None = None) -> Progress:
    progress = Progress(EpochClock([], None, seeded=True), EXPECTS, None, resumed, None, 1, Tally())
    progress.config = SimpleNamespace(dataset=range(1000), iterable=False)  # type: ignore[assignment]
    return progress


def position(done: set[int]) -> tuple[int, list[int]]:
    """The first step that is not done, and the done steps beyond it."""
    step = next(each for each in range(len(done) + 1) if each not in done)
    return step, sorted(each for each in done if each > step)


def position_in(state: dict[str, Any]) -> tuple[int, list[int]]:
    return state["step"], state["beyond"]


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)), st.integers(0, 12))
@settings(max_examples=scaled(300), deadline=None)
def test_any_order(order: list[int], failing: set[int], resumed_after: int) -> None:
    """A failed step counts as done with the next batch or error.

    The state before the last delivery has the position before that delivery.
    """
    begun = set(order[:resumed_after])
    step, beyond = position(begun)
    progress = made({"step": step, "beyond": beyond, "sampler": None})
    done, failed, before, delivered = set(begun), set[int](), position(begun), False
    for task in order[resumed_after:]:
        progress.pulled(task, task)
        if task in failing:
            progress.failed(task)
            done |= failed
            failed = {task}
            assert position_in(progress.state()) == position(done)
            if delivered:
                assert position_in(progress.state_before_last()) == before
            continue
        before = position(done)
        done |= failed | {task}
        failed.clear()
        progress.delivered(task)
        delivered = True
        assert position_in(progress.state()) == position(done)
        assert position_in(progress.state_before_last()) == before
        assert position_in(progress.state()) == position(done)


def test_a_straggler_costs_nothing() -> None:
    """The steps after a straggler are kept as one range, however many there are."""
    progress = made()
    for step in range(1, 1000):
        progress.pulled(step, step)
        progress.delivered(step)
        assert progress._position.beyond == (range(1, step + 1),)
    progress.pulled(0, 0)
    progress.delivered(0)
    assert position_in(progress.state()) == (1000, [])
    assert position_in(progress.state_before_last()) == (0, list(range(1, 1000)))
