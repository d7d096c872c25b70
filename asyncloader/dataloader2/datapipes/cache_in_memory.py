"""The form `in_memory_cache`: keeps the items of the first epoch.

Data path: graph -> [in_memory_cache] -> graph.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe

from asyncloader.dataloader2.datapipes.forms import state_with


class InMemoryCacheHolder(IterDataPipe[Any]):
    """Form ``in_memory_cache``. Keeps the items of the first epoch that is read to its end, for later epochs.

    If they exceed the size, it keeps the last items of the epoch, and the others are read again in each epoch. Each
    process has its own cache. Kept items are the same objects in each epoch, in the same order: shuffle after this
    part, not before.

    Args:
        source_dp: is read.
        size: limit of the kept items in MiB: tensors and arrays by their elements, other objects by `sys.getsizeof`.
            Default None: no limit.
    """

    def __init__(self, source_dp: Any, size: float | None = None) -> None:
        self.source_dp = source_dp
        self.size = None if size is None else int(size * (1 << 20))
        self.cache: deque[Any] | None = None
        self.idx = 0  # items before the kept ones

    def __iter__(self) -> Iterator[Any]:
        if self.cache:
            if self.idx:
                yield from itertools.islice(self.source_dp, self.idx)
            yield from self.cache
            return
        kept: deque[Any] = deque()
        sizes: deque[int] = deque()
        total = passed = 0
        for item in self.source_dp:
            kept.append(item)
            if self.size is not None:
                sizes.append(_size(item))
                total += sizes[-1]
                while total > self.size:
                    total -= sizes.popleft()
                    kept.popleft()
                    passed += 1
            yield item
        self.cache, self.idx = kept, passed

    def __len__(self) -> int:
        try:
            return len(self.source_dp)
        except TypeError:
            if self.cache:
                return self.idx + len(self.cache)
            raise TypeError(
                f"{type(self).__name__} instance doesn't have valid length until the cache is loaded."
            ) from None

    def __getstate__(self) -> Any:
        return state_with(self, cache=None, idx=0)


def _size(value: Any, seen: set[int] | None = None) -> int:
    if isinstance(value, torch.Tensor) and value.is_sparse:
        return int(value._values().nbytes + value._indices().nbytes)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        try:
            return value.nbytes
        except RuntimeError:  # of other layouts
            return int(value.values().nbytes)  # type: ignore[union-attr]
    size, seen = sys.getsizeof(value), set() if seen is None else seen
    if not isinstance(value, (dict, tuple, list, set, frozenset)) or id(value) in seen:
        return size
    seen.add(id(value))
    parts = itertools.chain(value.keys(), value.values()) if isinstance(value, dict) else value
    return size + sum(_size(each, seen) for each in parts)
