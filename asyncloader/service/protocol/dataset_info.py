"""The kind and length of a dataset that a node reads: the only things of it that a loader plans an epoch with.

Data path: none; a process of a node looks at its dataset, and each loader gets the answer in its handshake.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset, is_async_stream
from asyncloader.workers.fetch.dataset_state import is_stateful


class DatasetInfo(NamedTuple):
    """What a loader must know of a dataset to plan an epoch.

    Attributes:
        iterable: whether it is iterated.
        length: its length; None if it has none.
        asynchronous: whether it is read on an event loop.
        stateful: whether it has a state of its own.
        shuffle: if the loader assigns its shards: samples that each worker shuffles together; else None.
        problem: why it cannot be served; empty if all is well.
    """

    iterable: bool = False
    length: int | None = None
    asynchronous: bool = False
    stateful: bool = False
    shuffle: int | None = None
    problem: str = ""

    def difference(self, planned: DatasetInfo) -> str:
        """How this dataset differs from the one that was planned with; empty if in nothing that a plan needs."""
        for name, mine, theirs in zip(self._fields, self, planned, strict=True):
            if mine != theirs and name != "problem":
                return f"its dataset has {name}={mine}, and the loader planned with {name}={theirs}"
        return ""


def dataset_info_of(dataset: Any) -> DatasetInfo:
    """Look at a dataset."""
    iterable = isinstance(dataset, IterableDataset) or is_async_stream(dataset)
    if assigns_shards(dataset):  # its length would cost a look into each of its shards
        return DatasetInfo(True, None, True, is_stateful(dataset), getattr(dataset, "shuffle_buffer", 0))
    problem = ""
    try:
        length = len(dataset)  # pyright: ignore[reportArgumentType] - or the error says that it has none
    except (TypeError, NotImplementedError):  # the two ways in which datasets say that they have none
        length = None
    if not iterable and length is None:
        problem = f"{type(dataset).__name__} has no length, without which no order can be made of its samples"
    return DatasetInfo(iterable, length, is_async_dataset(dataset), is_stateful(dataset), None, problem)
