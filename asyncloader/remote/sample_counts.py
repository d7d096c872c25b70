"""Finds out how many samples each shard has, and where reading can begin inside it; alone, or for all ranks.

Data path: discovery, shard_sizes, index_counts -> [sample_counts: cache_dir] -> stream_order.

Numbers come, in this order, from an MDS index or a Parquet footer, from the cache directory, from the index of
`write_shards`, and from reading the shard, whole. All but the first are compared with the size and the version that the
store has now. While a shard is read, the offsets of some samples are noted, so that reading can begin there later.

Of several ranks, rank 0 lists the shards and counts their samples, and the others get its list and its numbers. Ranks
that would read other shards, or in another order, get an error. Ranks that share the shards without counting get rank
0's list alone, where it comes from a store.

Numbers and offsets of shards that were read are kept in the cache directory, in ``asyncloader-counts-3``: each under
the shard's URL and size, its ETag, and the way in which it is read. So a shard that was replaced has none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from asyncloader.base.bridge import in_thread
from asyncloader.errors import RanksDisagree, is_about_sample
from asyncloader.formats import ShardError
from asyncloader.ranks.agreement import Agreement
from asyncloader.ranks.exchange import RankExchange, difference, in_daemon, together
from asyncloader.remote.catalog import Shard, plain_list, read_list
from asyncloader.remote.index_counts import read_records
from asyncloader.remote.prefetch import Open
from asyncloader.remote.shard_sizes import RAISED_WHEN_READ, for_each, with_counts
from asyncloader.remote.shard_splitting import CatalogRange, is_count
from asyncloader.remote.stores import Stores
from asyncloader.transports import InvalidPath, ObjectInfo, SizeUnknown
from asyncloader.transports.cache_layout import hash_key
from asyncloader.transports.cache_store import CacheStore, EntryLost
from asyncloader.transports.cache_usage import CacheCounts

MARKS = 32
"""Most noted offsets in a shard: a reader that begins between two of them passes over up to a 16th of the shard."""

_MARK_BYTES = 1 << 15  # distance of the first offsets; doubled when there are too many

SHARDS = 8
"""Shards that are read at the same time."""

FOLDER = "asyncloader-counts-3"

_LOG_AFTER_S = 10.0

_log = logging.getLogger("asyncloader")


class Mark(NamedTuple):
    """Sample `number` of a shard begins at `offset`, in the units of `CatalogRange.start`."""

    number: int
    offset: int


class Counted(NamedTuple):
    """The count of a shard's samples, and the known positions.

    Attributes:
        samples: their number. A bad sample counts, as does the end of a shard that cannot be read: a reader
            of it gets the error.
        marks: where reading can begin, ascending. Without them: at the beginning.
        indexed: an index of its samples may lie beside it, because its number was not counted, but written down.
    """

    samples: int
    marks: Sequence[Mark] = ()
    indexed: bool = False

    def before(self, number: int) -> Mark:
        """Return the last mark at or before a sample."""
        at = bisect_right(self.marks, number, key=itemgetter(0))
        return self.marks[at - 1] if at else Mark(0, 0)

    def after(self, number: int) -> Mark | None:
        """Return the first mark at or after a sample; None: the shard's end."""
        at = bisect_left(self.marks, number, key=itemgetter(0))
        return self.marks[at] if at < len(self.marks) else None

    @classmethod
    def of(cls, plain: Any) -> Counted:
        """Return the count of its values, as JSON has them.

        Raises:
            ValueError: it is no count.
        """
        if type(plain) is not list or len(plain) != 3:
            raise ValueError("a count of samples has three values")
        samples, marks, indexed = plain
        if not is_count(samples) or type(marks) is not list or len(marks) > MARKS or type(indexed) is not bool:
            raise ValueError("a count of samples is impossible")
        if not all(type(mark) is list and len(mark) == 2 and all(map(is_count, mark)) for mark in marks):
            raise ValueError("a position in a shard is impossible")
        return cls(samples, [Mark(*mark) for mark in marks], indexed)


@contextmanager
def warn_when_slow(text: str, total: int, done: Callable[[], int]) -> Generator[None]:
    """Log a warning if the body is still running after some seconds: `text`, with the total, the number done and the
    seconds.
    """
    call_later = asyncio.get_running_loop().call_later
    timer = call_later(_LOG_AFTER_S, lambda: _log.warning(text, total, done(), _LOG_AFTER_S))
    try:
        yield
    finally:
        timer.cancel()


async def _count(shard: Shard, open: Open) -> Counted:
    bad: list[ShardError] = []
    marks: list[Mark] = []
    samples = last = 0
    distance = _MARK_BYTES
    try:
        async with aclosing(open(shard, CatalogRange(0), bad.append)) as batches:
            async for batch in batches:
                # Bad samples are in the order of the good ones, as a later reader finds them.
                ends = [each.resume for each in batch]
                if bad:
                    ends = sorted([*ends, *(error.resume or ends[-1] for error in bad)])
                    bad.clear()
                while ends[-1] >= last + distance:
                    # The first position at this distance: a chunk may have many samples.
                    end = ends[bisect_left(ends, last + distance)]
                    marks.append(Mark(samples + bisect_right(ends, end), end))
                    if len(marks) > MARKS:
                        del marks[::2]
                        distance *= 2
                    last = marks[-1].offset
                samples += len(ends)
                await asyncio.sleep(0)  # the reader of a shard in memory has nothing to wait for
        samples += len(bad)
    except Exception as error:
        if not is_about_sample(error):
            raise
        samples += len(bad) + 1
    return Counted(samples, marks)


class _KeptCounts:
    """The counts in a cache directory. All functions block."""

    def __init__(self, cache_dir: str) -> None:
        self._files = CacheStore(os.path.join(cache_dir, FOLDER), None, CacheCounts())  # noqa: PTH118 - as in `cache_store`
        self._failed = False

    def read(self, name: str, etag: str) -> Counted | None:
        """Return the count that is kept; None: there is none, or it is damaged."""
        with suppress(OSError, ValueError, RecursionError, EntryLost):
            if (file := self._files.open(hash_key(name), etag)) is not None:
                with closing(file):
                    return Counted.of(json.loads(file.read(0, file.size)))
        return None

    def write(self, name: str, etag: str, counted: Counted) -> None:
        """Keep a count. The first error of the disk is logged."""
        try:
            if not self._failed:
                self._files.put(hash_key(name), etag, json.dumps(counted).encode())
        except OSError as error:
            self._failed = True
            _log.warning("the samples of the shards will be counted again by the next run: %s", error)


_WITHOUT_INFO = (*RAISED_WHEN_READ, InvalidPath, SizeUnknown)  # the shard is read instead


class Counting(NamedTuple):
    """How the samples of a dataset are counted.

    Attributes:
        stores: find the transports.
        open: opens a shard.
        cache_dir: where numbers are kept; None: nowhere.
        reading: further plain values on which the number of a shard's samples depends.
    """

    stores: Stores
    open: Open
    cache_dir: str | None
    reading: tuple[Any, ...]


async def count_samples(counting: Counting, shards: Sequence[Shard]) -> list[Counted]:
    """Return the count of each shard's samples.

    Raises:
        TransportError: a shard cannot be counted, and the error is not about its samples.
    """
    stores = counting.stores
    records = (await read_records(shards, stores)).records
    with_footers = await with_counts(shards, stores, leave=RAISED_WHEN_READ)
    found = {at: Counted(shard.samples) for at, shard in enumerate(with_footers) if shard.samples is not None}
    infos: dict[int, ObjectInfo] = {}

    async def ask(at: int) -> None:
        transport, path = stores.find(shards[at].url)
        with suppress(*_WITHOUT_INFO):
            infos[at] = await transport.info(path)

    if counting.cache_dir is not None or records:
        await for_each([at for at in range(len(shards)) if at not in found], ask)
    kept, names = None, dict[int, tuple[str, str]]()
    if counting.cache_dir is not None:
        kept = _KeptCounts(counting.cache_dir)
        for at, (size, etag) in infos.items():
            if etag is not None:
                names[at] = repr((stores.name(shards[at].url), size, *counting.reading)), etag
        found |= await in_thread(partial(_read_all, kept, names))
    for at, info in infos.items():
        record = records.get(at)
        if at not in found and record is not None and record.fits(info):
            found[at] = Counted(record.samples, indexed=True)

    async def count(at: int) -> None:
        counted = await _count(shards[at], counting.open)
        if kept is not None and at in names:
            await in_thread(partial(kept.write, *names[at], counted))
        found[at] = counted

    rest = [at for at in range(len(shards)) if at not in found]
    known = len(found)
    text = (
        "the samples of %d shards, which have no index, are counted before the first batch, by reading each once: %d "
        "counted after %.0f s"
    )
    with warn_when_slow(text, len(rest), lambda: len(found) - known):
        await for_each(rest, count, SHARDS)
    return [found[at] for at in range(len(shards))]


def _read_all(kept: _KeptCounts, names: Mapping[int, tuple[str, str]]) -> dict[int, Counted]:
    found = {at: kept.read(*name) for at, name in names.items()}
    return {at: counted for at, counted in found.items() if counted is not None}


async def count_together(
    count: Callable[[], Awaitable[tuple[Sequence[Shard], Sequence[Counted]]]],
    about: Mapping[str, Any],
    ranks: RankExchange,
) -> tuple[Sequence[Shard], Sequence[Counted]]:
    """Return rank 0's shards, and the count of the samples of each, on all ranks, each of which calls this.

    Args:
        count: lists the shards and counts their samples.
        about: plain values that must be the same on all ranks.
        ranks: the others. The caller holds `RankExchange.planning`.

    Raises:
        RanksDisagree: other values of `about` on another rank; or its error.
        The errors of `count`.
    """

    async def mine() -> tuple[Sequence[Shard], Sequence[Counted], bytes]:
        if ranks.rank:
            return (), (), b""
        shards, counted = await count()
        return shards, counted, await in_thread(partial(_packed, about, shards, counted))

    shards, counted, sent = await together(mine(), ranks)
    data = await ranks.share(sent)

    async def of_rank_0() -> tuple[Sequence[Shard], Sequence[Counted]]:
        if not ranks.rank:
            return shards, counted
        theirs = await in_thread(partial(json.loads, data))
        if (differing := difference(theirs["about"], about, ranks.rank)) is not None:
            raise differing
        return read_list(theirs["shards"]), [*map(Counted.of, theirs["counted"])]

    return await together(of_rank_0(), ranks)


async def list_together(
    find: Callable[[], Awaitable[Sequence[Shard]]] | None, about: object, agreement: Agreement
) -> Sequence[Shard] | None:
    """Return rank 0's shards, for ranks that share them without counting; None: this rank lists for itself.

    Args:
        find: lists the shards; None: each rank does, because that asks no store that all ranks have.
        about: the arguments of the list. A rank of other arguments than rank 0's lists for itself: what it reads is
            compared with what the others read before the first step.
        agreement: with the other ranks, each of which calls this.

    Raises:
        RanksDisagree: rank 0 could not list them, or another rank left.
        The errors of `find`, on rank 0.
    """
    shards: Sequence[Shard] | None = None
    data, error = b"", None
    digest = hash_key(repr(about))
    if find is not None and agreement.is_first_rank:
        try:
            shards = await find()
            data = await in_thread(partial(_packed, digest, shards))
        except Exception as failed:
            error = failed
    text = None if error is None else f"{type(error).__name__}: {error}"
    try:
        data = await in_daemon(partial(agreement.share_list, data, text))
    except RanksDisagree:
        if error is not None:
            raise error from None
        raise
    if shards is None and find is not None and data:
        try:
            theirs = await in_thread(partial(json.loads, data))
            shards = read_list(theirs["shards"]) if theirs["about"] == digest else None
        except (ValueError, TypeError, KeyError, RecursionError) as broken:
            raise RanksDisagree(f"the list of shards that rank 0 has sent is broken: {broken}") from None
    return shards


def _packed(about: Any, shards: Sequence[Shard], counted: Sequence[Counted] = ()) -> bytes:
    """Return the values that rank 0 sends to the others."""
    return json.dumps({"about": about, "shards": plain_list(shards), "counted": counted}).encode()
