"""Changes of a dataset that are noticed, and changes that do not count."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from asyncloader.workers.fetch.dataset_marks import changed_since, marks, set_dataset_epoch


class Some:
    """A dataset."""

    def __init__(self) -> None:
        self.level = 0
        self.rate = float("nan")
        self.text = "x" * 1000
        self.array = np.zeros(4)
        self.tensor = torch.zeros(4)
        self.shared = torch.zeros(4).share_memory_()
        self.classes_of: dict[int, str] = {}
        self.paths = ["a", "b"]
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
    "dataset.text": lambda some: setattr(some, "text", "y" * 1000),
    "dataset.array": lambda some: setattr(some, "array", np.zeros(4)),
    "dataset.tensor": lambda some: some.tensor.add_(1),
    "dataset.paths": lambda some: some.paths.__setitem__(1, "other"),
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
    some.classes_of[3] = "c"
    some.level = int("0")
    assert not changed_since(before, some)
    set_dataset_epoch(some, 7)
    assert some.epoch == 7
    assert not changed_since(before, some)
    some.level = 1
    assert changed_since(before, some) == "dataset.level"


def test_marks_keep_nothing_alive() -> None:
    """No object is held."""
    assert not any(isinstance(mark, (list, Some, np.ndarray, torch.Tensor)) for mark in marks(Some()).values())


def test_objects_without_attributes() -> None:
    """Lists, and any other object given as a dataset, are unchanged."""
    for thing in ([1, 2], range(3), object(), None, {"a": 1}):
        assert not changed_since(marks(thing), thing)
