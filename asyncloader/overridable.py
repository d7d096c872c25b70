"""Attributes of our loaders that a subclass may have for itself.

Data path: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["OverridableProperty"]

T = TypeVar("T")


class OverridableProperty(Generic[T]):
    """A property that gives way: an instance that assigns to its name keeps its own value, as subclasses of torch's
    loader do with any name. Nothing of ours reads a loader through one.
    """

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> T:
        return self if instance is None else self._read(instance)  # type: ignore[return-value]
