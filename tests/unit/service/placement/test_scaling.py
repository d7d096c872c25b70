"""The number of nodes that follows from a load, in a model of a service."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.service.placement.scaling import Load, Scaling

PROCESSES, START_S, CALM_S, PREFETCHED = 2, 8.0, 300.0, 32.0


def nodes_over_time(
    demand: Callable[[float], float], cost: float, seconds: float, most: int = 64, step: float = 0.1
) -> list[int]:
    """The number of nodes wanted in each second, where loaders take up to `demand` batches per second.

    Each batch costs a process `cost` seconds. Prefetched batches exist at the beginning: to replace them is a load like
    any other. A wanted node is ready after START_S seconds.
    """
    scaling, prefetched, history = Scaling(1, most, CALM_S), PREFETCHED, [1]
    ready, busy, tasks = [0.0], [0.0], [0.0]
    for tick in range(1, int(seconds / step) + 1):
        now = tick * step
        live = [number for number, since in enumerate(ready) if since <= now]
        due = demand(now) * step
        made = min(len(live) * PROCESSES * step / cost, PREFETCHED + due - prefetched)
        prefetched += made - min(due, prefetched + made)
        for number in live:
            busy[number] += made * cost / len(live)
            tasks[number] += made / len(live)
        if tick % round(1 / step) == 0:
            loads = {f"{number} {ready[number]}": Load(busy[number], int(tasks[number]), PROCESSES) for number in live}
            wanted = scaling.look(now, loads)
            for figures, new in ((ready, now + START_S), (busy, 0.0), (tasks, 0.0)):
                del figures[wanted:]
                figures.extend([new] * (wanted - len(figures)))
            history.append(wanted)
    return history


@given(st.floats(0.05, 90), st.floats(0.01, 5.0))
def test_a_steady_load(load: float, cost: float) -> None:
    """The number ends at the nodes that the load needs at 80 %, and never exceeds 1.2 times that plus 1."""
    needed = min(64, max(1, math.ceil(load / 0.8 / PROCESSES)))
    history = nodes_over_time(lambda _: load / cost, cost, 1500)
    assert abs(history[-1] - needed) <= 1
    assert max(history) <= needed * 1.2 + 1


@given(st.floats(0.01, 0.75), st.floats(0.01, 5.0))
def test_a_slow_trainer_gets_no_node_more(load: float, cost: float) -> None:
    """A trainer that takes less than 80 % of a node's batches gets one node, whatever a batch costs."""
    assert set(nodes_over_time(lambda _: load * PROCESSES / cost, cost, 600)) == {1}


def test_a_pause_costs_no_node_and_a_lower_load_does() -> None:
    """Two minutes of validation change nothing. After five minutes of a lower load, nodes are removed."""

    def demand(now: float) -> float:
        return 100 if now < 200 or 320 < now < 500 else 0 if now < 320 else 10

    history = nodes_over_time(demand, 0.1, 1200)
    assert history[100] == history[790] == 7
    assert history[-1] == 1
    assert all(after >= before for before, after in pairwise(history[:790]))


@pytest.mark.parametrize(("most", "end"), [(1, 1), (3, 3)])
def test_never_more_than_the_most(most: int, end: int) -> None:
    """The limit holds however great the load is."""
    assert max(nodes_over_time(lambda _: 1e6, 0.1, 200, most)) == end


def test_never_less_than_the_fewest() -> None:
    """The limit holds however long no loader asks for a batch."""
    scaling = Scaling(2, 8, CALM_S)
    assert {scaling.look(float(now), {"a": Load(0.0, 0, 2)}) for now in range(0, 3 * int(CALM_S), 10)} == {2}


def test_what_is_not_known_changes_nothing() -> None:
    """No change follows if no node is ready, if totals restart with other processes, or if no task ended."""
    scaling = Scaling(1, 8, CALM_S)
    for now in range(100):
        assert scaling.look(now, {}) == 1
    for now in range(100, 200):
        assert scaling.look(now, {"a": Load(50.0 * (now % 3), 50 * (now % 3), 2)}) == 1
    for now in range(200, 255):
        assert scaling.look(now, {"b": Load(0.0, 0, 2)}) == 1
