"""Transports: read and write objects of remote stores and local disks through one interface.

Data path: dataset -> [transports] -> sample.

    from asyncloader.transports import open_transport

    async with open_transport("/data/digits") as transport:
        png = await transport.read("train/00001.png")

`base.py` has the contract; `registry.py` says how other packages add schemes. Transports import their own dependencies
on first use, so importing this package is cheap.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    if name == "CachedTransport":
        from asyncloader.transports.cached import CachedTransport

        return CachedTransport
    if name == "HttpTransport":
        from asyncloader.transports.http import HttpTransport

        return HttpTransport
    if name == "HuggingFaceTransport":
        from asyncloader.transports.hugging_face import HuggingFaceTransport

        return HuggingFaceTransport
    if name == "LocalTransport":
        from asyncloader.transports.local import LocalTransport

        return LocalTransport
    if name == "MemoryTransport":
        from asyncloader.transports.memory import MemoryTransport

        return MemoryTransport
    if name == "ObjectStoreTransport":
        from asyncloader.transports.object_store import ObjectStoreTransport

        return ObjectStoreTransport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
