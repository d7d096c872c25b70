"""Tells the methods that a mock was given from those that it makes up. Pure.

Data path: none; asked where a dataset may have a method that torch does not know.

`unittest.mock.MagicMock` has every attribute that is asked for, and every special method. torch asks for few, so a mock
with `__getitem__` and `__len__` is a dataset there. Here it must not count as asynchronous, stateful, and so on.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any


def has_method(thing: Any, name: str) -> bool:
    """Whether the object has this method. A mock has those that were set or used before."""
    if _is_mock(thing) and name not in vars(thing) and name not in vars(thing).get("_mock_children", {}):
        return False
    return callable(getattr(thing, name, None))


def has_attribute(thing: Any, name: str) -> bool:
    """Whether the object has this attribute, also if reading it raises. A mock has those that were set before."""
    if _is_mock(thing):
        return name in vars(thing)
    return hasattr(type(thing), name) or hasattr(thing, name)


def has_special_method(thing: Any, name: str) -> bool:
    """Whether the object's type has this method, such as `__aiter__`. A mock has those that were set or used before."""
    kind = type(thing)
    # To look the method up, even on the type, would make it.
    if _is_mock(thing) and type(inspect.getattr_static(kind, name, None)).__name__ == "MagicProxy":
        return False
    return hasattr(kind, name)


def _is_mock(thing: Any) -> bool:
    mock = sys.modules.get("unittest.mock")  # a program without mocks does not pay for it
    return mock is not None and issubclass(type(thing), mock.NonCallableMock)
