"""The state machine that ends processes, by examples and in all its histories. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.workers import shutdown
from asyncloader.workers.shutdown import BUDGET, Shutdown, State

# ------------------------------------------------------------------------------------------- the pure part: examples


def test_ladder_of_one_that_does_nothing() -> None:
    """Asked, terminated, killed, given up: at 0, 5, 6.5 and 8 seconds, and not before."""
    machine = Shutdown(1, 100.0)
    assert machine.state is State.RUNNING
    step = machine.step(100.0, {0})
    assert (step.ask, step.wait, machine.state) == ((0,), 5.0, State.ASKED)
    step = machine.step(104.5, {0})
    assert (step.ask, step.terminate, step.wait) == ((), (), 0.5)
    step = machine.step(105.0, {0})
    assert (step.terminate, step.wait, machine.state) == ((0,), 1.5, State.TERMINATED)
    step = machine.step(106.5, {0})
    assert (step.kill, step.wait, machine.state) == ((0,), 1.5, State.KILLED)
    step = machine.step(108.0, {0})
    assert (step.give_up, step.wait, machine.given_up) == ((0,), 0.0, (0,))
    machine.released(0)
    assert machine.over


def test_deaf_is_terminated_and_stopped_is_killed_at_once() -> None:
    """Steps that a process cannot notice are skipped, for that process alone."""
    machine = Shutdown(3, 0.0)
    step = machine.step(0.0, {0, 1, 2}, booting={1}, stopped={2})
    assert (step.ask, step.terminate, step.kill) == ((0,), (1,), (2,))
    assert step.wait == 1.5
    step = machine.step(1.5, {0, 1})
    assert (step.terminate, step.kill, step.release) == ((), (1,), (2,))


def test_hurry_kills_all_again_but_gives_no_more_time() -> None:
    """However often `hurry` is called, the deadline stays."""
    machine = Shutdown(1, 0.0)
    machine.step(0.0, {0})
    for number in range(160):  # up to less than the time of a kill before the deadline
        machine.hurry()
        step = machine.step(number / 20, {0})
        assert step.kill == (0,)
        assert step.wait == pytest.approx(BUDGET - number / 20)
    machine.hurry()
    assert machine.step(BUDGET, {0}).give_up == (0,)


def test_late_kill_still_has_its_time() -> None:
    """If the main process itself was stopped past the deadline, processes that it kills then still get time to die."""
    machine = Shutdown(1, 0.0)
    machine.step(0.0, {0})
    assert machine.step(1000.0, {0}).terminate == (0,)
    step = machine.step(1001.5, {0})
    assert (step.kill, step.give_up) == ((0,), ())
    assert step.wait == 0.5


# ------------------------------------------------------------------------------------ the pure part: all histories

delay = st.none() | st.floats(0, 4)
process = st.fixed_dictionaries(
    {"ask": delay, "terminate": delay, "kill": delay, "alone": delay, "booting": st.booleans(), "stops": delay}
)


@given(st.lists(process, max_size=5), st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.3, 3.0]), max_size=6), st.data())
def test_every_history_ends_in_time(plans: list[dict[str, Any]], late: list[float], data: st.DataObject) -> None:
    """Whatever dies when, the machine ends in time, never goes back, gives up only the killed, releases each once."""
    machine, now, overshoot = Shutdown(len(plans), 0.0), 0.0, 0.0
    dies = [plan["alone"] if plan["alone"] is not None else float("inf") for plan in plans]
    killed: dict[int, float] = {}
    ended: list[int] = []
    levels = [State.RUNNING] * len(plans)
    last = machine.state
    for turn in range(200):
        if machine.over:
            break
        if data.draw(st.integers(0, 9)) == 0:
            machine.hurry()
        alive = {number for number, when in enumerate(dies) if when > now}
        stopped = {n for n in alive if plans[n]["stops"] is not None and plans[n]["stops"] <= now}
        step = machine.step(now, alive, {n for n in alive - stopped if plans[n]["booting"]}, stopped)
        for name, level in (("ask", State.ASKED), ("terminate", State.TERMINATED), ("kill", State.KILLED)):
            for number in getattr(step, name):
                assert number in alive
                assert levels[number] < level or level is State.KILLED
                levels[number] = level
                heard = name == "kill" or number not in stopped
                if heard and plans[number][name] is not None:
                    dies[number] = min(dies[number], now + plans[number][name])
                if level is State.KILLED:
                    killed.setdefault(number, now)
        for number in step.release:
            assert number not in alive
        for number in step.give_up:
            assert number in alive
            assert now >= killed[number] + 0.5 - 1e-9
        for number in (*step.release, *step.give_up):
            machine.released(number)
            ended.append(number)
        assert machine.state >= last
        last = machine.state
        late_by = late[turn] if turn < len(late) else 0.0
        overshoot += late_by
        waits_for = max((dies[n] for n in range(len(plans)) if n not in ended), default=now)
        now = max(now, min(now + step.wait, waits_for)) + late_by
    assert machine.over
    assert sorted(ended) == list(range(len(plans)))
    if overshoot == 0:
        assert now <= BUDGET + 1e-6
    else:
        assert now <= BUDGET + 0.5 + overshoot + 1e-6


def test_the_whole_budget_is_its_parts() -> None:
    """The times for all states add up to at most the budget, so that there is time to die of SIGKILL."""
    assert shutdown._ASK_SECONDS + shutdown._TERMINATE_SECONDS + shutdown._KILL_SECONDS <= BUDGET
