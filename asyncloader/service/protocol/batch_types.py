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

    The service sends the attributes with the type's module and name; the loader's process makes an object of the type
    and sets them, as pickle does: neither `__init__` nor `__post_init__` is called, which the service has done.

    Raises:
        TypeError: it is neither a named tuple nor a dataclass, or its objects are made of more than their attributes.
    """
    if not (dataclasses.is_dataclass(kind) or is_named_tuple(kind)):
        raise TypeError(f"register_batch_type takes a named tuple or a dataclass, but got {kind!r}")
    if why := why_unrestorable(kind):
        raise TypeError(f"register_batch_type cannot take {kind!r}: it {why}")
    REGISTERED[name_of(kind)] = kind
    return kind  # pyright: ignore[reportReturnType] - it narrows the type by the test above


def is_named_tuple(kind: type) -> bool:
    """Whether the type is a named tuple."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def why_unrestorable(kind: type, value: object = None) -> str:
    """Return why objects of a named tuple or dataclass are not made of their attributes alone; empty: they are."""
    if is_named_tuple(kind):
        extra = [*getattr(value, "__dict__", ())]
        return f"has attributes besides its fields, which a service does not send: {', '.join(extra)}" if extra else ""
    base = next(base for base in kind.__mro__ if "__new__" in vars(base))
    if base is not object:
        return f"is made by {base.__qualname__}.__new__, and a service makes dataclasses of their attributes alone"
    return ""


def name_of(kind: type) -> str:
    """Return the name under which a type is registered and sent."""
    return f"{kind.__module__}.{kind.__qualname__}"
