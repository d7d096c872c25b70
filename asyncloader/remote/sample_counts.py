"""Finds out how many samples each shard has, and where reading can begin inside it; alone, or for all ranks.

Data path: discovery, shard_sizes, index_counts -> [sample_counts: cache_dir] -> stream_order.

Numbers come, in this order, from an MDS index or a Parquet footer, from the cache directory, from the index of
`write_shards`, and from reading the shard, whole. All but the first are compared with the size and the version that the
store has now. While a shard is read, the offsets of some samples are noted, so that reading can begin there later.

Of several ranks, rank 0 lists the shards and counts their samples, and the others get its list and its numbers. Ranks
that would read other shards, or in another order, get an error. Ranks that share the shards without counting get rank
0's list alone, where it comes from a store.

Numbers and offsets are kept in the cache directory:

    cache_dir/asyncloader-counts-2/NAME.json      NAME: a hash of the dataset's URLs

The first line is a checksum of the rest, JSON: for each shard its samples and its marks, by a hash of its URL, size and
ETag, and of the way in which it is read. So a shard that was replaced has none. The file is written anew, under another
name, and renamed. A damaged file is ignored. Any number of processes may use it; the last to write it wins.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
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
from asyncloader.transports import InvalidPath, SizeUnknown

MARKS = 32
"""Most noted offsets in a shard: a reader that begins between two of them passes over up to a 16th of the shard."""

_MARK_BYTES = 1 << 15  # distance of the first offsets; doubled when there are too many

SHARDS = 8
"""Shards that are read at the same time."""

FOLDER = "asyncloader-counts-2"

MAX_FILE_BYTES = 1 << 30

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


async def count_shards(shards: Sequence[Shard], open: Open, found: Callable[[int, Counted], None]) -> None:
    """Count the samples of shards by reading them, several at a time.

    Args:
        shards: the shards.
        open: opens a shard.
        found: called with the index of each shard that was counted, and its count.

    Raises:
        TransportError: a shard cannot be read, and the error is not about its samples.
    """
    done = 0

    async def count(number: int) -> None:
        nonlocal done
        found(number, await _count(shards[number], open))
        done += 1

    def report() -> None:
        _log.warning(
            "the samples of %d shards, which have no index, are counted before the first batch, by reading each once: "
            "%d counted after %.0f s",
            *(len(shards), done, _LOG_AFTER_S),
        )

    timer = asyncio.get_running_loop().call_later(_LOG_AFTER_S, report)
    try:
        await for_each(range(len(shards)), count, SHARDS)
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


def hash_of(*values: object) -> str:
    """Return a text that stands for these plain values."""
    return blake2b(repr(values).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def read_counts(cache_dir: str, name: str) -> dict[str, Counted]:
    """Return the shards that are kept under a name, by their hashes; none if the file is damaged. Blocks."""
    path = Path(cache_dir, FOLDER, f"{name}.json")
    with suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= MAX_FILE_BYTES:
            checksum, _, data = path.read_bytes().partition(b"\n")
            if int(checksum, 16) == zlib.crc32(data):
                return {key: Counted.of(each) for key, each in json.loads(data).items()}
    return {}


def write_counts(cache_dir: str, name: str, counts: Mapping[str, Counted]) -> None:
    """Keep shards under a name, in place of earlier ones. An error of the disk is logged. Blocks."""
    folder, temporary = Path(cache_dir, FOLDER), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(".partial", f".{name}.", folder)
        data = json.dumps(counts).encode()
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"%08x\n" % zlib.crc32(data) + data)
        Path(temporary).replace(folder / f"{name}.json")
    except OSError as error:
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()
        _log.warning("the samples of the shards will be counted again by the next run: %s", error)


_WITHOUT_INFO = (*RAISED_WHEN_READ, InvalidPath, SizeUnknown)  # the shard is read instead


class Counting(NamedTuple):
    """How the samples of a dataset are counted.

    Attributes:
        stores: find the transports.
        open: opens a shard.
        cache_dir: where numbers are kept; None: nowhere.
        urls: the dataset's, as given; its numbers are kept under this name.
        reading: further plain values on which the number of a shard's samples depends.
    """

    stores: Stores
    open: Open
    cache_dir: str | None
    urls: Sequence[str]
    reading: tuple[Any, ...]


async def count_samples(counting: Counting, shards: Sequence[Shard]) -> list[Counted]:
    """Return the count of each shard's samples.

    Raises:
        TransportError: a shard cannot be counted, and the error is not about its samples.
    """
    stores, cache_dir, name = counting.stores, counting.cache_dir, hash_of(*counting.urls)
    promises = (await read_records(shards, stores)).promises
    kept = {} if cache_dir is None else await in_thread(partial(read_counts, cache_dir, name))
    with_footers = await with_counts(shards, stores, leave=RAISED_WHEN_READ)
    found = {at: Counted(shard.samples) for at, shard in enumerate(with_footers) if shard.samples is not None}
    keys: dict[int, str] = {}

    async def look(at: int) -> None:
        transport, path = stores.find(shards[at].url)
        promise = promises.get(at)
        with suppress(*_WITHOUT_INFO):
            info = await transport.info(path)
            if cache_dir is not None and info.etag is not None:
                keys[at] = hash_of(stores.name(shards[at].url), *info, *counting.reading)
            if (known := kept.get(keys.get(at, ""))) is not None:
                # It may be an earlier promise. Of a shard that was read, positions are known.
                indexed = not known.marks and promise is not None and promise.samples == known.samples
                found[at] = known._replace(indexed=indexed)
            elif promise is not None and promise.fits(info):
                found[at] = Counted(promise.samples, indexed=True)

    if cache_dir is not None or promises:
        await for_each([at for at in range(len(shards)) if at not in found], look)
    rest = [at for at in range(len(shards)) if at not in found]
    await count_shards(
        [shards[at] for at in rest], counting.open, lambda number, each: found.__setitem__(rest[number], each)
    )
    counts = {key: found[at] for at, key in sorted(keys.items())}
    if cache_dir is not None and counts.keys() - kept.keys():
        await in_thread(partial(write_counts, cache_dir, name, counts))
    return [found[at] for at in range(len(shards))]


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
    digest = hash_of(about)
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
