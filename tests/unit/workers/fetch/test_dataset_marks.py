"""Changes of a dataset that are noticed, and changes that do not count."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from asyncloader.workers.fetch.dataset_marks import changed_since, marks, set_dataset_epoch


class Part:
    """An attribute with attributes."""

    def __init__(self) -> None:
        self.size = 1


class Some:
    """A dataset."""

    kind = 0

    def __init__(self) -> None:
        self.level = 0
        self.rate = float("nan")
        self.text = "x" * 1000
        self.array = np.zeros(4)
        self.tensor = torch.zeros(4)
        self.shared = torch.zeros(4).share_memory_()
        self.nested: Any = {"a": [1, (2, 3)], Part: None}
        self.part = Part()
        self.itself = self
        self.transform: Callable[[Any], Any] = abs
        self.epoch = 0
        self.file: Any = None

    @cached_property
    def classes(self) -> int:
        return self.level + 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


CHANGES: dict[str, Callable[[Some], object]] = {
    "dataset.level": lambda some: setattr(some, "level", 1),
    "dataset.kind": lambda some: setattr(some, "kind", 1),
    "dataset.text": lambda some: setattr(some, "text", "y" * 1000),
    "dataset.array": lambda some: setattr(some, "array", np.zeros(4)),
    "dataset.tensor": lambda some: some.tensor.add_(1),
    "dataset.nested['a'][1][0]": lambda some: some.nested["a"].__setitem__(1, (5, 3)),
    "dataset.nested['a']": lambda some: some.nested["a"].append(4),
    "dataset.part.size": lambda some: setattr(some.part, "size", 2),
    "dataset.transform": lambda some: setattr(some, "transform", len),
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_is_noticed_and_named(path: str) -> None:
    """The change is noticed also within a view of the dataset."""
    some, other = Some(), Some()
    before, within = marks(some), marks(Subset[Any](other, [0]))  # type: ignore[arg-type]
    CHANGES[path](some)
    assert changed_since(before, some) == path
    view: Any = Subset[Any](other, [0])  # type: ignore[arg-type]
    CHANGES[path](other)
    assert changed_since(within, view) == path.replace("dataset", "dataset.dataset", 1)


def test_what_is_no_change() -> None:
    """Not noticed: reading with a handle and a cache, cached properties, shared memory, equal values, `set_epoch`."""
    some = Some()
    before = marks(some)
    assert not changed_since(before, some)
    assert some.classes == 1
    some.shared.add_(1)
    some.file = io.BytesIO()
    some.nested["b"] = Part()
    some.level = int("0")
    some.nested = {"a": [1, (2, 3)], Part: None, "b": Part()}
    some.part = Part()
    assert not changed_since(before, some)
    set_dataset_epoch(some, 7)
    assert some.epoch == 7
    assert not changed_since(before, some)
    some.level = 1
    assert changed_since(before, some) == "dataset.level"


class Declared(Some):
    """One whose class declares what its `set_epoch` changes."""

    _asyncloader_set_by_epoch = ("epoch", "nested")

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.nested = epoch, {"b": [epoch]}


def test_declared_changes() -> None:
    """They do not count, nor do those of their parts, also in a copy; others do."""
    some = Declared()
    del some.itself
    before = marks(some)
    set_dataset_epoch(some, 7)
    assert some.nested == {"b": [7]}
    assert not changed_since(before, some)
    assert not changed_since(before, copy.copy(some))
    some.part.size = 2
    assert changed_since(before, some) == "dataset.part.size"


def test_large_datasets_take_bounded_time_and_keep_nothing_alive() -> None:
    """Only the nearest attributes are compared, and no object is held."""
    some: Any = Some()
    some.samples = [(index, str(index)) for index in range(100_000)]
    before = marks(some)
    assert len(before) <= 1000
    assert not any(isinstance(mark, (list, Some, np.ndarray, torch.Tensor)) for mark in before.values())
    some.samples[5] = (0, "0")
    assert changed_since(before, some) == "dataset.samples[5][0]"


def test_objects_without_attributes() -> None:
    """Lists, and any other object given as a dataset, are unchanged."""
    for thing in ([1, 2], range(3), object(), None, {"a": 1}):
        assert not changed_since(marks(thing), thing)
