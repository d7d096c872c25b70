"""Copies graphs and turns them to bytes, by pickle, or with the code of lambdas where a package for that is installed.

Data path: none; in the constructor of `DataLoader2`, and for its state.

What `deserialize_datapipe` reads must come from a state that the user saved: unpickling runs what the bytes say.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.datapipe import (
    _DataPipeSerializationWrapper,
    _IterDataPipeSerializationWrapper,
    _MapDataPipeSerializationWrapper,
)

from asyncloader.dataloader2.graph.utils import DataPipe

T = TypeVar("T")


def _pickled(value: Any) -> bytes:
    """By pickle; if that fails, with the code of what cannot be imported, by cloudpickle or dill.

    Raises:
        Exception: what pickle raised, if neither is installed or the one that is fails, too.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        for name in ("cloudpickle", "dill"):
            try:
                data: bytes = importlib.import_module(name).dumps(value)
            except Exception:  # noqa: S112 - not installed, or it cannot either: then pickle's error says most
                continue
            return data
        try:
            raise error from None
        finally:
            del error  # its traceback refers to this frame


def clone(obj: T) -> T:
    """A copy through pickle, as a worker process or a saved state would have it."""
    copied: T = pickle.loads(_pickled(obj))
    return copied


def serialize_datapipe(datapipe: DataPipe) -> bytes:
    """A graph as bytes.

    Raises:
        NotImplementedError: it cannot be pickled.
    """
    try:
        return _pickled(datapipe)
    except Exception as error:
        raise NotImplementedError(f"DataPipe must be picklable to be saved: {error}") from error


def deserialize_datapipe(serialized_state: bytes) -> DataPipe:
    """The graph of `serialize_datapipe`. Unpickling runs what the bytes say: give it only what you saved yourself.

    Raises:
        NotImplementedError: the bytes cannot be read here, as where a module is missing.
    """
    try:
        datapipe: DataPipe = pickle.loads(serialized_state)
    except Exception as error:
        raise NotImplementedError(f"DataPipe cannot be read from the saved state: {error}") from error
    return datapipe


def attach_wrapper(datapipe: DataPipe) -> DataPipe:
    """The graph in torch's serialization wrapper, if it has none."""
    if isinstance(datapipe, _DataPipeSerializationWrapper):
        return datapipe
    wrapper: type[Any] = (
        _IterDataPipeSerializationWrapper if isinstance(datapipe, IterDataPipe) else _MapDataPipeSerializationWrapper
    )
    assert isinstance(datapipe, (IterDataPipe, MapDataPipe))
    wrapped: DataPipe = wrapper(datapipe)
    return wrapped


def extract_wrapper(datapipe: DataPipe) -> DataPipe:
    """The graph without torch's serialization wrapper."""
    return datapipe._datapipe if isinstance(datapipe, _DataPipeSerializationWrapper) else datapipe
