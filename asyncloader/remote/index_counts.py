"""Reads the numbers of samples that `write_shards` has written beside its shards.

Data path: catalog -> [index_counts: _train-index.tar.json] -> shared_counting, which compares sizes with the store's.

An index is looked for at the name that it would have; a store without it answers one request for each series of shards.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote

from asyncloader.bridge import in_thread
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.discovery import is_escaped, join_url, split_url
from asyncloader.remote.shard_index import MAX_INDEX_BYTES, ShardNames, parse_index
from asyncloader.remote.stores import Stores, scheme_of
from asyncloader.transports import AccessDenied, ObjectNotFound, ObjectTooLarge
from asyncloader.transports.base import ObjectInfo, gather_all

MOST_INDEXES = 8
"""Indexes that are looked for: those of the series with the most shards."""

_MOST_LOCAL = 1 << 14
"""Local shards of which sizes are looked up: of more it would take longer than to read the first batch."""

_MOST_SAMPLES = 1 << 40  # in a shard, so that the numbers of a million shards can be added up

_DIGITS = re.compile(r"[0-9]+")


class Promise(NamedTuple):
    """An index's record of a shard.

    Attributes:
        samples: number of samples.
        size: bytes of the object.
        etag: of the object; None: not known.
    """

    samples: int
    size: int
    etag: str | None

    def fits(self, info: ObjectInfo) -> bool:
        """Whether the store has this very object, as far as it says."""
        return self.size == info.size and (None in (self.etag, info.etag) or self.etag == info.etag)


class Records(NamedTuple):
    """The records of indexes.

    Attributes:
        promises: of given shards, by their places.
        others: URLs of the shards that an index lists and that were not given, in their order.
    """

    promises: dict[int, Promise]
    others: list[str]


class _Series(NamedTuple):
    """Shards whose names differ in one number: ``folder before 000123 after ? query``."""

    folder: str
    query: str
    before: str
    after: str


async def read_promises(shards: Sequence[Shard], stores: Stores) -> dict[int, Promise]:
    """Return what indexes say of shards, by the shards' places. Nothing of it has been checked.

    Raises:
        TransportError: the store cannot be read; an index that is missing or damaged is no error.
    """
    uncounted = [at for at, shard in enumerate(shards) if shard.samples is None and shard.format != PARQUET]
    return (await _read_all(uncounted, shards, stores)).promises


async def with_recorded_sizes(shards: Sequence[Shard], stores: Stores) -> Sequence[Shard]:
    """Return shards with the sizes that indexes record (`Shard.stated`): of local files, whose indexes are cheap to
    look for.

    Raises:
        TransportError: as `read_promises`.
    """
    if stores.transport is not None or len(shards) > _MOST_LOCAL:
        return shards
    if not all(scheme_of(shard.url) == "file" for shard in shards):
        return shards
    promises = await read_promises(shards, stores)
    if not promises:
        return shards
    return [shard._replace(stated=promises[at].size) if at in promises else shard for at, shard in enumerate(shards)]


async def read_records(shards: Sequence[Shard], stores: Stores) -> Records:
    """Return what `read_promises` does, and the shards that the indexes list besides. Nothing of it has been checked.

    Raises:
        TransportError: as `read_promises`.
    """
    found = await _read_all(range(len(shards)), shards, stores)
    uncounted = {at: each for at, each in found.promises.items() if shards[at].samples is None}
    return Records(uncounted, found.others)


async def _read_all(places: Sequence[int], shards: Sequence[Shard], stores: Stores) -> Records:
    members: dict[_Series, list[tuple[int, str]]] = defaultdict(list)
    for at in places:
        if shards[at].mds is None:
            for series, number in _series_of(shards[at].url):
                members[series].append((at, number))
    largest = Counter({series: len(found) for series, found in members.items()}).most_common(MOST_INDEXES)
    found = Records({}, [])
    for promises, others in await gather_all(_read(series, members[series], shards, stores) for series, _ in largest):
        found.promises.update(promises)
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
    promises, others = await in_thread(partial(_parse, data, names, members))
    return Records(promises, [join_url(series.folder + series.query, name) for name in others])


def _parse(data: bytes, names: ShardNames, members: Sequence[tuple[int, str]]) -> tuple[dict[int, Promise], list[str]]:
    try:
        index = parse_index(data, names)
    except ValueError:
        return {}, []
    found: dict[int, Promise] = {}
    for at, number in members:
        record = index.shards.get(int(number))
        if record is None or record.name != names.name(number):
            continue
        # A sample has a byte at least, before compression.
        if record.samples <= (record.bytes if names.format.compression is None else _MOST_SAMPLES):
            found[at] = Promise(record.samples, record.bytes, record.etag)
    given = {int(number) for _, number in members}
    return found, [record.name for number, record in sorted(index.shards.items()) if number not in given]
