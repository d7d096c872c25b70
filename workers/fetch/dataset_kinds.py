"""Finds out whether a dataset is awaited, and whether it fetches samples, batches of them, or both.

Data path: none; asked before the first fetch.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from asyncloader.workers.fetch.mocks import has_special_method


def is_async_dataset(dataset: Any) -> bool:
    """Whether samples must be awaited: by the dataset's own methods, or those of the datasets that it is a view of.

    A dataset with both `__aiter__` and `__iter__` is asynchronous: torch's IterableDataset demands an `__iter__`. So is
    one with `__aenter__`. A plain method counts as asynchronous if it is annotated to return an awaitable or wraps a
    coroutine function (`functools.wraps`); otherwise that cannot be known before it is called.
    """
    if has_special_method(dataset, "__aiter__") or has_special_method(dataset, "__aenter__"):
        return True
    for name in ("__getitem__", "__getitems__"):
        if _is_awaited(getattr(type(dataset), name, None)):
            return True
    if isinstance(dataset, Subset):
        return is_async_dataset(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(is_async_dataset(part) for part in dataset.datasets)
    # Not a subclass: `async_stack` replaces objects of this very class.
    if type(dataset) is StackDataset:
        parts: Any = dataset.datasets
        return any(map(is_async_dataset, parts.values() if isinstance(parts, dict) else parts))
    return False


_AWAITABLES = ("Awaitable", "Coroutine")  # other names may be those of a sample's type


def _is_awaited(method: Any) -> bool:
    if not callable(method):
        return False
    if type(method) is types.FunctionType and not vars(method):
        # It wraps no function and has no mark, so that its code says it: this is asked for each epoch.
        if method.__code__.co_flags & inspect.CO_COROUTINE:
            return True
    elif inspect.iscoroutinefunction(inspect.unwrap(method)):
        return True
    returned = getattr(method, "__annotations__", {}).get("return")
    # A string with postponed annotations, else a type or a generic alias.
    text = returned if isinstance(returned, str) else getattr(returned, "__name__", None) or repr(returned)
    return text.partition("[")[0].rpartition(".")[2] in _AWAITABLES


def is_concurrent(dataset: Any, fetch_threads: int) -> bool:
    """Whether a worker carries out several tasks at a time: samples are awaited, or fetched by threads."""
    return fetch_threads > 0 or is_async_dataset(dataset)


def is_async_stream(dataset: Any) -> bool:
    """Whether it is an asynchronous iterable; torch, which does not know `__aiter__`, takes it for a map dataset."""
    if not has_special_method(dataset, "__aiter__") or isinstance(dataset, IterableDataset):
        return False
    return not has_special_method(dataset, "__getitem__")


def fetches_batches(dataset: Any) -> bool:
    """Whether the dataset has a `__getitems__` of its own, beyond those of torch's views."""
    if type(dataset) is Subset:
        return fetches_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(fetches_batches, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def fetches_samples(dataset: Any) -> bool:
    """Whether the dataset has a `__getitem__` of its own, beyond those of torch's views and `Dataset`."""
    if type(dataset) is Subset:
        return fetches_samples(dataset.dataset)
    if type(dataset) is StackDataset:
        parts: Any = dataset.datasets
        return all(map(fetches_samples, parts.values() if isinstance(parts, dict) else parts))
    if type(dataset) is ConcatDataset:
        return all(map(fetches_samples, dataset.datasets))
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not Dataset.__getitem__


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
    if isinstance(dataset, Subset):
        return digest_of(dataset.dataset, find=find)
    if not isinstance(dataset, ConcatDataset | StackDataset):
        return None
    parts: Any = dataset.datasets
    digests = [digest_of(part, find=find) for part in (parts.values() if isinstance(parts, dict) else parts)]
    return None if set(digests) <= {None} else " ".join(map(str, digests))
