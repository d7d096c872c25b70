"""The simulations detect planted faults, and their checks of the loader succeed, at sizes that take seconds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from asyncloader.epoch.scheduler import Scheduler
from asyncloader.events import Deliver
from tests.simulation import page, scale
from tests.simulation.__main__ import CASES
from tests.simulation.epoch import Case, simulate

SHORT = Case(3000, nodes=4, workers=16)


def test_misfortunes_cost_no_batch() -> None:
    """Whatever nodes are lost and however slow tasks are, each batch is delivered once; also without an order."""
    lossy = replace(SHORT, node_days=0.001)
    for case in (SHORT, lossy, replace(lossy, slow=0.01), replace(lossy, slow=0.01, in_order=False)):
        outcome = simulate(case)
        assert (outcome.delivered, outcome.lost, outcome.doubled) == (3000, 0, 0)
        assert (outcome.nodes_lost > 0) == (case.node_days < math.inf)
        assert outcome.again > 0 or case is SHORT
        assert simulate(case) == outcome


def test_what_costs_time() -> None:
    """Slow tasks make an ordered consumer wait, less if a second worker gets them; without an order it hardly waits."""
    slow = replace(SHORT, batches=20_000, slow=0.002)
    alone = simulate(replace(slow, hedged=False))
    assert alone.waited > 0.2
    assert alone.again == 0
    assert simulate(slow).waited < alone.waited / 2
    assert simulate(replace(slow, in_order=False)).waited < 0.05


def test_an_epoch_that_is_short() -> None:
    """Its late tasks are made twice as well; without slow tasks hardly any is."""
    for seed in range(5):
        short = replace(SHORT, batches=300, slow=0.01, seed=seed)
        outcome = simulate(short)
        assert outcome.waited < simulate(replace(short, hedged=False)).waited
        assert 0 < outcome.again <= 15
        assert simulate(replace(short, slow=0.0)).again <= 1


def test_a_scheduler_that_gives_a_batch_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two orders detects it."""
    handle = Scheduler.handle

    def twice(self: Scheduler, event: Any) -> Any:
        actions = handle(self, event)
        for action in actions:
            if isinstance(action, Deliver) and action.seq == 500:
                return [action._replace(outcome=499) if each is action else each for each in actions]
        return actions

    monkeypatch.setattr(Scheduler, "handle", twice)
    assert simulate(SHORT).doubled == 1
    assert simulate(replace(SHORT, in_order=False)).doubled == 1


@pytest.mark.parametrize(("samples", "ranks", "batch_size"), [(10**12, 50, 32), (100_003, 7, 5), (100_000, 100, 10)])
def test_the_order_of_all_ranks(samples: int, ranks: int, batch_size: int) -> None:
    """It is that of a single process, in parts that do not overlap."""
    order = scale.check_order(samples, ranks, batch_size)
    assert order.missing == 0
    assert order.samples >= min(samples, 4 * ranks * batch_size)


def test_an_order_with_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check detects the samples of a rank that are missing."""
    made = scale._view
    monkeypatch.setattr(scale, "_view", lambda sampler, size, rank, ranks: made(sampler, size, max(1, rank), ranks))
    assert scale.check_order(10**6, 10, 4).missing > 0


def test_the_page() -> None:
    """It has a row for every case, and the picture has a bar for every case."""
    outcomes = {name: simulate(replace(case, batches=200)) for name, case in CASES.items()}
    order, plans = scale.check_order(10**9, 10, 4), {2000: scale.plan_shards(2000, 10, 4)}
    costs = {8: (scale.scheduler_us(8, 100), scale.assignment_us(8, 100))}
    text = page.written("a command", 60.0, order, plans, costs, CASES, outcomes)
    assert all(f"| {name} | 200 |" in text for name in CASES)
    assert page.drawn(outcomes).count("<rect") == len(CASES)
