"""Finds out what a dataset is: awaited or not, read by samples or batches, as how many streams; and views of it.

Data path: none; asked when a loader is made, or before the first fetch.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, IterableDataset, IterDataPipe, StackDataset, Subset

from asyncloader.errors import shortened
from asyncloader.workers.fetch.error_notes import add_note

_AWAITABLES = ("Awaitable", "Coroutine")  # other names may be those of a sample's type


def is_awaited(function: Any) -> bool:
    """Whether a call gives something to await, as far as the definition shows.

    That is a function that is defined by ``async def``, wraps such a function (`functools.wraps`, `functools.partial`),
    has an asynchronous ``__call__``, or is annotated to return an ``Awaitable`` or a ``Coroutine``. Where a function is
    called and not awaited, such a function would run none of its code, without an error.
    """
    if not callable(function):
        return False
    if type(function) is types.FunctionType and not vars(function):
        # It wraps no function and has no mark, so that its code says it: this is asked for each epoch.
        if function.__code__.co_flags & inspect.CO_COROUTINE:
            return True
    elif inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004
    ):
        return True
    returned = getattr(function, "__annotations__", {}).get("return")
    # A string with postponed annotations, else a type or a generic alias.
    text = returned if isinstance(returned, str) else getattr(returned, "__name__", None) or repr(returned)
    return text.partition("[")[0].rpartition(".")[2] in _AWAITABLES


def check_plain(name: str, function: Any) -> None:
    """Check that a function does not have to be awaited.

    Raises:
        TypeError: it does.
    """
    if is_awaited(function):
        raise TypeError(
            f"{name} is a coroutine function, but it is called, and not awaited: make it a plain function, without "
            "async"
        )


def parts_of(dataset: Any) -> Sequence[Any]:
    """Return the datasets that one of torch's views is made of; none for any other dataset."""
    if isinstance(dataset, Subset):
        return [dataset.dataset]
    if not isinstance(dataset, ConcatDataset | StackDataset):
        return ()
    parts: Any = dataset.datasets
    found: Sequence[Any] = list(parts.values()) if isinstance(parts, dict) else parts
    return found


def is_async_dataset(dataset: Any) -> bool:
    """Whether samples must be awaited: by the dataset's own methods, or those of the datasets that it is a view of.

    A dataset with both `__aiter__` and `__iter__` is asynchronous: torch's IterableDataset demands an `__iter__`. So is
    one with `__aenter__`, or with a method that `is_awaited`.

    Raises:
        TypeError: a part of torch's `StackDataset` is asynchronous; the stack's methods would await nothing.
    """
    kind = type(dataset)
    if hasattr(kind, "__aiter__") or hasattr(kind, "__aenter__"):
        return True
    if is_awaited(getattr(kind, "__getitem__", None)) or is_awaited(getattr(kind, "__getitems__", None)):
        return True
    if not any(map(is_async_dataset, parts_of(dataset))):
        return False
    if isinstance(dataset, StackDataset):
        raise TypeError(
            "a StackDataset does not await its parts' samples: write a dataset whose `async def __getitem__` "
            "awaits a sample of each part"
        )
    return True


def is_concurrent(dataset: Any, fetch_threads: int) -> bool:
    """Whether a worker carries out several tasks at a time: samples are awaited, or fetched by threads."""
    return fetch_threads > 0 or is_async_dataset(dataset)


def is_async_stream(dataset: Any) -> bool:
    """Whether it is an asynchronous iterable; torch, which does not know `__aiter__`, takes it for a map dataset."""
    if not hasattr(type(dataset), "__aiter__") or isinstance(dataset, IterableDataset):
        return False
    return not hasattr(type(dataset), "__getitem__")


def fetches_batches(dataset: Any) -> bool:
    """Whether the dataset has a `__getitems__` of its own, beyond those of torch's views."""
    if type(dataset) in (Subset, StackDataset):  # a subclass is the user's
        return any(map(fetches_batches, parts_of(dataset)))
    return callable(getattr(dataset, "__getitems__", None))


def fetches_samples(dataset: Any) -> bool:
    """Whether the dataset has a `__getitem__` of its own, beyond those of torch's views and `Dataset`."""
    if type(dataset) in (Subset, StackDataset, ConcatDataset):
        return all(map(fetches_samples, parts_of(dataset)))
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not Dataset.__getitem__


def assigns_shards(dataset: Any) -> bool:
    """Return whether the main process assigns the dataset's shards to the workers."""
    return callable(getattr(dataset, "open_worker_stream", None))


def is_planned(dataset: Any) -> bool:
    """Return whether the main process plans the dataset's epochs, for which it reads from the store of its shards."""
    return assigns_shards(dataset) or callable(getattr(dataset, "plan_streams", None))


class MessagedDataset:
    """Base of a dataset whose copies in the workers begin each epoch by a message of the copy in the main process.

    It is a class to derive from, not a protocol: a user's dataset may have methods of any names.
    """

    loss: str
    """The state that is lost with a worker that is replaced, for the warning."""

    def epoch_message(self) -> bytes:
        """Return the message of the next epoch, not empty. Called in the main process."""
        raise NotImplementedError

    def begin_epoch(self, message: bytes) -> None:
        """Begin an epoch by this message. Called in a worker, before `iter`."""
        raise NotImplementedError


class DigestedDataset:
    """Base of a map dataset that knows which data it reads. Like `MessagedDataset`, a class to derive from."""

    def data_digest(self, *, find: bool) -> str | None:
        """Return a text that other data has not, for a loader's states; None if the data is not known yet and may not
        be looked for (`find`), which blocks.
        """
        raise NotImplementedError


def digest_of(dataset: Any, *, find: bool = False) -> str | None:
    """Return the digest of a dataset's data, also of a view of datasets; None: it does not know its data. `find`: see
    `DigestedDataset.data_digest`, whose errors are raised.
    """
    if isinstance(dataset, DigestedDataset):
        return dataset.data_digest(find=find)
    digests = [digest_of(part, find=find) for part in parts_of(dataset)]
    return None if set(digests) <= {None} else " ".join(map(str, digests))


# ------------------------------------------------------------------------------------------- how many streams it is

# An iterable dataset with an attribute `loader_streams` is that number of streams. The loader makes a copy of it for
# each stream, whatever the number of workers, and each worker serves some of the streams. Without the attribute each
# worker reads one copy. The name is not `num_streams`, which datasets of other libraries have with another meaning.

MOST_STREAMS = 1024
"""Each stream is a copy of the dataset, and a position in each saved state."""


def count_streams(dataset: Any) -> int | None:
    """Return the number of streams of an iterable dataset, from 1 on; None: it does not say that it has streams.

    Raises:
        TypeError: `loader_streams` is no integer, or the dataset is of a kind that cannot be read as several streams.
        ValueError: the number is less than 1 or too large.
        Exception: what reading the attribute raised.
    """
    if not hasattr(type(dataset), "loader_streams") and not hasattr(dataset, "loader_streams"):
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
    if is_async_dataset(dataset):
        return "its samples are awaited (a blocking dataset may have several streams)"
    return ""
