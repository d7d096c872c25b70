"""The epoch counter, and the calls of `set_epoch` on samplers and datasets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, SequentialSampler

from asyncloader.samplers.seeded import SeededSampler
from asyncloader.state.epoch_counter import EpochClock


class Told:
    """A dataset, or a sampler without a number to be read, that hears of epochs."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.heard.append(epoch)


def distributed() -> DistributedSampler[int]:
    return DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[arg-type]


def clock(*samplers: Any, dataset: Any = (), seeded: bool = True) -> EpochClock:
    return EpochClock(list(samplers), dataset, seeded=seeded)


@pytest.mark.parametrize("seeded", [False, True])
def test_epochs_count_from_zero(seeded: bool) -> None:
    """Each completed epoch is followed by the next; an abandoned one by itself."""
    c = clock(None, SequentialSampler(range(3)), seeded=seeded)
    assert c.value == 0
    c.begin()
    assert c.value == 0
    for epoch in range(3):
        c.completed(epoch)
        assert c.value == epoch + 1


@pytest.mark.parametrize("make", [distributed, lambda: SeededSampler(range(8), 1)])
def test_the_number_lives_in_the_sampler(make: Any) -> None:
    """Setting it at the sampler or at the loader is the same thing."""
    sampler = make()
    c = clock(sampler)
    sampler.set_epoch(5)
    assert c.value == 5
    c.set(7)
    assert sampler.epoch == 7
    c.completed(7)
    assert (c.value, sampler.epoch) == (8, 8)


def test_all_that_hear_of_epochs_are_told() -> None:
    """Samplers, batch samplers and the dataset; at each beginning in seeded mode."""
    sampler, batch_sampler, dataset = Told(), Told(), Told()
    c = clock(sampler, batch_sampler, dataset=dataset)
    c.set(3)
    c.begin()
    c.completed(3)
    assert sampler.heard == batch_sampler.heard == dataset.heard == [3, 3, 4]


def test_a_sampler_that_was_set_by_hand_carries_the_others_along() -> None:
    """In seeded mode all parts of an iterator are in one epoch, that of the sampler."""
    sampler, dataset = SeededSampler(range(3), 1), Told()
    c = clock(sampler, Told(), dataset=dataset)
    sampler.set_epoch(9)
    c.begin()
    assert dataset.heard == [9]


def test_torch_mode_leaves_samplers_and_datasets_to_the_user() -> None:
    """Beginnings and endings set nothing there; only the user does."""
    sampler, dataset = distributed(), Told()
    c = clock(sampler, dataset=dataset, seeded=False)
    c.begin()
    c.completed(0)
    assert (c.value, sampler.epoch, dataset.heard) == (0, 0, [])
    c.set(2)
    assert (sampler.epoch, dataset.heard) == (2, [2])


def test_completion_counts_once() -> None:
    """An epoch's end that is told twice is one end."""
    c = clock()
    c.completed(0)
    c.completed(0)
    assert c.value == 1


def test_what_was_set_meanwhile_stays() -> None:
    """The end of an older epoch does not override what the user set since."""
    for other in (0, 7):
        c = clock(SeededSampler(range(3), 1))
        c.set(3)
        c.set(other)
        c.completed(3)
        assert c.value == other


@pytest.mark.parametrize("finished", [False, True])
def test_a_state_sets_the_epoch(finished: bool) -> None:
    """In seeded mode all parts are told of the state's epoch, or of the next one if that was over."""
    sampler, dataset = SeededSampler(range(3), 1), Told()
    c = clock(sampler, dataset=dataset)
    c.restore(4, finished=finished)
    assert c.value == sampler.epoch == dataset.heard[-1] == 4 + finished


@pytest.mark.parametrize("seeded", [True, False])
def test_a_state_that_is_refused_is_taken_back(seeded: bool) -> None:
    """The epochs are what they were before, and iterators that began before have their say."""
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


@pytest.mark.parametrize("finished", [False, True])
def test_a_state_in_torch_mode_touches_a_sampler_only_if_it_must(finished: bool) -> None:
    """A sampler that is in the state's epoch is left alone, another is set to that; the one after is the user's."""
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


def test_epochs_are_not_negative() -> None:
    """The error names the value, and nothing was set."""
    sampler = SeededSampler(range(3), 1)
    c = clock(sampler)
    with pytest.raises(ValueError, match="epoch=-1"):
        c.set(-1)
    assert (c.value, sampler.epoch) == (0, 0)


def test_an_epoch_that_a_sampler_refuses_is_not_set() -> None:
    """If a part cannot be in that epoch, the loader is not in it either."""
    c = clock(SeededSampler(range(3), 1))
    bare = clock(Refusing())
    for one in (c, bare):
        with pytest.raises(ValueError, match="epoch"):
            one.set(1 << 64)
        assert one.value == 0


class Refusing:
    def set_epoch(self, epoch: int) -> None:
        raise ValueError(f"no such epoch: {epoch}")


def test_parts_without_epochs_are_left_out() -> None:
    """A `set_epoch` that is no method, or an `epoch` that is no number, is somebody else's."""

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
    """Whatever happens in whatever order, the value is the last one set, plus the ends of that very epoch."""
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
