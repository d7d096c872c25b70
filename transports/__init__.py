"""Transports: read and write objects of remote stores and local disks through one interface.

Data path: dataset -> [transports] -> sample.

    from asyncloader.transports import open_transport

    async with open_transport("/data/digits") as transport:
        png = await transport.read("train/00001.png")

`base.py` has the contract; `registry.py` says how other packages add schemes. Transports import their own dependencies
on first use, so importing this package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncloader.transports.base import ObjectInfo, PinnedReader, Transport
from asyncloader.transports.errors import (
    AccessDenied,
    InvalidPath,
    ObjectNotFound,
    ObjectTooLarge,
    RangeOutOfBounds,
    RangesIgnored,
    ReadFailed,
    SizeUnknown,
    TransportClosed,
    TransportError,
    UnknownScheme,
    WriteFailed,
)
from asyncloader.transports.ranges import ByteRange, ReadPlan, plan_ranges
from asyncloader.transports.registry import known_schemes, open_transport
from asyncloader.transports.retry import RetryCounts, RetryPolicy

if TYPE_CHECKING:
    from asyncloader.transports.cached import CachedTransport
    from asyncloader.transports.http import HttpTransport
    from asyncloader.transports.hugging_face import HuggingFaceTransport
    from asyncloader.transports.local import LocalTransport
    from asyncloader.transports.memory import MemoryTransport
    from asyncloader.transports.object_store import ObjectStoreTransport

__all__ = [
    "AccessDenied",
    "ByteRange",
    "CachedTransport",
    "HttpTransport",
    "HuggingFaceTransport",
    "InvalidPath",
    "LocalTransport",
    "MemoryTransport",
    "ObjectInfo",
    "ObjectNotFound",
    "ObjectStoreTransport",
    "ObjectTooLarge",
    "PinnedReader",
    "RangeOutOfBounds",
    "RangesIgnored",
    "ReadFailed",
    "ReadPlan",
    "RetryCounts",
    "RetryPolicy",
    "SizeUnknown",
    "Transport",
    "TransportClosed",
    "TransportError",
    "UnknownScheme",
    "WriteFailed",
    "known_schemes",
    "open_transport",
    "plan_ranges",
]


# By name, so that a transport's dependencies are imported on first use.
_MODULES = {
    "CachedTransport": "cached",
    "HttpTransport": "http",
    "HuggingFaceTransport": "hugging_face",
    "LocalTransport": "local",
    "MemoryTransport": "memory",
    "ObjectStoreTransport": "object_store",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
