"""Adds functional forms to torch's datapipes without taking names away from others, and recognizes parts by them.

Data path: none; used where a graph is built and where it is cut.

A form is an attribute of `IterDataPipe` that looks into torch's registry first. So a name that is registered already
keeps its meaning, and a library that registers the name later neither fails nor is overruled. Parts of a graph are
recognized by the class that a name stands for, ours and the registered one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

_OURS: dict[str, Callable[..., Any]] = {}


class _Form:
    """The attribute: calls what torch's registry has under the name, or our class."""

    def __init__(self, name: str, made: Callable[..., Any], registry: dict[str, Callable[..., Any]]) -> None:
        self._name = name
        self._made = made
        self._registry = registry

    def __get__(self, datapipe: Any, _: type | None = None) -> Any:
        if datapipe is None:
            return self
        return functools.partial(self._registry.get(self._name, self._made), datapipe)


def register_form(name: str, made: Callable[..., Any], owner: type = IterDataPipe) -> None:
    """Let ``datapipe.name(...)`` make one of ours, as long as nobody else has registered the name.

    Args:
        name: of the form.
        made: the class, or a function; its first argument is the datapipe.
        owner: whose form it is: `IterDataPipe` (default) or `MapDataPipe`.
    """
    assert owner in (IterDataPipe, MapDataPipe)
    _OURS[name] = made
    setattr(owner, name, _Form(name, made, owner.functions))


def has_form(datapipe: Any, name: str) -> bool:
    """Whether a part is what the functional form of this name makes, be it ours or another library's."""
    registered = IterDataPipe.functions.get(name)
    made = registered.args[:1] if isinstance(registered, functools.partial) else ()
    kinds = tuple(kind for kind in (*made, _OURS.get(name)) if isinstance(kind, type))
    return isinstance(datapipe, kinds)


def is_replicable(datapipe: Any) -> bool:
    """Whether each worker may have a copy of a part: yes, unless its ``is_replicable()`` says no."""
    asked = getattr(datapipe, "is_replicable", None)
    return asked is None or bool(asked())
