"""Adapters: functions from a graph to a changed graph, which `DataLoader2` applies in its constructor.

Data path: graph -> [adapter] -> DataLoader2.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_shuffle_settings

from asyncloader.dataloader2.datapipes.forms import has_form
from asyncloader.dataloader2.graph.utils import DataPipe, end_of, end_with, parts_of, parts_of_form, remove_dp

__all__ = [
    "Adapter",
    "CacheTimeout",
    "FullSync",
    "InvalidateCache",
    "PinMemory",
    "PrefetchPolicy",
    "ShardingPolicy",
    "Shuffle",
]


class Adapter(ABC):
    """Changes a graph. Derive your own from this class, or give any function."""

    @abstractmethod
    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """Return the end of the changed graph. `datapipe` itself may be changed: it is the loader's own copy."""


class Shuffle(Adapter):
    """Switches the shuffles of a graph on or off.

    Args:
        enable: True (default): on; a graph without a shuffle gets a shuffle at its end, with a warning. False: off.
            None: the shuffles stay as they are.
    """

    def __init__(self, enable: bool | None = True) -> None:
        self.enable = enable

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """Switch the shuffles."""
        return apply_shuffle_settings(datapipe, shuffle=self.enable)


class CacheTimeout(Adapter):
    """Sets how long the readers of a cache wait for the process that fills it.

    Args:
        timeout: seconds.

    Raises:
        ValueError: `timeout` is no integer.
    """

    def __init__(self, timeout: int | None = None) -> None:
        if not isinstance(timeout, int):
            raise ValueError("timeout should be integer")  # noqa: TRY004 - as in torchdata
        self.timeout = timeout

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """Set the timeout of each cache."""
        for each in parts_of(datapipe):
            if has_form(each, "end_caching") or type(each).__name__.startswith(_WAITS):
                each.set_timeout(self.timeout)
        return datapipe


_WAITS = "_WaitPendingCacheItem"
"""The class name of the part that waits in torchdata's caches, whose ``end_caching`` makes several parts."""


class InvalidateCache(Adapter):
    """Has the caches of a graph filled again: items that were cached before a given time count as not cached.

    Ranks and workers that share a cache directory fill it once, if all of them get the same time.

    Args:
        before: that time, in nanoseconds since 1970; default None: now.

    Raises:
        RuntimeError: when applied: a cache on disk is torchdata's, which cannot be invalidated; or the graph has no
            cache.
    """

    def __init__(self, before: int | None = None) -> None:
        self.before = time.time_ns() if before is None else before

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """Invalidate each cache."""
        caches = 0
        for each in parts_of(datapipe):
            if type(each).__name__.startswith(_WAITS):
                raise RuntimeError(
                    "InvalidateCache needs asyncloader's `on_disk_cache`: delete the files of torchdata's"
                )
            if has_form(each, "end_caching"):
                each.invalidate(self.before)
            elif has_form(each, "in_memory_cache"):
                each.cache, each.idx = None, 0
            else:
                continue
            caches += 1
        if not caches:
            raise RuntimeError("InvalidateCache needs an `on_disk_cache` or an `in_memory_cache` in the graph")
        return datapipe


class PinMemory(Adapter):
    """Page-locks the graph's items, unless its end does so already.

    Args:
        device: the CUDA device; default None: the current device.

    Raises:
        RuntimeError: when applied: CUDA is not available.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """End the graph with `pin_memory`."""
        return end_with(datapipe, "pin_memory", self.device)


class FullSync(Adapter):
    """Has the ranks end their epochs together, unless the graph ends with a `fullsync` already.

    Args:
        timeout: seconds to wait for other ranks; default 1800.
    """

    def __init__(self, timeout: float = 1800) -> None:
        self.timeout = timeout

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """End the graph with `fullsync`."""
        return end_with(datapipe, "fullsync", self.timeout)


class ShardingPolicy(Adapter):
    """Sets among which processes the `sharding_filter` parts of a graph share its items.

    Args:
        priority: ``SHARDING_PRIORITIES.MULTIPROCESSING``: among the workers of each rank alone, so that each rank reads
            everything. ``DISTRIBUTED``: among the ranks alone. None or ``DEFAULT``: among both.

    Raises:
        TypeError: `priority` is neither a `SHARDING_PRIORITIES` nor None.
        RuntimeError: when applied: the graph has no `sharding_filter`.
    """

    def __init__(self, priority: SHARDING_PRIORITIES | None = None) -> None:
        if priority is not None and not isinstance(priority, SHARDING_PRIORITIES):
            raise TypeError(f"priority must be one of SHARDING_PRIORITIES or None, not {priority!r}")
        self.priority = None if priority == SHARDING_PRIORITIES.DEFAULT else priority

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """Set the priority of each `sharding_filter`."""
        filters = parts_of_form(datapipe, "sharding_filter")
        if not filters:
            raise RuntimeError("ShardingPolicy needs a `sharding_filter` in the graph")
        for each in filters:
            each.sharding_group_filter = self.priority
        return datapipe


class PrefetchPolicy(Adapter):
    """Sets how far the `prefetch` parts of a graph read ahead; a graph without such a part gets one at its end.

    Args:
        buffer_size: items; 0 takes all `prefetch` parts out.

    Raises:
        ValueError: `buffer_size` is negative.
    """

    def __init__(self, buffer_size: int) -> None:
        if buffer_size < 0:
            raise ValueError(f"buffer_size must be at least 0, not {buffer_size}")
        self.buffer_size = buffer_size

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """Set, add or take out the `prefetch` parts."""
        found = parts_of_form(datapipe, "prefetch")
        for each in found:
            if self.buffer_size:
                each.buffer_size = self.buffer_size
            else:
                datapipe = end_of(remove_dp(traverse_dps(datapipe), each))
        if self.buffer_size and not found:
            datapipe = datapipe.prefetch(self.buffer_size)
        return datapipe
