"""The kind and length of a dataset that a node reads: the only things of it that a loader plans an epoch with.

Data path: none; a process of a node looks at its dataset, and each loader gets the answer in its handshake.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from asyncloader.service.protocol.records import DatasetInfo
from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset, is_async_stream
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.fetch.dataset_streams import count_streams


def dataset_info_of(dataset: Any) -> DatasetInfo:
    """Look at a dataset."""
    iterable = isinstance(dataset, IterableDataset) or is_async_stream(dataset)
    problem, number = "", None
    if iterable:
        try:
            number = count_streams(dataset)
        except Exception as error:  # that of the user's attribute, too
            problem = f"{error}"
    if assigns_shards(dataset):  # its length would cost a look into each of its shards
        buffer, streams = getattr(dataset, "shuffle_buffer", 0), getattr(dataset, "streams", None)
        fixed = streams, streams is not None and bool(getattr(dataset, "shuffle_shards", False))
        return DatasetInfo(True, None, True, is_stateful(dataset), buffer, problem, *fixed)
    try:
        length = len(dataset)  # pyright: ignore[reportArgumentType] - or the error says that it has none
    except (TypeError, NotImplementedError):  # the two ways in which datasets say that they have none
        length = None
    if hasattr(type(dataset), "fixed_streams"):  # a Mixture
        problem = (
            f"a service cannot read a {type(dataset).__name__}, whose order the loader computes from its parts: leave "
            "out workers=, so that workers of the trainer's machine read it"
        )
    elif not iterable and length is None:
        problem = f"{type(dataset).__name__} has no length, without which no order can be made of its samples"
    asynchronous, stateful = is_async_dataset(dataset), is_stateful(dataset)
    return DatasetInfo(iterable, length, asynchronous, stateful, None, problem, loader_streams=number)
