"""The epoch counter, and the calls of `set_epoch` on samplers and datasets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from asyncloader.samplers.seeded import SeededSampler
from asyncloader.state.epoch_counter import EpochClock


class Told:
    """A dataset, or a sampler without a readable epoch number, that records the calls of `set_epoch`."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.heard.append(epoch)


def distributed() -> DistributedSampler[int]:
    return DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[arg-type]


def clock(*samplers: Any, dataset: Any = (), seeded: bool = True) -> EpochClock:
    return EpochClock(list(samplers), dataset, seeded=seeded)


def test_torch_mode_leaves_samplers_and_datasets_to_the_user() -> None:
    """The begin and the end of an epoch call no `set_epoch`; only the user's own `set` does."""
    sampler, dataset = distributed(), Told()
    c = clock(sampler, dataset=dataset, seeded=False)
    c.begin()
    c.completed(0)
    assert (c.value, sampler.epoch, dataset.heard) == (0, 0, [])
    c.set(2)
    assert (sampler.epoch, dataset.heard) == (2, [2])


@pytest.mark.parametrize("seeded", [True, False])
def test_a_state_that_is_refused_is_taken_back(seeded: bool) -> None:
    """All epochs are as before, and so is the count of loaded states: iterators from before may advance the epoch."""
    sampler, dataset = SeededSampler(range(3), 1) if seeded else distributed(), Told()
    c = clock(sampler, dataset=dataset, seeded=seeded)
    c.set(2)
    take_back = c.restore(4, finished=False)
    assert (c.value, sampler.epoch, c.restored) == (4, 4, 1)
    take_back()
    assert (c.value, sampler.epoch, c.restored, dataset.heard[-1]) == (2, 2, 0, 2)
    bare = clock(seeded=seeded)
    bare.set(2)
    bare.restore(4, finished=True)()
    assert bare.value == 2


@pytest.mark.parametrize("seeded", [True, False])
def test_an_epoch_of_a_state_that_is_refused_changes_nothing(seeded: bool) -> None:
    """If a dataset or a sampler refuses the state's epoch, an iterator from before advances the epoch as ever."""
    sampler: Any = SeededSampler(range(3), 1) if seeded else distributed()
    c = clock(sampler, *(() if seeded else (Refusing(),)), dataset=Refusing(), seeded=seeded)
    with pytest.raises(ValueError, match="no such epoch: 4"):
        c.restore(4, finished=False)
    assert (c.value, sampler.epoch, c.restored) == (0, 0, 0)


@pytest.mark.parametrize("finished", [False, True])
def test_a_state_in_torch_mode_touches_a_sampler_only_if_it_must(finished: bool) -> None:
    """A sampler is set to the state's epoch unless it is in it already; to set the next epoch is up to the user."""
    sampler, dataset, silent = distributed(), Told(), Told()
    c = clock(sampler, silent, dataset=dataset, seeded=False)
    sampler.set_epoch(2)
    c.restore(2, finished=finished)
    assert sampler.epoch == 2
    c.restore(4, finished=finished)
    assert sampler.epoch == 4
    assert dataset.heard == silent.heard == []
    bare = clock(seeded=False)
    bare.restore(4, finished=finished)
    assert bare.value == 4 + finished


@pytest.mark.parametrize("epoch", [None, "1", 1.0])
def test_epochs_are_integers(epoch: Any) -> None:
    """Another type is a TypeError that names the value."""
    with pytest.raises(TypeError, match=f"epoch={epoch!r}"):
        clock().set(epoch)


class Refusing:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        raise ValueError(f"no such epoch: {epoch}")


def test_parts_without_epochs_are_left_out() -> None:
    """A `set_epoch` that is no method is not called, and an `epoch` that is no number is not read."""

    class Odd:
        set_epoch = None
        epoch = "first"

    class Words(Told):
        epoch = "first"

    words = Words()
    c = clock(Odd(), words, dataset=Odd())
    c.set(2)
    assert (c.value, words.heard) == (2, [2])


@given(st.lists(st.tuples(st.sampled_from(["set", "done", "stale", "begin"]), st.integers(0, 5)), max_size=12))
def test_clock_by_its_rules(moves: list[tuple[str, int]]) -> None:
    """After any moves in any order, the value is the last epoch set plus the number of its completions since."""
    sampler, dataset = SeededSampler(range(3), 1), Told()
    clocks = [clock(sampler, dataset=dataset), clock(dataset=dataset), clock(seeded=False)]
    value = 0
    for what, number in moves:
        for c in clocks:
            if what == "set":
                c.set(number)
            elif what == "begin":
                c.begin()
            else:
                c.completed(value if what == "done" else value + 1 + number)
        if what == "set":
            value = number
        elif what == "done":
            value += 1
        assert [c.value for c in clocks] == [value] * 3
    assert not dataset.heard or dataset.heard[-1] == value
