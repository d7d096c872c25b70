"""Stateful samplers: their states are kept until delivery, and restore the position where they were taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from asyncloader.samplers.index_stream import StateLog
from tests.unit.samplers.stream_samplers import (
    SIZE,
    WRAPPERS,
    Stateful,
    after,
    batched,
    stream,
)


class Yielded(RandomSampler):
    """A sampler whose state has the number of indices it gave; its order is drawn from its generator."""

    given = 0

    def __iter__(self) -> Iterator[int]:
        for index in [*super().__iter__()][self.given :]:
            self.given += 1
            yield index
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_state_need_not_hold_the_generator(every: int) -> None:
    """The order is repeated also if the sampler's state only counts, and if no state of it is taken."""

    def make() -> Yielded:
        return Yielded(range(SIZE), generator=torch.Generator().manual_seed(6))

    sampler = make()
    list(sampler)
    whole = [*stream(batched(sampler))]
    sampler = make()
    list(sampler)
    running = stream(batched(sampler), every=every)
    for _ in range(4):
        running.pull()
    assert [*stream(batched(make()), **after(3, running, every))] == whole[3:]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_stateful_sampler_reads_nothing_again(wrapper: str) -> None:
    """From its state the sampler goes on where it was, for every way in which its indices become steps."""
    wrap = WRAPPERS[wrapper]
    whole = [*stream(wrap(Stateful()))]
    running = stream(wrap(Stateful()))
    for _ in range(4):
        running.pull()
    sampler = Stateful()
    assert [*stream(wrap(sampler), **after(3, running))] == whole[3:]
    assert sampler.read == SIZE - {"alone": 3, "batches": 9, "rank": 12}[wrapper]


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_between_snapshots_indices_are_read_and_dropped(every: int) -> None:
    """With states taken every few steps, the last state before the position is used; the rest is read and dropped."""
    whole = [*stream(batched(Stateful()))]
    for steps in range(len(whole) + 1):
        running = stream(batched(Stateful()), every=every)
        for _ in range(min(len(whole), steps + 2)):
            running.pull()
        assert [*stream(batched(Stateful()), **after(steps, running, every))] == whole[steps:]


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_later_epoch_is_resumed_as_that_epoch(wrapper: str, every: int) -> None:
    """Also before its first snapshot of an epoch, a stateful sampler is resumed in the epoch it is in."""
    wrap = WRAPPERS[wrapper]
    reference, sampler = Stateful(), Stateful()
    assert [*reference] == [*sampler]
    expected = [*stream(wrap(reference))]
    assert expected != [*stream(wrap(Stateful()))]
    running = stream(wrap(sampler), every=every)
    for _ in range(3):
        running.pull()
    for steps in (0, 2):
        assert [*stream(wrap(Stateful()), **after(steps, running, every))] == expected[steps:]


def test_state_log_keeps_what_delivery_may_still_want() -> None:
    """`at` gives the newest state not beyond the position; `forget` drops states that no step back can need."""
    sampler = Stateful()
    log = StateLog(2, None)
    iterator = iter(sampler)
    for step in range(1, 8):
        next(iterator)
        assert log.note(step, sampler)
    assert log.at(1) is None
    for step, expected in ((2, 2), (3, 2), (4, 4), (6, 6), (100, 6), (7, 6)):
        found = log.at(step)
        assert found is not None
        assert (found["at"], found["sampler"]["given"]) == (expected, expected)
    log.forget(4)
    for step, expected in ((3, 2), (4, 4), (7, 6)):
        found = log.at(step)
        assert found is not None
        assert found["at"] == expected
    log.forget(5)
    assert log.at(3) is None
    log.forget(100)
    found = log.at(7)
    assert found is not None
    assert found["at"] == 6
