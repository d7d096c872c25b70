"""Finds the attributes of a dataset that the program has changed since its workers were forked.

Data path: none; used before a forked worker is replaced. The replacement would be a fork of the main process as it is
then, with another dataset than the workers that it joins.

A mark is small and keeps nothing alive: of a number or a text it is its value, of an array or a tensor its identity
(and of a tensor its version, which in-place operations count), of a list its length and its first items. A change deep
in a large structure, or within an array, may go unnoticed. Changes by `set_epoch` do not count: each worker gets them.
Neither does a handle in the place of None, or another entry of a dictionary: a dataset may be read in the main process,
too.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch

_MOST_MARKS = 1000  # takes some 5 ms on a busy machine
_MOST_ITEMS = 100  # of one list, so that what follows it is marked, too
_MOST_TEXT = 200
_SCALARS = (bool, int, float, complex, str, bytes, types.NoneType, np.generic)
_WHOLE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)

_set_by_epoch: dict[int, set[str]] = {}  # by dataset: the attributes that its `set_epoch` has changed


def marks(dataset: Any) -> dict[str, Any]:
    """Return a mark of each attribute, by its path; those nearest to the dataset first, up to a bound."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque([("dataset", dataset)])
    while queue and len(found) < _MOST_MARKS:
        path, value = queue.popleft()
        found[path] = _mark(value)
        # Something that is met twice is marked at both paths, but its parts at the first alone.
        if id(value) not in seen:
            seen.add(id(value))
            queue.extend(_parts(path, value, _MOST_MARKS - len(found) - len(queue)))
    return found


def changed_since(before: Mapping[str, Any], dataset: Any) -> str:
    """Return the path of an attribute that has changed since these marks were taken; empty if none is known to."""
    declared = [f"dataset.{name}" for name in _declared(dataset)]
    known, after = {*declared, *_set_by_epoch.get(id(dataset), ())}, marks(dataset)
    filled = [f"{path}{sign}" for path in declared for sign in ".["]
    for path in _different(before, after):
        if path in known or path.startswith(tuple(filled)):
            continue
        if path in after and _fills(before.get(path), after[path]):
            filled += [f"{path}.", f"{path}["]
        else:
            return path
    return ""


def set_dataset_epoch(dataset: Any, epoch: int) -> None:
    """Call the main process's dataset's `set_epoch`, and note the attributes that it changes, unless its class declares
    them.
    """
    if _declared(dataset):
        dataset.set_epoch(epoch)
        return
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


def _declared(dataset: Any) -> Sequence[str]:
    """Return the names of the attributes that `set_epoch` changes, if the dataset's class has them: one of ours, whose
    epoch is set so often that marks would take milliseconds of each epoch.
    """
    names: Sequence[str] = vars(type(dataset)).get("_asyncloader_set_by_epoch", ())
    return names


def _fills(was: Any, now: Any) -> bool:
    """Whether a dataset may have made this when it was first used: a handle, or an entry of a cache."""
    if isinstance(was, tuple) and was[0] is dict and isinstance(now, tuple) and now[0] is dict:
        return bool(now[1] > was[1])
    scalar = isinstance(now, tuple) and issubclass(now[0], _SCALARS)
    return was in (None, _mark(None)) and not scalar


def _different(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for path in {**before, **after}:
        if path not in before or path not in after or before[path] != after[path]:
            yield path


def _mark(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, _SCALARS):
        if isinstance(value, (str, bytes)) and len(value) > _MOST_TEXT:
            return kind, len(value), hash(value)
        return kind, repr(value)  # not the value: a NaN does not equal itself
    if isinstance(value, torch.Tensor):
        with suppress(Exception):  # an inference tensor counts no versions; a sparse one has no storage
            if not value.is_shared():  # changes of shared memory reach all workers
                return kind, id(value), value._version
        return kind, id(value)
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return kind, len(value)
    # Its attributes have marks of their own.
    if _attributes(value) is not None:
        return kind
    return kind, id(value)


def _parts(path: str, value: Any, most: int) -> Iterator[tuple[str, Any]]:
    """The parts of a value, `most` at most."""
    if most <= 0:
        return
    if isinstance(value, (dict, list, tuple)):
        most = min(most, _MOST_ITEMS)
    if isinstance(value, dict):
        for number, (key, part) in enumerate(value.items()):
            if number == most:
                return
            yield f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[key {number}]", part
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value[:most]):
            yield f"{path}[{number}]", part
    else:
        for name, part in list((_attributes(value) or {}).items())[:most]:
            yield f"{path}.{name}", part


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the value's attributes, if it consists of them; else None."""
    if isinstance(value, (*_WHOLE, *_SCALARS, torch.Tensor, np.ndarray)):
        return None
    try:
        # Not by `getattr`: a class's own `__getattr__` may answer for any name, or run code.
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    if type(found) is not dict:
        return None
    # The value of a cached property follows from the rest, and appears whenever the program reads the property.
    return {name: part for name, part in found.items() if not isinstance(_in_class(value, name), cached_property)}


def _in_class(value: Any, name: Any) -> Any:
    return next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
