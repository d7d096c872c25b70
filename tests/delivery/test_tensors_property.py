"""Random nested batches keep their structure and values on another device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.delivery.tensors import map_tensors, move, tensors_of

META = torch.device("meta")


class Two(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Box:
    inside: Any
    label: str = "box"


class Thing:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


TENSORS = st.integers(0, 9).map(lambda n: torch.full((n % 3, 2), n))
LEAVES = st.one_of(TENSORS, st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3), st.floats())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, max_size=3)
    return st.one_of(
        some,
        some.map(tuple),
        some.map(deque),
        st.dictionaries(st.integers(0, 3), inner, max_size=3),
        st.dictionaries(st.text(max_size=1), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=1), inner, max_size=3).map(UserDict),
        st.builds(Two, inner, inner),
        st.builds(Box, inner),
    )


BATCHES = st.recursive(LEAVES, containers, max_leaves=12)
OBJECTS = st.recursive(LEAVES, lambda inner: st.one_of(containers(inner), st.builds(Thing, inner)), max_leaves=12)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Find the tensors in order, each as often as it occurs, in another way than the code under test."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict | UserDict):
        return [tensor for inner in value.values() for tensor in tensors_in(inner)]
    if isinstance(value, list | tuple | deque):
        return [tensor for inner in value for tensor in tensors_in(inner)]
    return tensors_in(value.inside) if isinstance(value, Box | Thing) else []


def shape_of(value: Any) -> Any:
    """Everything about a value but the content of its tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict | UserDict):
        return type(value), [(key, shape_of(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [shape_of(inner) for inner in value]
    if isinstance(value, Box | Thing):
        return type(value), vars(value).get("label"), shape_of(value.inside)
    return repr(value)


@pytest.mark.thorough
@given(BATCHES)
def test_moving_keeps_the_shape_and_leaves_the_original(batch: Any) -> None:
    """The structure stays, all tensors are on the device, the originals stay; without tensors nothing is copied."""
    before, originals = shape_of(batch), tensors_in(batch)
    moved = move(batch, META, lambda tensor: tensor.to(META))
    assert shape_of(moved) == shape_of(batch) == before
    assert all(tensor.device == META for tensor in tensors_in(moved))
    assert all(new is old for new, old in zip(tensors_in(batch), originals, strict=True))
    assert (moved is batch) == (not originals)


@given(OBJECTS)
def test_every_tensor_is_found_once_and_can_be_replaced(batch: Any) -> None:
    """`tensors_of` and `map_tensors` visit the same tensors, in the same order, also in attributes of objects."""
    there = tensors_in(batch)
    found = tensors_of(batch)
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in there}
    assert len({id(tensor) for tensor in found}) == len(found)
    mapped = map_tensors(batch, lambda tensor: tensor + 1)
    assert shape_of(mapped) == shape_of(batch)
    assert all(torch.equal(new, old + 1) for new, old in zip(tensors_in(mapped), there, strict=True))
    met: list[torch.Tensor] = []
    map_tensors(batch, lambda tensor: met.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert all(a is b for a, b in zip(met, found, strict=True))
