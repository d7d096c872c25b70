"""Finds the attributes of a dataset that the program has changed since its workers were forked.

Data path: none; used before a forked worker is replaced. The replacement would be a fork of the main process as it is
then, with another dataset than the workers that it joins.

Marked are the attributes of the dataset, and of the datasets that it is a view of. A mark is small and keeps nothing
alive: of a number or a text it is its value, of a tensor its identity and its version, which in-place operations count,
of a list its length and the identities of its first items, of any other object its identity. Changes within those go
unnoticed. Changes by `set_epoch` do not count: each worker gets them. Neither does something in the place of None, a
new attribute, or another entry of a dictionary: a dataset may be read in the main process, too.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

_SCALARS = (bool, int, float, complex, str, bytes, types.NoneType, np.generic)
_MOST_ITEMS = 100  # of a list

_set_by_epoch: dict[int, set[str]] = {}  # by dataset: the attributes that its `set_epoch` has changed


def marks(dataset: Any, path: str = "dataset") -> dict[str, Any]:
    """Return a mark of each attribute, by its path."""
    found = {f"{path}.{name}": _mark(value) for name, value in _attributes(dataset).items()}
    if isinstance(dataset, Subset):
        found |= marks(dataset.dataset, f"{path}.dataset")
    elif isinstance(dataset, ConcatDataset):
        for number, part in enumerate(dataset.datasets):
            found |= marks(part, f"{path}.datasets[{number}]")
    return found


def changed_since(before: Mapping[str, Any], dataset: Any) -> str:
    """Return the path of an attribute that has changed since these marks were taken; empty if none is known to."""
    known, after = _set_by_epoch.get(id(dataset), set[str]()), marks(dataset)
    return next((path for path in _different(before, after) if path not in known), "")


def set_dataset_epoch(dataset: Any, epoch: int) -> None:
    """Call the main process's dataset's `set_epoch`, and note the attributes that it changes."""
    before = marks(dataset)
    dataset.set_epoch(epoch)
    different = set(_different(before, marks(dataset)))
    if not different:
        return
    if id(dataset) not in _set_by_epoch:
        try:
            # Removed with the dataset: another object may get the same id afterwards.
            weakref.finalize(dataset, _set_by_epoch.pop, id(dataset), None).atexit = False
        except TypeError:  # it takes no weak references
            return
    _set_by_epoch.setdefault(id(dataset), set()).update(different)


def _different(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [path for path, mark in before.items() if path not in after or not _same(mark, after[path])]


def _same(was: Any, now: Any) -> bool:
    if was == now or (was == _mark(None) and now[0] not in _SCALARS):
        return True
    return bool(was[0] is dict and now[0] is dict and now[1] > was[1])


def _mark(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if isinstance(value, _SCALARS):
        return kind, hash(value) if isinstance(value, str | bytes) else repr(value)  # a NaN does not equal itself
    if isinstance(value, torch.Tensor):
        with suppress(Exception):  # an inference tensor counts no versions; a sparse one has no storage
            if not value.is_shared():  # changes of shared memory reach all workers
                return kind, id(value), value._version
    if isinstance(value, list | tuple):
        return kind, len(value), tuple(map(id, value[:_MOST_ITEMS]))
    if isinstance(value, dict | set | frozenset):
        return kind, len(value)
    return kind, id(value)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        # Not by `getattr`: a class's own `__getattr__` may answer for any name, or run code.
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(found) if type(found) is dict else {}
