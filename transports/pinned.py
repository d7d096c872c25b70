"""Reads parts of one object, all of one version, from a network.

Data path: parquet_reading -> [pinned] -> download.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from asyncloader.transports.base import ObjectInfo, PinnedReader, changed_error
from asyncloader.transports.object_version import Version

if TYPE_CHECKING:
    from asyncloader.transports.download import NetworkTransport


class PinnedObject(PinnedReader):
    """Parts of one object. The arguments are those of `PinnedReader`."""

    def __init__(self, transport: NetworkTransport[Any], path: str) -> None:
        super().__init__(transport, path)
        self._network = transport
        self._stated: Version | None = None  # in the object's metadata
        self._read: Version | None = None  # of the bytes

    @property
    def etag(self) -> str | None:
        """The version of the bytes, like `PinnedReader.etag`."""
        return None if self._read is None else self._read.name

    @property
    def size(self) -> int | None:
        """Bytes of the object, like `PinnedReader.size`."""
        return None if self._read is None else self._read.size

    async def _info(self) -> ObjectInfo:
        version = await self._network.version(self.path)
        self._stated = first = self._stated or version
        if first.differs(version) or (self._read is not None and self._read.differs(version)):
            raise changed_error(self.path)
        if version.size is None:  # `version` has raised SizeUnknown
            raise AssertionError(self.path)
        return ObjectInfo(version.size, version.name)

    async def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        data, versions = await self._network.read_ranges_with_versions(self.path, ranges)
        for version in versions:
            self._compare_stated(version)
        return data

    async def _stream(self, start: int, stop: int | None, chunk_size: int) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._network.stream_with_versions(self.path, start, chunk_size, stop)) as chunks:
            async for chunk, version in chunks:
                self._compare(version)
                yield chunk

    def _compare_stated(self, version: Version) -> None:
        # Some servers name versions in answers to GET only: so the metadata need not prove the version, but must not
        # contradict it.
        if self._stated is not None and self._stated.differs(version):
            raise changed_error(self.path)
        self._compare(version)

    def _compare(self, version: Version) -> None:
        first = self._read = self._read or version
        # A server that named the version once must name it again: an object without a version may be any other object.
        if first.differs(version) or first.resembles(first) != first.resembles(version):
            raise changed_error(self.path)
