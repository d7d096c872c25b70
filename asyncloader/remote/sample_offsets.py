"""Says where the samples of a shard begin: by its own table (MDS), or by the index of samples that lies beside it.

Data path: shard_sizes, sample_index -> [sample_offsets] -> stream_blocks.

A stream that begins inside a shard would otherwise read the shard from its beginning, or from the last position that
is known: where eight streams share a shard, its samples would be parsed four and a half times.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from asyncloader.remote.catalog import Shard
from asyncloader.remote.discovery import split_url
from asyncloader.remote.sample_counts import Counted
from asyncloader.remote.sample_index import format_name, index_name, parse_index
from asyncloader.remote.shard_sizes import mds_offsets
from asyncloader.remote.stores import Stores
from asyncloader.transports import AccessDenied, ObjectNotFound, ObjectTooLarge

MOST_BYTES = 32 << 20
"""Bytes of offsets that a worker keeps: of 4 million samples. Those of a single shard are kept, whatever their number.
"""

MOST_INDEX_BYTES = 64 << 20
"""The largest index of samples that is read: of 16 million samples. A shard with more is read from its beginning."""

Offsets = npt.NDArray[np.int64]


class _ShardOffsets:
    """The facts that are known of a shard."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # while it is being found out
        self.asked = False
        self.offsets: Offsets | None = None


class SampleOffsets:
    """The offsets of samples, in the units of `CatalogRange.start`. Used in one event loop.

    Args:
        stores: find the transports; of that loop.
        most: bytes of offsets that are kept.
    """

    def __init__(self, stores: Stores, most: int = MOST_BYTES) -> None:
        self._stores = stores
        self._most = most
        self._entries: OrderedDict[str, _ShardOffsets] = OrderedDict()  # the last used last
        self._bytes = 0

    def known(self, shard: Shard) -> Offsets | None:
        """Return what an earlier `find` has returned for a shard, if it is kept."""
        entry = self._entries.get(shard.url)
        return None if entry is None else entry.offsets

    def must_read(self, shard: Shard, counted: Counted) -> bool:
        """Whether `find` would read something."""
        entry = self._entries.get(shard.url)
        return (shard.mds is not None or counted.indexed) and (entry is None or not entry.asked)

    async def find(self, shard: Shard, counted: Counted) -> Offsets | None:
        """Return the offset of each of a shard's samples and, last, of the end of them: one more than there are
        samples, ascending. None: nothing says where they are, or what does is of another version of the shard.

        Raises:
            ShardError: the table of an MDS shard is damaged.
            TransportError: the table or the index cannot be read. The next call tries again.
        """
        if shard.mds is None and not counted.indexed:
            return None
        entry = self._entries.get(shard.url)
        if entry is None:
            entry = self._entries[shard.url] = _ShardOffsets()
        self._entries.move_to_end(shard.url)
        # The streams that share a shard begin at the same time: the first reads for all. If it fails or is cancelled,
        # the next one does, and gets an error of its own.
        async with entry.lock:
            if not entry.asked:
                if shard.mds is not None:
                    offsets: Offsets | None = await mds_offsets(shard, shard.mds, self._stores)
                else:
                    offsets = await self._read_index(shard, counted.samples)
                entry.asked = True
                self._keep(entry, offsets)
        return entry.offsets

    def _keep(self, entry: _ShardOffsets, offsets: Offsets | None) -> None:
        entry.offsets = offsets
        self._bytes += 0 if offsets is None else offsets.nbytes
        for other, old in list(self._entries.items()) if self._bytes > self._most else ():
            if self._bytes <= self._most:
                break
            if old is not entry and old.offsets is not None:
                del self._entries[other]
                self._bytes -= old.offsets.nbytes

    async def _read_index(self, shard: Shard, samples: int) -> Offsets | None:
        address, query = split_url(shard.url)
        folder, slash, name = address.rpartition("/")
        transport, path = self._stores.find(f"{folder}{slash}{index_name(name)}{query}")
        try:
            index = parse_index(await transport.read(path, max_bytes=MOST_INDEX_BYTES))
        except (ObjectNotFound, AccessDenied, ObjectTooLarge, ValueError):
            return None
        # The shard itself was compared with what its writer has recorded when its samples were counted.
        fits = index.whole and len(index) == samples and index.format == format_name(shard.format)
        return index.edges if fits else None
