"""Which node is left alone for a while, and when an epoch fails because no node delivers."""

from __future__ import annotations

import pytest

from asyncloader.service.client.node_health import NodeHealth, node_order


def fail(progress: NodeHealth, now: float, *, every: int = 0, tasks: int = 1, address: str = "a") -> None:
    """A worker connection that was just opened is lost."""
    progress.connected(address)
    progress.lost(address, "the end", now, tasks, 0, every, now)


def test_a_node_that_delivers_nothing_is_left_alone_for_longer_each_time() -> None:
    """The rest is at most three seconds; connections lost at one time count once, and the first batch resets it."""
    progress = NodeHealth(60)
    rests, now = [], 0.0
    for _ in range(9):
        now += 5
        for _ in range(4):
            progress.lost("a", "the end", now - 1, 1, 0, 0, now)
        rests.append(progress.rest("a", now))
    assert rests == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0])
    assert progress.rest("b", now) == 0
    assert progress.failures("a", now + 61) == 0
    progress.lost("a", "the end", now, 9, 5, 5, now)
    assert progress.rest("a", now) == progress.failures("a", now) == 0


def test_no_progress() -> None:
    """Reported once three connections with tasks were lost without an answer, in at least `wait` seconds."""
    progress = NodeHealth(60)
    for now in range(0, 70, 10):
        assert now == 60 or progress.problem(7, False, now) is None
        fail(progress, now, every=7)
    progress.refused("b", "Connection refused\n\x1b[2J")
    text = progress.problem(7, False, 61)
    assert text is not None
    assert "for 61 seconds, and 7 connections" in text
    assert "a: connected 7 times, 0 batches, 7 times nothing before the end (last: the end)" in text
    assert "b: not connected (Connection refused\\n\\x1b[2J)" in text
    assert progress.problem(7, True, 61) is None  # a node is busy, perhaps for hours
    assert progress.problem(8, False, 61) is None  # a batch has arrived


@pytest.mark.parametrize(
    "ends",
    [
        [(0, 0, 1), (60, 0, 1)],  # twice only
        [(0, 0, 1), (61, 0, 1), (122, 0, 1)],  # a connection that lasted longer than `wait` is no failure
        [(0, 0, 1), (30, 1, 1), (60, 1, 1)],  # a batch arrived in between
        [(0, 0, 0), (30, 0, 0), (60, 0, 0)],  # no task was outstanding
    ],
)
def test_what_is_no_lack_of_progress(ends: list[tuple[int, int, int]]) -> None:
    """None of these is reported, however long ago the last batch was."""
    progress = NodeHealth(60)
    for now, every, tasks in ends:
        fail(progress, now, every=every, tasks=tasks)
    now, every, _ = ends[-1]
    assert progress.problem(every, False, now) is None


def test_the_least_loaded_comes_first_and_equal_ones_take_turns() -> None:
    """So workers are spread evenly from the beginning, and again after a node has died."""
    assert node_order([0.5, 0.0, 0.25], 7) == [1, 2, 0]
    assert [node_order([0, 0, 0], turn) for turn in range(3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert node_order([], 3) == []


def test_a_node_that_fails_comes_last() -> None:
    """The load of a failing node does not matter."""
    assert node_order([0.5, 0.0, 0.25], 0, [0, 1, 0]) == [2, 0, 1]
