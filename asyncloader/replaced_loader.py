"""Tells of a stock loader that a framework made from one of ours, and that is iterated in its place.

Data path: none. Looked for once, when a loader of ours is collected that nobody used.

The proof is the batch sampler that our constructor made: nobody else can have it but by reading it off our loader. (A
batch sampler that the user made proves nothing, and a loader without one has no such mark: silence.) That such a stock
loader exists is no harm yet; that it is iterated is. So it is its first ``iter()`` that warns.
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

__all__ = ["warn_if_replaced"]

_Torchs: Any = torch.utils.data.DataLoader


def warn_if_replaced(loader: Any) -> None:
    """Let a stock loader that has this loader's batch sampler say so when it is iterated; now, if it has been.

    O(1) where nobody else has the batch sampler, else one pass over the objects that the collector knows.
    """
    if loader.batch_size is None or sys.getrefcount(loader.batch_sampler) <= 2:  # the loader's and the argument's
        return
    mark = loader.batch_sampler
    if type(mark) is not BatchSampler:
        return
    for stock in [thing for thing in gc.get_objects() if type(thing) is _Torchs]:
        if _comes_from(getattr(stock, "batch_sampler", None), mark):  # it may be half made
            if getattr(stock, "_iterator", None) is not None:  # its persistent workers
                _warn(repr(loader))
            else:
                _replaced[stock] = repr(loader)
                stock.__class__ = _Replacement


def _comes_from(batches: Any, mark: BatchSampler) -> bool:
    """Whether it is the mark, or a wrapper around it such as those that share batches out among ranks."""
    for _ in range(4):
        if batches is mark:
            return True
        batches = getattr(batches, "__dict__", {}).get("batch_sampler")
    return False


_replaced: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class _Replacement(_Torchs):  # type: ignore[misc]
    """The class of such a stock loader until it is iterated: torch's in all else, and to copies and pickles of it."""

    __module__, __qualname__ = _Torchs.__module__, _Torchs.__qualname__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Torchs(*args, **kwargs)  # frameworks call a loader's class

    def _get_iterator(self) -> Any:
        self.__class__ = _Torchs
        _warn(_replaced.pop(self))
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
