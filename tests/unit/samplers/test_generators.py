"""Walks over nested samplers terminate, and do not call `bool` on samplers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncloader import DataLoader


class Itself:
    """A batch sampler that refers to itself by the attribute in which frameworks look for an inner sampler."""

    def __init__(self) -> None:
        self.sampler = self
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("options", [{}, {"seed": 3}])
@pytest.mark.parametrize("ring", [1, 2])
def test_a_sampler_that_refers_to_itself(ring: int, options: dict[str, Any]) -> None:
    """The sampler is iterated, gets its epoch, is saved and is resumed, in both modes."""
    sampler = Itself()
    if ring == 2:
        outer = Itself()
        outer.sampler, sampler.sampler = sampler, outer  # a cycle of two
    loader = DataLoader[Any](range(4), batch_sampler=sampler, **options)  # type: ignore[arg-type]
    loader.set_epoch(2)
    assert sampler.epoch == 2
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[2, 3]]
