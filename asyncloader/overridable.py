"""Defines properties of our loaders that an instance may override.

Data path: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["OverridableProperty"]

T = TypeVar("T")


class OverridableProperty(Generic[T]):
    """A read-only property that an instance may override by assigning to its name. Subclasses of torch's loader use any
    names for their attributes, so ours must not be in their way; our own code never reads a loader through these.
    """

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> T:
        return self if instance is None else self._read(instance)  # type: ignore[return-value]
