"""The plan of batches by length: the fewest batches in each window, and equal in all versions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.samplers.batch_plan import BatchPlan, Limits
from asyncloader.samplers.permutation import Permutation

LIMITS = st.builds(
    Limits,
    max_batch_size=st.none() | st.integers(1, 9),
    max_tokens=st.integers(40, 150),
    pad_to=st.sampled_from([1, 8]),
    padding=st.booleans(),
)


def allowed(limits: Limits, costs: list[int]) -> bool:
    tokens = len(costs) * max(costs) if limits.padding else sum(costs)
    return tokens <= (limits.max_tokens or tokens) and len(costs) <= (limits.max_batch_size or len(costs))


def fewest(limits: Limits, costs: list[int]) -> int:
    """The least number of allowed batches of neighbours, found by trying every cut."""
    best = [0]
    for stop in range(1, len(costs) + 1):
        best.append(1 + min(best[start] for start in range(stop) if allowed(limits, costs[start:stop])))
    return best[-1]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), LIMITS, st.integers(0, 2**64 - 1) | st.none())
def test_a_window_makes_the_fewest_batches(lengths: list[int], limits: Limits, seed: int | None) -> None:
    """Wherever the batch that could be fuller is, no cut of the window's order has fewer batches than the plan."""
    plan = BatchPlan(np.array(lengths), limits, 40, drop_last=False, seed=seed, epoch=0)
    batches = list(plan.batches(0))
    window = plan._window(0)
    assert len(plan) == len(batches) == fewest(limits, window.costs.tolist())
    # Sorted into the window's order, the batches are its pieces.
    offset = {index: offset for offset, index in enumerate(window.indices.tolist())}
    pieces = sorted([offset[index] for index in batch.tolist()] for batch in batches)
    assert [index for piece in pieces for index in piece] == list(range(len(lengths)))


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), LIMITS, st.integers(0, 2**64 - 1))
def test_only_the_last_batch_of_a_window_could_be_fuller(lengths: list[int], limits: Limits, seed: int) -> None:
    """Every other batch is full: it cannot take in its neighbour on the side from which it was not cut."""
    plan = BatchPlan(np.array(lengths), limits, 40, drop_last=False, seed=seed, epoch=0)
    window = plan._window(0)
    costs, size = window.costs.tolist(), len(lengths)
    offset = {index: offset for offset, index in enumerate(window.indices.tolist())}
    *others, last = ([offset[index] for index in batch.tolist()] for batch in plan.batches(0))
    for piece in others:
        if piece[0] < last[0]:
            assert not allowed(limits, costs[piece[0] : piece[-1] + 2])
        else:
            assert piece[0] > 0
            assert not allowed(limits, costs[piece[0] - 1 : min(size, piece[-1] + 1)])


def test_batches_are_for_ever() -> None:
    """The batches are written down here: a run resumed with a later version must go on with the same batches."""
    lengths = np.array([3, 9, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], np.uint8)

    def batches(limits: Limits, seed: int | None = 7, epoch: int = 2) -> list[list[int]]:
        plan = BatchPlan(lengths, limits, 8, drop_last=False, seed=seed, epoch=epoch)
        return [batch.tolist() for window in range(plan.windows) for batch in plan.batches(window)]

    assert batches(Limits(3)) == [[7, 4, 9], [12, 5, 11], [6, 3], [1, 13, 10], [8, 2, 0], [14]]
    assert batches(Limits(None, 20)) == [[11, 7], [12, 5], [4, 9, 6, 3], [1, 13], [10, 8, 2, 0], [14]]
    assert batches(Limits(4, 20, padding=False)) == [[11, 9, 5], [4, 3, 12, 6], [7], [10, 1], [0, 8, 2], [14, 13]]
    assert batches(Limits(None, 20), seed=None) == [[1, 5], [7, 4, 2], [0, 6, 3], [12, 14], [11, 13], [8, 10, 9]]


def test_samples_of_one_length_stay_in_the_shuffled_order() -> None:
    """The sorting is stable, so the order does not depend on the machine's way to sort."""
    lengths = np.tile(np.array([1, 2], np.uint8), 1000)
    plan = BatchPlan(lengths, Limits(10), 2000, drop_last=False, seed=3, epoch=1)
    shuffled = Permutation(2000, 3, 1)(np.arange(2000))
    expected = [*shuffled[shuffled % 2 == 1], *shuffled[shuffled % 2 == 0]]
    assert plan._window(0).indices.tolist() == expected


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    LIMITS,
    st.integers(0, 2**64 - 1),
    st.integers(2, 4),
    st.booleans(),
)
def test_the_batches_of_a_step_are_neighbours(
    lengths: list[int], limits: Limits, seed: int, ranks: int, drop_last: bool
) -> None:
    """The batches of a step are neighbours in one window's order.

    Where a window has too few left, a step has its last batches and the last batches of the windows after it.
    """
    plan = BatchPlan(np.array(lengths), limits, 16, drop_last, seed, epoch=0, ranks=ranks)
    places: list[tuple[int, int]] = []  # the window of each batch, and its number there
    samples: list[int] = []
    counts = []
    for window in range(plan.windows):
        offset = {index: offset for offset, index in enumerate(plan._window(window).indices.tolist())}
        batches = [batch.tolist() for batch in plan.batches(window)]
        ordered = sorted(range(len(batches)), key=lambda number: offset[batches[number][0]])
        places += [(window, ordered.index(number)) for number in range(len(batches))]
        counts.append(len(batches))
        samples += [index for batch in batches for index in batch]
        assert plan.find(len(places) - len(batches)) is not None
    assert len(plan) == len(places)
    assert len(set(samples)) == len(samples)
    assert drop_last or len(samples) == len(lengths)
    for start in range(0, len(places), ranks):
        step = sorted(places[start : start + ranks])
        if step[0][0] == step[-1][0]:
            numbers = [number for _, number in step]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) or drop_last
        else:
            for window, _ in step:
                there = [number for at, number in step if at == window]
                assert there == list(range(counts[window] - len(there), counts[window])) or drop_last


def test_steps_are_the_same_in_every_version() -> None:
    """The order of the steps is written down here, with two ranks and with one."""
    lengths = np.arange(1, 41) * 7 % 41
    one, two = (BatchPlan(lengths, Limits(4), 40, False, 5, epoch=2, ranks=ranks) for ranks in (1, 2))
    assert [int(batch[0]) for batch in one.batches(0)] == [27, 3, 10, 13, 37, 6, 23, 20, 34, 30]
    assert [int(batch[0]) for batch in two.batches(0)] == [13, 30, 3, 27, 20, 37, 10, 34, 6, 23]
