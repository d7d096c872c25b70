"""When a task counts as late, and how many hedged tasks may cost other work."""

from __future__ import annotations

from collections import deque

from asyncloader.epoch.hedging import Hedging


def answer(hedging: Hedging, node: str, seconds: float, number: int, start: int = 0) -> None:
    """The node's only worker answers `number` tasks, each after `seconds`."""
    worker = ord(node)
    for seq in range(start, start + number):
        hedging.assigned(seq, worker, node, 10.0)
        hedging.answered(seq, worker, 10.0 + seconds)


def test_late_is_what_takes_longer_than_the_quickest_nodes_p99() -> None:
    """The limit is the quickest node's 99th percentile, however slow another node is and however often it is late."""
    hedging = Hedging()
    answer(hedging, "a", 1.0, 190)
    answer(hedging, "a", 5.0, 10)
    answer(hedging, "b", 2.0, 120)
    hedging.assigned(7, 1, "b", 100.0)
    assert hedging.late_at(7, 1) == 102.0
    assert hedging.late_at(7, 2) is None  # worker 2 does not have the task
    hedging.died(1)
    assert hedging.late_at(7, 1) is None


def test_what_is_late_before_a_node_has_answered_a_hundred() -> None:
    """No task is late before all nodes together have given 16 answers.

    Later a task is late at three times the longest time of all, or of the quickest node once that has 16 answers.
    """
    hedging = Hedging()
    hedging.assigned(900, 1, "a", 0.0)
    answer(hedging, "a", 1.0, 7)
    answer(hedging, "b", 4.0, 8)
    assert hedging.late_at(900, 1) is None
    answer(hedging, "b", 4.0, 1)
    assert hedging.late_at(900, 1) == 12.0
    answer(hedging, "a", 1.0, 16)
    assert hedging.late_at(900, 1) == 3.0
    answer(hedging, "b", 4.0, 100)
    answer(hedging, "a", 1.0, 92)
    assert hedging.late_at(900, 1) == 1.0


def test_the_next_epoch_begins_with_what_was_measured() -> None:
    """The times measured in the epoch before count until the node has new times."""
    took: dict[str, deque[float]] = {}
    answer(Hedging(took), "a", 1.0, 100)
    hedging = Hedging(took)
    hedging.assigned(900, 1, "a", 0.0)
    assert hedging.late_at(900, 1) == 1.0
    answer(hedging, "a", 9.0, 32)
    assert hedging.late_at(900, 1) == 9.0


def test_what_was_long_ago_is_forgotten() -> None:
    """A node that has become quicker is measured by its recent answers."""
    hedging = Hedging()
    answer(hedging, "a", 9.0, 320)
    answer(hedging, "a", 1.0, 224)
    hedging.assigned(900, 1, "a", 0.0)
    assert hedging.late_at(900, 1) == 1.0


def test_one_task_in_twenty_may_cost() -> None:
    """At most one task in 20 goes to a second worker that has other tasks."""
    hedging = Hedging()
    allowed = 0
    for number in range(400):
        answer(hedging, "a", 1.0, 1, start=number)
        while hedging.may_cost:
            hedging.costs()
            allowed += 1
    assert allowed == 20
