"""Warns when a framework iterates a stock loader that it made from one of ours.

Data path: none. Checked once, when one of our loaders is collected without having been used.

The evidence is the batch sampler that our constructor made: only code that read it from our loader can have it. So this
batch sampler warns when a stock loader's iterator reads it. (A batch sampler that the user made proves nothing, and a
loader without one cannot be recognised: then there is no warning.)
"""

from __future__ import annotations

import sys
import warnings
import weakref
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from asyncloader.errors import NeverIteratedWarning


def warn_if_replaced(loader: Any) -> None:
    """Make this loader's batch sampler warn when a stock loader reads it. O(1)."""
    known = vars(loader)  # the attribute itself would ask a service about a dataset that is still unknown
    if loader.batch_size is None or sys.getrefcount(known.get("batch_sampler")) <= 2:  # the loader's and the argument's
        return
    mark = known.get("batch_sampler")
    if type(mark) is BatchSampler and mark not in _ours:
        _unread[mark] = repr(loader)
        mark.__class__ = _WatchedBatches


def taken(sampler: Any) -> Any:
    """Return a sampler or batch sampler from which one of our loaders is made: with it, nothing warns any more."""
    each = sampler
    for _ in range(_WRAPPERS):
        if type(each) is _WatchedBatches:
            each.__class__ = BatchSampler  # type: ignore[assignment]
        if type(each) is BatchSampler:
            _ours.add(each)
        each = getattr(each, "__dict__", {}).get("batch_sampler")
    return sampler


_unread: weakref.WeakKeyDictionary[BatchSampler, str] = weakref.WeakKeyDictionary()
_ours: weakref.WeakSet[BatchSampler] = weakref.WeakSet()
_STOCK = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
_WRAPPERS = 4  # around the batch sampler, at most: such as those that share batches among ranks


class _WatchedBatches(BatchSampler):
    """The class of such a batch sampler until a stock loader reads it. Otherwise, and for copies and pickles, it is
    torch's.
    """

    __module__, __qualname__ = BatchSampler.__module__, BatchSampler.__qualname__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return BatchSampler(*args, **kwargs)  # frameworks call a sampler's class

    def __iter__(self) -> Any:
        level, frame = 2, sys._getframe(1)
        while not isinstance(reader := frame.f_locals.get("self"), _BaseDataLoaderIter) and level < _WRAPPERS + 3:
            if frame.f_back is None:
                break
            level, frame = level + 1, frame.f_back
        if type(reader) in _STOCK and frame.f_code.co_name in ("__init__", "_reset", "_next_index"):
            self.__class__ = BatchSampler  # type: ignore[assignment]
            name = _unread.pop(self, None)
            if name is not None:  # else another thread, which reads it at the same time, has warned
                _warn(name, reader, level + 1, frame)
        return BatchSampler.__iter__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (BatchSampler,), object.__getstate__(self)


_WatchedBatches.__name__ = BatchSampler.__name__


def _warn(name: str, reader: Any, level: int, frame: FrameType) -> None:
    """Warn at the line that iterates the stock loader: of the first frame outside torch's code, from this one on."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch.utils.data"):
        level, frame = level + 1, frame.f_back
    try:
        warnings.warn(
            f"{name} was never iterated: a stock DataLoader that was made from its attributes is, in its place; see "
            "asyncloader.integrations and asyncloader.install for how to keep this one",
            NeverIteratedWarning,
            stacklevel=level,
        )
    except NeverIteratedWarning:  # made an error: an iterator that was not made has no workers to end
        vars(reader).setdefault("_shutdown", True)
        raise
