"""Reads how many streams an iterable dataset says that it has.

Data path: none; asked before the first fetch.

An iterable dataset with an attribute `loader_streams` is that number of streams. The loader makes a copy of it for each
stream, whatever the number of workers, and each worker serves some of the streams. Without the attribute each worker
reads one copy. Where a service reads the dataset, its node reports the number, and the remote dataset has the
attribute.

The name is not `num_streams`, which datasets of other libraries have with another meaning: MosaicML's
`StreamingDataset` counts its sources by it.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.utils.data import IterDataPipe

from asyncloader.errors import shortened
from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.dataset_kinds import MessagedDataset
from asyncloader.workers.fetch.error_notes import add_note
from asyncloader.workers.fetch.mocks import has_attribute

MOST_STREAMS = 1024
"""Each stream is a copy of the dataset, and a position in each saved state."""


def count_streams(dataset: Any) -> int | None:
    """Return the number of streams of an iterable dataset, from 1 on; None: it does not say that it has streams.

    Raises:
        TypeError: `loader_streams` is no integer, or the dataset is of a kind that cannot be read as several streams.
        ValueError: the number is less than 1 or too large.
        Exception: what reading the attribute raised.
    """
    if not has_attribute(dataset, "loader_streams"):
        return None
    name = type(dataset).__name__
    try:
        # Asked of the object, so that the AttributeError of a property comes out instead of counting as no attribute.
        value = dataset.loader_streams
    except Exception as error:
        add_note(error, f"while reading loader_streams of the {name}")
        raise
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(
            f"loader_streams should be an integer, the number of streams of the dataset, but that of the {name} is "
            f"{shortened(value)}. Leave the attribute out, or None, to have each worker read its own copy"
        )
    number = operator.index(value)
    if not 1 <= number <= MOST_STREAMS:
        shown = f"{number:,}" if number.bit_length() < 64 else f"a number of {number.bit_length():,} bits"
        raise ValueError(
            f"loader_streams should be from 1 to {MOST_STREAMS:,}, but that of the {name} is {shown}: the loader makes "
            "a copy of the dataset for each stream, and keeps the position of each in a state"
        )
    why = _obstacle(dataset)
    if why:
        raise TypeError(
            f"the {name} has loader_streams={number}, but {why}, so it cannot be read as several streams: leave the "
            "attribute out"
        )
    return number


def _obstacle(dataset: Any) -> str:
    if assigns_shards(dataset):
        return "its shards are assigned to the workers while they read (its own streams= fixes them)"
    if isinstance(dataset, IterDataPipe):
        return "it is a datapipe, of whose graph sharding_filter gives each worker a part"
    if isinstance(dataset, MessagedDataset):
        return "it is a DataLoader2's graph, of which its reading service gives each worker a part"
    return ""
