"""A shard of which samples are read, and the samples of one call that lie in it.

Data path: numbers -> [opened_shards] -> shard_reader.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.random_access.chunks import compression_of
from asyncloader.remote.random_access.host_files import FileName
from asyncloader.remote.random_access.indexing import name_of
from asyncloader.remote.random_access.sample_parsing import SampleParser
from asyncloader.transports import ObjectInfo, PinnedReader, SizeUnknown, plan_ranges
from asyncloader.transports.base import changed_error, gather_all
from asyncloader.transports.cached_object import CachedObject
from asyncloader.transports.local import PinnedFile
from asyncloader.transports.open_files import OpenFiles
from asyncloader.transports.pinned import PinnedObject

GAP = 1 << 16
"""Bytes between two samples that are read to save a request to a network: requests are concurrent, so it saves no round
trip, but about as much CPU time as 64 KiB take."""


class OpenShard:
    """A shard of which samples were read."""

    def __init__(
        self, shard: Shard, info: ObjectInfo | None, pinned: PinnedReader, parser: SampleParser, files: OpenFiles
    ) -> None:
        self.shard = shard
        self.info = info
        self.pinned = pinned
        self.parser = parser
        self.edges: npt.NDArray[np.int64] | None = None
        self.whole = True
        self._files = files  # keeps it open, if it is a file of a disk
        self.is_file = isinstance(pinned, PinnedFile)
        self.compared = False  # with the store
        # Has bytes of samples without a request, as they are in the shard.
        self.local: CachedObject | PinnedFile | None = None
        if isinstance(pinned, CachedObject | PinnedFile) and shard.format != PARQUET and compression_of(shard) is None:
            self.local = pinned

    async def read(self, ranges: list[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges of the shard, like `PinnedReader.read_ranges`."""
        if not isinstance(self.pinned, PinnedObject):  # a disk; or a cache, which keeps the bytes between them, too
            return await self.pinned.read_ranges(ranges)
        # The transport would read a useless MiB to save a request: right for a shard that is read through.
        plan = plan_ranges(ranges, max_gap=GAP, max_size=self.pinned.transport.range_size)
        return plan.cut([data for (data,) in await gather_all(self.pinned.read_ranges([each]) for each in plan.blocks)])

    async def decode(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Decode a part of the shard by `make`, which compares its version."""
        data = await make()
        self.compared = True
        return data

    def check_file(self) -> None:
        """Raise ReadFailed if it is a file of a disk that has changed since it was indexed. Blocks, in a thread."""
        if isinstance(self.pinned, PinnedFile):
            self.pinned.check_here(self._files)
            if not self.pinned.may_be(self.version):
                raise changed_error(self.pinned.path)

    async def compare(self) -> None:
        """Compare the shard's version with the one that was indexed.

        Raises:
            TransportError: it has changed, or cannot be asked for.
        """
        with suppress(SizeUnknown):
            info = await self.pinned.info()
            # Not of a local file, whose inode number may change.
            same = self.info is None or self.is_file or None in (self.version, info.etag)
            if not self.pinned.may_be(self.version) or not (same or self.info == info):
                raise changed_error(self.pinned.path)
        self.compared = True

    def decoded_name(self, what: str) -> FileName:
        """Name the file of what was decoded of the shard."""
        # Of a local file that is too new for a version, what was decoded must not outlive a change.
        fresh = self.pinned.version if isinstance(self.pinned, PinnedFile) and self.version is None else ""
        return FileName(f"{name_of(self.shard)}\0{what}{fresh}", self.version)

    @property
    def version(self) -> str | None:
        """Of the object; None without a version."""
        return None if self.info is None else self.info.etag


class SampleGroup(NamedTuple):
    """Samples of one shard, ascending by their numbers in it; and their places in the result."""

    opened: OpenShard
    samples: npt.NDArray[np.int64]
    places: list[int]

    def spans(self, edges: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return start and length of the samples' bytes."""
        if len(self.places) == 1:
            start, stop = edges[self.samples[0] : self.samples[0] + 2].tolist()
            return [(start, stop - start)]
        starts = edges[self.samples]
        return list(zip(starts.tolist(), (edges[self.samples + 1] - starts).tolist(), strict=True))

    def part(self, first: int, stop: int) -> SampleGroup:
        """Return some of the samples."""
        return SampleGroup(self.opened, self.samples[first:stop], self.places[first:stop])

    def put(self, found: Sequence[Any], samples: list[Any]) -> None:
        """Put the samples that were found into their places."""
        for place, sample in zip(self.places, found, strict=True):
            samples[place] = sample

    def left(self, found: Sequence[Any]) -> list[SampleGroup]:
        """Return a group of the samples that were not found, which are None; or nothing, if all were."""
        left = [number for number, sample in enumerate(found) if sample is None]
        return [SampleGroup(self.opened, self.samples[left], [self.places[each] for each in left])] if left else []
