"""Walks over nested samplers terminate, and do not call `bool` on samplers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncloader import DataLoader
from asyncloader.samplers.generators import own_generator, samplers_within


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


class Wordless:
    """Raises an error for `bool` and `len`."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")

    def __len__(self) -> int:
        raise RuntimeError("unknown")


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


def test_parts_are_asked_for_their_presence_only() -> None:
    """Each part is found once, inner samplers before inner batch samplers; arrays and the like have no truth value."""
    generator = torch.Generator()
    inner = Wordless(generator=generator)
    middle = Wordless(sampler=torch.ones(3), batch_sampler=inner)
    outer = Wordless(sampler=middle, batch_sampler=middle)
    found = list(samplers_within(outer))
    assert found[0] is outer
    assert found[1] is middle
    assert isinstance(found[2], torch.Tensor)
    assert found[3] is inner
    assert len(found) == 4
    assert own_generator(outer) is generator
