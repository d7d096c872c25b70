"""Warns when a framework iterates a stock loader that it made from one of ours.

Data path: none. Checked once, when one of our loaders is collected without having been used.

The evidence is the batch sampler that our constructor made: only code that read it from our loader can have it. (A
batch sampler that the user made proves nothing, and a loader without one cannot be recognised: then there is no
warning.) A stock loader that merely exists does no harm, so its first ``iter()`` warns.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from typing import Any

import torch
from torch.utils.data import BatchSampler

from asyncloader.errors import NeverIteratedWarning

_Torchs: Any = torch.utils.data.DataLoader


def warn_if_replaced(loader: Any) -> None:
    """Make a stock loader with this loader's batch sampler warn when it is iterated; at once, if it has been.

    O(1) if nothing else refers to the batch sampler, else one pass over all objects of the garbage collector.
    """
    known = vars(loader)  # the attribute itself would ask a service about a dataset that is still unknown
    if loader.batch_size is None or sys.getrefcount(known.get("batch_sampler")) <= 2:  # the loader's and the argument's
        return
    mark = known.get("batch_sampler")
    if type(mark) is not BatchSampler:
        return
    for stock in [thing for thing in gc.get_objects() if type(thing) is _Torchs]:
        if _comes_from(getattr(stock, "batch_sampler", None), mark):  # its constructor may not have finished
            if getattr(stock, "_iterator", None) is not None:  # it has persistent workers, so it was iterated
                _warn(repr(loader))
            else:
                _replaced[stock] = repr(loader)
                stock.__class__ = _Replacement


def _comes_from(batches: Any, mark: BatchSampler) -> bool:
    """Whether it is the mark, or a wrapper around it, such as those that shard batches among ranks."""
    for _ in range(4):
        if batches is mark:
            return True
        batches = getattr(batches, "__dict__", {}).get("batch_sampler")
    return False


_replaced: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class _Replacement(_Torchs):  # type: ignore[misc]
    """The class of such a stock loader until it is iterated. Otherwise, and for copies and pickles, it is torch's."""

    __module__, __qualname__ = _Torchs.__module__, _Torchs.__qualname__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Torchs(*args, **kwargs)  # frameworks call a loader's class

    def _get_iterator(self) -> Any:
        self.__class__ = _Torchs
        name = _replaced.pop(self, None)
        if name is not None:  # else another thread, which iterates it at the same time, has warned
            _warn(name)
        return self._get_iterator()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (_Torchs,), object.__getstate__(self)


_Replacement.__name__ = _Torchs.__name__


def _warn(name: str) -> None:
    warnings.warn(
        f"{name} was never iterated: a stock DataLoader that was made from its attributes is, in its place; see "
        "asyncloader.integrations and asyncloader.install for how to keep this one",
        NeverIteratedWarning,
        stacklevel=4,
    )
