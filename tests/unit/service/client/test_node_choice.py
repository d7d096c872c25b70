"""The node at which a worker is started, and the workers that move when a node is added."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.service.client.node_choice import node_order, to_move


def test_the_least_loaded_comes_first_and_equal_ones_take_turns() -> None:
    """So workers are spread evenly from the beginning, and again after a node has died."""
    assert node_order([0.5, 0.0, 0.25], 7) == [1, 2, 0]
    assert [node_order([0, 0, 0], turn) for turn in range(3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert node_order([], 3) == []


def test_a_node_that_fails_comes_last() -> None:
    """The load of a failing node does not matter."""
    assert node_order([0.5, 0.0, 0.25], 0, [0, 1, 0]) == [2, 0, 1]


def test_a_node_that_comes_gets_its_part() -> None:
    """A new node gets a share by its number of processes; the newest workers move."""
    assert to_move(["a", "a", "a", "a"], {"a": 1, "b": 1}) == [3, 2]
    assert to_move(["a", "a", "a", "a"], {"a": 3, "b": 1}) == [3]
    assert to_move(["a", "a", "a"], {"a": 1, "b": 1}) == [2]
    assert to_move(["a", "b"], {"a": 1, "b": 1, "c": 1}) == []
    assert to_move(["gone", "a"], {"a": 1, "b": 1}) == []
    assert to_move(["a"], {}) == []


@given(
    st.lists(st.sampled_from("abcdef"), max_size=24),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 8), min_size=1),
)
def test_moving_evens_out_and_ends(places: list[str], capacities: dict[str, int]) -> None:
    """Moved to the least loaded node, no worker would move again; no node is left with less than its share."""
    moved = to_move(places, capacities)
    after = Counter(place for number, place in enumerate(places) if number not in moved)
    total = sum(capacities.values())
    for number in moved:
        assert after[places[number]] >= int(len(places) * capacities[places[number]] / total)
    settled = [place for number, place in enumerate(places) if number not in moved]
    names = sorted(capacities)
    for turn in range(len(moved)):
        there = Counter(settled)
        settled.append(names[node_order([(there[name] + 1) / capacities[name] for name in names], turn)[0]])
    assert len(to_move(settled, capacities)) <= sum(place not in capacities for place in places)


def test_a_node_that_failed_attracts_nobody() -> None:
    """A worker that moved there would return, again in each epoch. Its present workers do not count as lost."""
    assert to_move(["a", "a", "b"], {"a": 1, "b": 1, "c": 1}) == [1]
    assert to_move(["a", "a", "b"], {"a": 1, "b": 1, "c": 1}, ["c"]) == []
    assert to_move(["a", "a", "a", "a"], {"a": 1, "b": 1, "c": 1}, ["b"]) == [3, 2]
    assert to_move(["a", "a", "b"], {"a": 1, "b": 1, "c": 1}, ["a"]) == [1]
    assert to_move(["a"], {"a": 1}, ["a"]) == []
