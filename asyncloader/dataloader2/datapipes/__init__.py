"""The datapipes that DataLoader2 needs and torch lacks, as functional forms.

Data path: parts of a graph. `asyncloader.dataloader2` registers the forms when it is imported.
"""

from __future__ import annotations

from torch.utils.data import MapDataPipe

from asyncloader.dataloader2.datapipes.async_map import AsyncMapper
from asyncloader.dataloader2.datapipes.cache_in_memory import InMemoryCacheHolder
from asyncloader.dataloader2.datapipes.cache_on_disk import EndOnDiskCacheHolder, OnDiskCacheHolder
from asyncloader.dataloader2.datapipes.convert import MapToIterConverter
from asyncloader.dataloader2.datapipes.dispatch import RoundRobinDemultiplexer, ShardingRoundRobinDispatcher, unzip
from asyncloader.dataloader2.datapipes.forms import register_form
from asyncloader.dataloader2.datapipes.fullsync import FullSync, PrefetchTimeoutError
from asyncloader.dataloader2.datapipes.prefetch import PinMemory, Prefetcher

__all__ = [
    "AsyncMapper",
    "EndOnDiskCacheHolder",
    "FullSync",
    "InMemoryCacheHolder",
    "MapToIterConverter",
    "OnDiskCacheHolder",
    "PinMemory",
    "PrefetchTimeoutError",
    "Prefetcher",
    "RoundRobinDemultiplexer",
    "ShardingRoundRobinDispatcher",
    "register_forms",
    "unzip",
]


def register_forms() -> None:
    """Register the functional forms, as `forms.py` does. Idempotent."""
    register_form("amap", AsyncMapper)
    register_form("end_caching", EndOnDiskCacheHolder)
    register_form("fullsync", FullSync)
    register_form("in_memory_cache", InMemoryCacheHolder)
    register_form("on_disk_cache", OnDiskCacheHolder)
    register_form("pin_memory", PinMemory)
    register_form("prefetch", Prefetcher)
    register_form("round_robin_demux", RoundRobinDemultiplexer)
    register_form("sharding_round_robin_dispatch", ShardingRoundRobinDispatcher)
    register_form("to_iter_datapipe", MapToIterConverter, MapDataPipe)
    register_form("unzip", unzip)
