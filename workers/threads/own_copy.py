"""Gives a worker thread a dataset of its own, where workers cannot share one object.

Data path: loader -> [own_copy] -> worker thread.

Workers share a map dataset: its samples depend on their index. A stream has a position, an async dataset connections of
one event loop, and a dataset with a state that state, and each worker must have its own, as worker processes have. So
these are copied for each worker, as `copy.deepcopy` does.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import MapDataPipe

from asyncloader.workers.fetch.dataset_kinds import MessagedDataset, is_async_dataset
from asyncloader.workers.fetch.dataset_state import is_stateful


def is_shared(dataset: Any, *, iterable: bool) -> bool:
    """Whether all worker threads may use this object."""
    own = is_async_dataset(dataset) or is_stateful(dataset) or isinstance(dataset, (MapDataPipe, MessagedDataset))
    return not (iterable or own)


def own_copy(dataset: Any) -> Any:
    """Return a copy for one worker. Of a plain object that cannot be copied as a whole, each attribute that can be
    copied is, and the others (locks, connections) are shared.

    Raises:
        TypeError: it cannot be copied at all.
    """
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        try:
            made = object.__new__(type(dataset))
            attributes = vars(dataset)
        except TypeError:
            raise TypeError(
                f"each worker thread needs a {type(dataset).__name__} of its own, because it has a position, a state "
                f"or an event loop, and it cannot be copied: {type(error).__name__}: {error}. Give its class a "
                "__deepcopy__, or use worker processes"
            ) from error
    memo: dict[int, Any] = {id(dataset): made}
    for name, value in attributes.items():
        try:
            made.__dict__[name] = copy.deepcopy(value, memo)
        except Exception:
            made.__dict__[name] = value
    return made
