"""Copies graphs and turns them to bytes, by pickle, or with the code of lambdas where a package for that is installed.

Data path: none; in the constructor of `DataLoader2`, and for its state.

Unpickling can run any code: give `deserialize_datapipe` only the bytes of a state that you saved yourself.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any, TypeVar

from asyncloader.dataloader2.graph.utils import DataPipe

T = TypeVar("T")


def dumps(value: Any) -> bytes:
    """Pickle a value; if pickle fails, with cloudpickle or dill, which also send code that cannot be imported.

    Raises:
        Exception: pickle's error, if neither package is installed, or each that is installed fails, too.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        for name in ("cloudpickle", "dill"):
            try:
                data: bytes = importlib.import_module(name).dumps(value)
            except Exception:  # noqa: S112 - not installed, or it fails, too: pickle's error says most
                continue
            return data
        try:
            raise error from None
        finally:
            del error  # its traceback refers to this frame


def clone(obj: T) -> T:
    """Copy through pickle, as for a worker process or a saved state."""
    copied: T = pickle.loads(dumps(obj))
    return copied


def serialize_datapipe(datapipe: DataPipe) -> bytes:
    """Turn a graph into bytes.

    Raises:
        NotImplementedError: it cannot be pickled.
    """
    try:
        return dumps(datapipe)
    except Exception as error:
        raise NotImplementedError(f"DataPipe must be picklable to be saved: {error}") from error


def deserialize_datapipe(serialized_state: bytes) -> DataPipe:
    """Read the bytes of `serialize_datapipe`. Unpickling can run any code: pass only bytes that you saved yourself.

    Raises:
        NotImplementedError: the bytes cannot be read here, for example because a module is missing.
    """
    try:
        datapipe: DataPipe = pickle.loads(serialized_state)
    except Exception as error:
        raise NotImplementedError(f"DataPipe cannot be read from the saved state: {error}") from error
    return datapipe
