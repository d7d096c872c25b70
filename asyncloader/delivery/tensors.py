"""Finds and replaces the tensors of a batch, in any containers and objects; keeps static tensors for CUDA graphs. Pure.

Data path: device_stage -> transfer -> [tensors] -> consumer.

Containers are those that torch's `pin_memory` and `default_collate` know (mappings, sequences, named tuples), and
dataclasses; their types are kept. An object with a method `to`, as most batch classes have, is moved by that method
(``.to(device, non_blocking=True)``) and not looked into: a PackedSequence, for example, is a named tuple of which one
tensor belongs on the CPU. An object that occurs twice in a batch is replaced by the same object at both positions, and
circular references are kept.

`StaticTensors` copies each batch into the tensors that were made for the first batch of its shapes: a CUDA graph reads
from the addresses that it was captured with. The copy runs on the device, in the consumer's own stream and after its
work with the batch before, so no step sees a batch change while it is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, Final, TypeAlias

import torch

from asyncloader.errors import warn_aside

_ATOMS = (str, bytes, bytearray, memoryview, range, int, float, complex, bool, type(None))
_PLAIN = (str, bytes, range, int, float, complex, bool, type(None))
_LOOK_INSIDE: Final[Any] = object()

_Known: TypeAlias = dict[int, tuple[Any, Any]]
"""Visited objects by ``id``: the object (kept alive, so that its id stays unique) and its replacement."""


def move(batch: Any, device: torch.device, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Move the batch to the device. Objects without tensors are not copied.

    Args:
        batch: the batch, on any device.
        device: passed to the method `to` of objects that have one.
        copy_tensor: returns a tensor's copy on the device, or the tensor itself if it is on the device.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copy_tensor(value)
        to = _own_way(value)
        if to is None:
            return _LOOK_INSIDE
        try:
            result = to(device, non_blocking=True)
        except TypeError:
            # A method `to` of another library need not take `non_blocking`.
            result = to(device)
        return value if result is None else result  # some move in place and return None

    return _mapped(batch, moved, {}, attributes=False)


def moved_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors that `move` would copy, each once."""
    found: list[torch.Tensor] = []

    def noted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(value)
            return value
        return _LOOK_INSIDE if _own_way(value) is None else value

    _mapped(batch, noted, {}, attributes=False)
    return found


def _own_way(value: Any) -> Callable[..., Any] | None:
    to = getattr(value, "to", None)
    return to if callable(to) and not isinstance(value, type) else None


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace each tensor of the batch, also in attributes of objects, which are copied for that."""

    def replaced(value: Any) -> Any:
        return function(value) if isinstance(value, torch.Tensor) else _LOOK_INSIDE

    return _mapped(batch, replaced, {}, attributes=True)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of the batch, each once, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def only_tensors(batch: Any, accepted: Callable[[torch.Tensor], bool]) -> bool:
    """Whether the batch consists only of accepted tensors and plain values in plain containers, and so cannot refer to
    other memory.
    """
    if type(batch) is torch.Tensor:
        return accepted(batch)
    if type(batch) is dict:
        return all(only_tensors(value, accepted) for value in batch.values())
    if type(batch) in (list, tuple):
        return all(only_tensors(value, accepted) for value in batch)
    return type(batch) in _PLAIN


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's elements: itself, or the parts of a sparse or nested one, or of a subclass that
    wraps others. None of them has a conjugate or negative bit.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return [part for name in flatten()[0] for part in dense_parts(getattr(tensor, name))]
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [_without_bits(tensor)]


def _without_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view without the conjugate or negative bit: operations that do not support these bits would copy the tensor or
    fail.
    """
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor  # pyright: ignore[reportPrivateImportUsage]


def _mapped(value: Any, function: Callable[[Any], Any], known: _Known, *, attributes: bool) -> Any:
    if isinstance(value, _ATOMS):
        return value
    met = known.get(id(value))
    if met is not None:
        return met[1]
    result = function(value)
    if result is _LOOK_INSIDE:
        known[id(value)] = value, value  # ends recursion where objects refer to each other in circles
        result = _rebuilt(
            value, lambda inner: _mapped(inner, function, known, attributes=attributes), attributes=attributes
        )
    known[id(value)] = value, result
    return result


def _rebuilt(value: Any, deeper: Callable[[Any], Any], *, attributes: bool) -> Any:
    """A copy of a container or object with its contents replaced; the value itself if nothing changed."""
    if isinstance(value, (type, ModuleType)):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, deeper)
    if isinstance(value, Sequence):
        return _sequence(value, deeper)
    names: list[str] = [field.name for field in fields(value)] if is_dataclass(value) else []
    if attributes and not callable(value):
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]
    return _with_attributes(value, names, deeper)


def _mapping(value: Mapping[Any, Any], deeper: Callable[[Any], Any]) -> Any:
    items = list(value.items())
    changed = {key: new for key, old in items if (new := deeper(old)) is not old}
    if not changed:
        return value
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        clone.update(changed)
        return clone
    whole = {**dict(items), **changed}
    try:
        return type(value)(whole)  # type: ignore[call-arg]
    except TypeError:
        return whole


def _sequence(value: Sequence[Any], deeper: Callable[[Any], Any]) -> Any:
    old = list(value)
    items = [deeper(item) for item in old]
    changed = [index for index, item in enumerate(items) if item is not old[index]]
    if not changed:
        return value
    make = getattr(value, "_make", None)
    if make is not None and isinstance(value, tuple):
        return make(items)
    if isinstance(value, MutableSequence):
        clone = copy.copy(value)
        for index in changed:
            clone[index] = items[index]
        return clone
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _with_attributes(value: Any, names: list[str], deeper: Callable[[Any], Any]) -> Any:
    changed: dict[str, Any] = {}
    for name in names:
        old = getattr(value, name, None)  # a field may have no value yet
        new = deeper(old)
        if new is not old:
            changed[name] = new
    if not changed:
        return value
    clone = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(clone, name, new)  # also where the dataclass is frozen
    return clone


MOST_SETS = 32
"""Most sets of static tensors. A set is never dropped, and keeps a batch's memory, because a CUDA graph may read it."""


class StaticTensors:
    """Static tensors: one set for each combination of shapes, strides and dtypes, so an epoch's short last batch has
    its own. The sets live as long as this object. The first `MOST_SETS` combinations get one; batches of others are
    delivered as they are, with one warning.
    """

    def __init__(self) -> None:
        self._sets: dict[Hashable, list[torch.Tensor]] = {}
        self._warned = False

    def fill(self, batch: Any, tensors: list[torch.Tensor]) -> Any:
        """The batch with its tensors replaced by static ones, into which its values are copied in the current stream.

        Args:
            batch: the batch on the device.
            tensors: the batch's tensors, each once. Sparse and nested ones are delivered as they are.
        """
        tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
        with torch.inference_mode(False), torch.no_grad():  # the same tensors serve training and validation
            kept = self._filled(tensors)
        replaced = {id(tensor): static for tensor, static in zip(tensors, kept, strict=True)}
        return map_tensors(batch, lambda tensor: replaced.get(id(tensor), tensor))

    def _filled(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
        kept = self._sets.get(key)
        if kept is None and len(self._sets) >= MOST_SETS:
            self._warn()
            return tensors
        if kept is None:
            # Allocated in the consumer's stream, unlike the batch's own: no side stream ever uses their memory.
            kept = self._sets[key] = [tensor.clone() for tensor in tensors]
        else:
            for static, tensor in zip(kept, tensors, strict=True):
                static.copy_(tensor, non_blocking=True)
        return kept

    def _warn(self) -> None:
        if self._warned:
            return
        self._warned = True
        warn_aside(
            f"static_buffers: batches came in more than {MOST_SETS} combinations of shapes. The first {MOST_SETS} keep "
            "their tensors; batches of any other are delivered in tensors of their own, which no CUDA graph should "
            "read. Pad batches to a few shapes, or leave out static_buffers.",
            RuntimeWarning,
            stacklevel=2,
        )
