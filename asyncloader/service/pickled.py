"""Datasets sent as pickles to an engine's nodes, where the nodes of `asyncloader serve` import a definition.

An engine sends the pickles over its own channel, which it trusts as much as the program that it runs. No pickle travels
over a service's connections.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from asyncloader.service.definition import Defined, Definition, load_definition


class PickledDefinition(Definition):
    """A definition that contains its code.

    Args:
        data: a pickled function without arguments, which returns the same as the function of a definition.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        # Named by its content, so a loader that pickles the same dataset again finds the processes that have it.
        self.name = f"pickled-{hashlib.sha256(data).hexdigest()[:32]}"
        self.function = self._make

    def _make(self) -> Any:
        return pickle.loads(self.data)()

    def fingerprint(self) -> str:
        """Return the name, which is a hash of the code."""
        return self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def pickle_definition(dataset: Any, functions: Mapping[str, Any]) -> Defined:
    """Pack a dataset, or a definition with its arguments, and the loader's functions that run in workers.

    Code of `__main__`, which no node can import, is pickled with it.

    Raises:
        Exception: as `cloudpickle.dumps`: a part cannot be pickled.
    """
    import cloudpickle

    made: Callable[[], Any] = _Made(dataset, functions)
    if isinstance(dataset, Defined):
        by = dataset.definition
        # A definition in a module that nodes can import is sent by its name, so that each process makes the dataset;
        # otherwise the dataset is made here, and sent.
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
    """Makes the dataset in the process that unpickles this, from a definition that it imports."""

    def __init__(self, target: str, arguments: dict[str, Any], fingerprint: str) -> None:
        self._target = target
        self._arguments = arguments
        self._fingerprint = fingerprint

    def __call__(self) -> Any:
        made_by = load_definition(self._target)
        # The module was imported from this machine's files, which may be another version than the loader's.
        made_by.check(self._fingerprint, "at the loader")
        return Defined(made_by, self._arguments).make()
