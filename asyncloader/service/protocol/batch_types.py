"""Registers the user's types whose objects batches from a service may contain. `unpacking` makes objects of no others.

It does not import msgspec: a program may register its types without the extra `service`.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

REGISTERED: dict[str, type] = {}

_T = TypeVar("_T", bound=type)


def register_batch_type(kind: _T) -> _T:
    """Allow batches from a service to contain objects of this type, a named tuple or a dataclass. For use as decorator.

    The service sends the fields with the type's module and name; the loader's process makes the object, by calling the
    type with them. Only registered types are ever called.

    Raises:
        TypeError: it is neither a named tuple nor a dataclass.
    """
    if not (dataclasses.is_dataclass(kind) or is_named_tuple(kind)):
        raise TypeError(f"register_batch_type takes a named tuple or a dataclass, but got {kind!r}")
    REGISTERED[name_of(kind)] = kind
    return kind  # pyright: ignore[reportReturnType] - it narrows the type by the test above


def is_named_tuple(kind: type) -> bool:
    """Whether the type is a named tuple."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def name_of(kind: type) -> str:
    """Return the name under which a type is registered and sent."""
    return f"{kind.__module__}.{kind.__qualname__}"
