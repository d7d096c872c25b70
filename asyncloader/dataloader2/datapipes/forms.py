"""Adds functional forms to torch's datapipes without taking names away from other libraries.

Data path: none; used where a graph is built and where it is cut.

A form is an attribute of `IterDataPipe` that looks into torch's registry first. So a name that is registered already
keeps its meaning, and a library that registers the name later neither fails nor is overruled. A part of a graph is
recognized by its form: it is an instance of our class or of the registered class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

_OURS: dict[str, Callable[..., Any]] = {}


class _Form:
    """The attribute: makes the class that torch's registry has under the name, or else ours."""

    def __init__(self, name: str, make: Callable[..., Any], registry: dict[str, Callable[..., Any]]) -> None:
        self._name = name
        self._make = make
        self._registry = registry

    def __get__(self, datapipe: Any, _: type | None = None) -> Any:
        if datapipe is None:
            return self
        return functools.partial(self._registry.get(self._name, self._make), datapipe)


def register_form(name: str, make: Callable[..., Any], owner: type = IterDataPipe) -> None:
    """Let ``datapipe.name(...)`` call `make`, as long as no other library has registered the name.

    Args:
        name: of the form.
        make: the class, or a function; its first argument is the datapipe.
        owner: the base class that gets the form: `IterDataPipe` (default) or `MapDataPipe`.
    """
    assert owner in (IterDataPipe, MapDataPipe)
    _OURS[name] = make
    setattr(owner, name, _Form(name, make, owner.functions))


def has_form(datapipe: Any, name: str) -> bool:
    """Whether the functional form of this name makes such a part, be the form ours or another library's."""
    registered = IterDataPipe.functions.get(name)
    theirs = registered.args[:1] if isinstance(registered, functools.partial) else ()
    kinds = tuple(kind for kind in (*theirs, _OURS.get(name)) if isinstance(kind, type))
    return isinstance(datapipe, kinds)


def is_replicable(datapipe: Any) -> bool:
    """Whether each worker may have a copy of a part: yes, unless the part's ``is_replicable()`` returns False."""
    answer = getattr(datapipe, "is_replicable", None)
    return answer is None or bool(answer())


def state_with(datapipe: IterDataPipe[Any], **changes: Any) -> Any:
    """For ``__getstate__``: return the attributes with these changes, through the hook of torch's walk over a graph."""
    state = {**vars(datapipe), **changes}
    return state if IterDataPipe.getstate_hook is None else IterDataPipe.getstate_hook(state)
