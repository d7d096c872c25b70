"""Datasets that travel: what an engine's nodes get as bytes, where a service's nodes import a definition.

Data path: none; before a loader's first epoch.

An engine sends them over a channel of its own, which it trusts as much as the program that it runs. Nothing of this
comes over a service's connections.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from asyncloader.service.definition import Defined, Definition, load_definition


class PickledDefinition(Definition):
    """A definition that has its code with it.

    Args:
        data: a pickled function of no arguments, which returns what a definition's does.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.name = f"pickled-{hashlib.sha256(data).hexdigest()[:32]}"
        self.function = self._make

    def _make(self) -> Any:
        return pickle.loads(self.data)()

    def fingerprint(self) -> str:
        """As `Definition`; the name says it."""
        return self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def pickled(dataset: Any, functions: Mapping[str, Any]) -> Defined:
    """Pack a dataset, or a definition with its arguments, and the loader's functions that run in workers.

    What is defined in `__main__`, which no node can import, travels with its code.

    Raises:
        Exception: as `cloudpickle.dumps`: a part of them cannot be pickled.
    """
    import cloudpickle

    made: Callable[[], Any] = _Made(dataset, functions)
    if isinstance(dataset, Defined):
        by = dataset.definition
        if isinstance(by, PickledDefinition) and not functions:
            return dataset
        if isinstance(by, PickledDefinition) or by.function.__module__ == "__main__":
            dataset, own = dataset.make()
            made = _Made(dataset, {**own, **functions})
        else:
            made = _Named(f"{by.function.__module__}:{by.name}", dataset.arguments, by.fingerprint())
    return Defined(PickledDefinition(cloudpickle.dumps(made)), {})


class _Made:
    def __init__(self, dataset: Any, functions: Mapping[str, Any]) -> None:
        self._made = dataset, dict(functions)

    def __call__(self) -> Any:
        return self._made


class _Named:
    """Has each process make a dataset, instead of one that is sent."""

    def __init__(self, target: str, arguments: dict[str, Any], fingerprint: str) -> None:
        self._target = target
        self._arguments = arguments
        self._fingerprint = fingerprint

    def __call__(self) -> Any:
        made_by = load_definition(self._target)
        made_by.check(self._fingerprint, "at the loader")
        return Defined(made_by, self._arguments).make()
