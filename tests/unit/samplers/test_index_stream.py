"""A plain sampler's indices from any position: sought, restored, or read and dropped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from tests.unit.samplers.stream_samplers import (
    SAMPLERS,
    SIZE,
    WRAPPERS,
    Eager,
    Plain,
    after,
    batched,
    numbered,
    own_generator,
    stream,
)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_iteration_goes_on_at_any_step(kind: str, wrapper: str) -> None:
    """A new sampler, with the generators in another state, goes on with the order that was begun."""
    make, wrap = SAMPLERS[kind], WRAPPERS[wrapper]
    torch.manual_seed(1)
    whole = [*stream(wrap(make()))]
    for steps in (0, 1, 4, len(whole) - 1, len(whole)):
        torch.manual_seed(1)
        running = stream(wrap(make()))
        pulled = [running.pull() for _ in range(min(len(whole), steps + 3))]
        assert [index for _, index in pulled] == whole[: len(pulled)]
        torch.manual_seed(2)
        resumed = stream(wrap(make()), **after(steps, running))
        rest = numbered(resumed)
        assert rest == list(enumerate(whole))[steps:]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_without_a_position_the_sampler_is_read_as_it_is(wrapper: str) -> None:
    """From the beginning the indices, and the random numbers drawn for them, are those of the bare sampler."""
    torch.manual_seed(3)
    expected = [*WRAPPERS[wrapper](RandomSampler(range(SIZE)))]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert [*stream(WRAPPERS[wrapper](RandomSampler(range(SIZE))))] == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_batches_are_those_of_torch(kind: str, drop_last: bool) -> None:
    """However the indices are read, they are cut as torch's `BatchSampler` cuts them, the last batch included."""
    torch.manual_seed(1)
    expected = [*BatchSampler(SAMPLERS[kind](), 5, drop_last)]
    torch.manual_seed(1)
    assert [*stream(BatchSampler(SAMPLERS[kind](), 5, drop_last))] == expected


@pytest.mark.parametrize("kind", ["random", "weighted", "eager"])
def test_resuming_leaves_the_global_generators_alone(kind: str) -> None:
    """The generators' states from which the order was drawn are set for the sampler only."""
    running = stream(batched(SAMPLERS[kind]()))
    running.pull()
    assert running.generators is not None
    assert set(running.generators) == {"global"}
    torch.manual_seed(8)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    list(stream(batched(SAMPLERS[kind]()), **after(1, running)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


def test_own_generator_goes_on_with_the_next_epoch() -> None:
    """After a resumed epoch the sampler's own generator has the state as if not stopped; no other generator is kept."""
    sampler = own_generator()
    first, second = [*sampler], [*sampler]
    running = stream(own_generator())
    running.pull()
    assert running.generators is not None
    assert set(running.generators) == {"own"}
    again = own_generator()
    assert [*stream(again, **after(1, running))] == first[1:]
    assert [*again] == second


def test_before_the_first_index_the_epoch_is_known() -> None:
    """A state taken before the first index resumes the order that the sampler's generator is about to give."""
    sampler = own_generator()
    assert len([*sampler]) == SIZE
    running = stream(batched(sampler))
    kept = after(0, running)
    assert [*stream(batched(own_generator()), **kept)] == [*running]


def test_indices_are_read_and_dropped_once_and_late() -> None:
    """No index is read before the first pull; then the indices before the position are read once."""
    sampler = Plain()
    resumed = stream(batched(sampler), step=5)
    assert sampler.read == 0
    assert resumed.pull() == (5, [15, 16, 17])
    assert sampler.read == 18


@pytest.mark.parametrize("kind", SAMPLERS)
def test_steps_delivered_out_of_order_are_left_out(kind: str) -> None:
    """Steps beyond the position that were delivered are passed over; the others keep their numbers."""
    torch.manual_seed(1)
    whole = [*stream(batched(SAMPLERS[kind]()))]
    torch.manual_seed(1)
    running = stream(batched(SAMPLERS[kind]()))
    for _ in range(6):
        running.pull()
    resumed = stream(batched(SAMPLERS[kind]()), beyond=frozenset({3, 5}), **after(2, running))
    assert [resumed.pull() for _ in range(3)] == [(2, whole[2]), (4, whole[4]), (6, whole[6])]


def test_an_error_of_the_sampler_is_its_own() -> None:
    """The sampler's error is raised unchanged, and numbers it drew from the global generators are put back."""

    class Failing(Eager):
        def __iter__(self) -> Iterator[Any]:
            torch.rand(3)
            raise KeyError("broken")

    running = stream(batched(Eager()))
    running.pull()
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="broken"):
        stream(batched(Failing()), **after(1, running)).pull()
    assert torch.equal(torch.get_rng_state(), before)
