"""The tensors of a batch, in whatever containers and objects they are. Pure.

Data path: delivery -> stage -> mover -> [tensors] -> consumer.

Containers are those that torch's own `pin_memory` and `default_collate` know (mappings, sequences, named tuples), and
dataclasses; they come back as what they were. An object that has a method `to`, as most batch classes do, is moved by
that (``.to(device, non_blocking=True)``), before it is looked at as a container: a PackedSequence, for one, is a named
tuple of which one tensor belongs on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

__all__ = ["dense_parts", "map_tensors", "move", "tensors_of"]

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None))
_NOTHING: frozenset[int] = frozenset()


def move(batch: Any, device: torch.device) -> Any:
    """The batch on the device, without waiting for copies from page-locked memory. What is no tensor stays itself."""
    seen: dict[int, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:  # one tensor in two places is one tensor afterwards
                seen[id(value)] = value.to(device, non_blocking=True)
            return seen[id(value)]
        to = None if isinstance(value, _ATOMS) else getattr(value, "to", None)
        if to is None or not callable(to):
            return value
        try:
            return to(device, non_blocking=True)
        except TypeError:
            return to(device)

    return _mapped(batch, moved, attributes=False)


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with each tensor replaced, also those that are attributes of its objects, which are copied for that."""
    return _mapped(batch, lambda value: function(value) if isinstance(value, torch.Tensor) else value, attributes=True)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Each tensor of the batch once, in the order in which `map_tensors` meets them."""
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(id(tensor), tensor)
        return tensor

    map_tensors(batch, note)
    return list(found.values())


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's elements: itself, or the parts of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _mapped(value: Any, function: Callable[[Any], Any], *, attributes: bool, inside: frozenset[int] = _NOTHING) -> Any:
    """`function` gives something else than the value itself where that is to be looked into no further.

    `inside`: what the value is part of, by identity: objects may refer to each other in circles.
    """
    if isinstance(value, _ATOMS) or id(value) in inside:
        return value
    result = function(value)
    if result is not value or isinstance(value, torch.Tensor):
        return result
    inside |= {id(value)}

    def deeper(inner: Any) -> Any:
        return _mapped(inner, function, attributes=attributes, inside=inside)

    if isinstance(value, Mapping):
        return _mapping(value, {key: deeper(inner) for key, inner in value.items()})
    if isinstance(value, Sequence):
        return _sequence(value, [deeper(inner) for inner in value])
    if is_dataclass(value) and not isinstance(value, type):
        return _with_attributes(value, {field.name: deeper(getattr(value, field.name)) for field in fields(value)})
    if attributes and hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return _with_attributes(value, {name: deeper(inner) for name, inner in vars(value).items()})
    return value


def _mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if all(items[key] is value[key] for key in items):
        return value
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        clone.update(items)
        return clone
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _sequence(value: Sequence[Any], items: list[Any]) -> Any:
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, MutableSequence):
        clone = copy.copy(value)
        for place, item in enumerate(items):
            clone[place] = item
        return clone
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _with_attributes(value: Any, attributes: dict[str, Any]) -> Any:
    """A copy with these attributes; the value itself if they are the same, or it cannot be copied."""
    changed = {name: inner for name, inner in attributes.items() if inner is not getattr(value, name)}
    if not changed:
        return value
    clone = copy.copy(value)
    for name, inner in changed.items():
        object.__setattr__(clone, name, inner)  # also where the dataclass is frozen
    return clone
