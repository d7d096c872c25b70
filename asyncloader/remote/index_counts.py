"""Reads the indexes that `write_shards` has written beside its shards: their numbers of samples, and where these begin.

Data path: catalog -> [index_counts: _train-index.tar.json] -> sample_counts, which compares sizes with the store's.
Data path: shard_sizes, [index_counts: _train-000.tar.samples] -> stream_blocks.

An index is looked for at the name that it would have; a store without it answers one request for each series of shards.

A stream that begins inside a shard would read the shard from its beginning, or from the last position that is known,
without the index of its samples: where eight streams share a shard, its samples would be parsed four and a half times.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from asyncloader.base.bridge import in_thread
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.discovery import is_escaped, join_url, split_url
from asyncloader.remote.sample_index import format_name, index_name
from asyncloader.remote.sample_index import parse_index as parse_samples
from asyncloader.remote.shard_index import MAX_INDEX_BYTES, ShardNames, ShardRecord, parse_index
from asyncloader.remote.shard_sizes import mds_offsets
from asyncloader.remote.stores import Stores, scheme_of
from asyncloader.transports import AccessDenied, ObjectNotFound, ObjectTooLarge
from asyncloader.transports.base import gather_all

MOST_INDEXES = 8
"""Indexes that are looked for: those of the series with the most shards."""

_MOST_LOCAL = 1 << 14
"""Local shards of which sizes are looked up: of more it would take longer than to read the first batch."""

_MOST_SAMPLES = 1 << 40  # in a shard, so that the numbers of a million shards can be added up

_DIGITS = re.compile(r"[0-9]+")


class Records(NamedTuple):
    """The records of indexes.

    Attributes:
        records: of given shards, by their places.
        others: URLs of the shards that an index lists and that were not given, in their order.
    """

    records: dict[int, ShardRecord]
    others: list[str]


class _Series(NamedTuple):
    """Shards whose names differ in one number: ``folder before 000123 after ? query``."""

    folder: str
    query: str
    before: str
    after: str


async def with_recorded_sizes(shards: Sequence[Shard], stores: Stores) -> Sequence[Shard]:
    """Return shards with the sizes that indexes record (`Shard.stated`): of local files, whose indexes are cheap to
    look for.

    Raises:
        TransportError: as `read_records`.
    """
    if stores.transport is not None or len(shards) > _MOST_LOCAL:
        return shards
    if not all(scheme_of(shard.url) == "file" for shard in shards):
        return shards
    records = (await read_records(shards, stores)).records
    return [shard._replace(stated=records[at].bytes) if at in records else shard for at, shard in enumerate(shards)]


async def read_records(shards: Sequence[Shard], stores: Stores, *, listed: bool = False) -> Records:
    """Return what indexes say of shards without a known number of samples. Nothing of it has been checked.

    Args:
        shards: the shards.
        stores: find the transports.
        listed: look for the indexes of all shards, for `Records.others`.

    Raises:
        TransportError: the store cannot be read; an index that is missing or damaged is no error.
    """
    uncounted = {at for at, shard in enumerate(shards) if shard.samples is None and shard.format != PARQUET}
    places = range(len(shards)) if listed else sorted(uncounted)
    members: dict[_Series, list[tuple[int, str]]] = defaultdict(list)
    for at in places:
        if shards[at].mds is None:
            for series, number in _series_of(shards[at].url):
                members[series].append((at, number))
    largest = Counter({series: len(found) for series, found in members.items()}).most_common(MOST_INDEXES)
    found = Records({}, [])
    for records, others in await gather_all(_read(series, members[series], shards, stores) for series, _ in largest):
        found.records.update({at: each for at, each in records.items() if at in uncounted})
        found.others.extend(others)
    return found


def _series_of(url: str) -> list[tuple[_Series, str]]:
    address, query = split_url(url)
    folder, slash, name = address.rpartition("/")
    name = unquote(name, errors="surrogateescape") if is_escaped(url) else name
    return [
        (_Series(folder + slash, query, name[: digits.start()], name[digits.end() :]), digits[0])
        for digits in _DIGITS.finditer(name)
    ]


async def _read(
    series: _Series, members: Sequence[tuple[int, str]], shards: Sequence[Shard], stores: Stores
) -> Records:
    digits = min(len(number) for _, number in members)
    names = ShardNames(series.folder, series.before, digits, series.after, shards[members[0][0]].format)
    transport, path = stores.find(join_url(series.folder + series.query, names.index_name))
    try:
        data = await transport.read(path, max_bytes=MAX_INDEX_BYTES)
    except (ObjectNotFound, AccessDenied, ObjectTooLarge):
        return Records({}, [])
    records, others = await in_thread(partial(_parse, data, names, members))
    return Records(records, [join_url(series.folder + series.query, name) for name in others])


def _parse(data: bytes, names: ShardNames, members: Sequence[tuple[int, str]]) -> Records:
    try:
        shards = parse_index(data, names).shards
    except ValueError:
        return Records({}, [])
    numbers = dict(members)
    found = {at: shards[int(number)] for at, number in members if int(number) in shards}
    # A sample has a byte at least, before compression.
    compressed = names.format.compression is not None
    records = {
        at: record
        for at, record in found.items()
        if record.name == names.name(numbers[at]) and record.samples <= (_MOST_SAMPLES if compressed else record.bytes)
    }
    given = {int(number) for _, number in members}
    return Records(records, [record.name for number, record in sorted(shards.items()) if number not in given])


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

    async def find(self, shard: Shard, samples: int, indexed: bool) -> Offsets | None:
        """Return the offset of each of a shard's samples and, last, of the end of them: one more than there are
        samples, ascending. None: nothing says where they are, or what does is of another version of the shard.

        Raises:
            ShardError: the table of an MDS shard is damaged.
            TransportError: the table or the index cannot be read. The next call tries again.
        """
        if shard.mds is None and not indexed:
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
                    offsets = await self._read_index(shard, samples)
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
            index = parse_samples(await transport.read(path, max_bytes=MOST_INDEX_BYTES))
        except (ObjectNotFound, AccessDenied, ObjectTooLarge, ValueError):
            return None
        # The shard itself was compared with what its writer has recorded when its samples were counted.
        fits = index.whole and len(index) == samples and index.format == format_name(shard.format)
        return index.edges if fits else None
