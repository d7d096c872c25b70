"""Counts the samples of shards, and notes where reading can begin inside them.

Data path: discovery, shard_sizes -> [sample_counts: cache_dir] -> stream_order.

MDS and Parquet have their numbers in an index or a footer. Shards of other formats are read once, whole; meanwhile the
offsets of some samples are noted, so that reading can begin there later. Both are kept in the cache directory:

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from asyncloader.errors import is_about_sample
from asyncloader.formats import ShardError
from asyncloader.remote.catalog import Shard
from asyncloader.remote.prefetch import Open
from asyncloader.remote.shard_sizes import for_each
from asyncloader.remote.shard_splitting import CatalogRange, is_count

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
        samples, marks, *rest = plain if type(plain) is list and 2 <= len(plain) <= 3 else (None, None)
        numbers = marks if type(marks) is list and len(marks) <= MARKS else [None]
        right = all(type(mark) is list and len(mark) == 2 and all(map(is_count, mark)) for mark in numbers)
        if not right or not is_count(samples) or any(type(flag) is not bool for flag in rest):
            raise ValueError("a count of samples is impossible")
        return cls(samples, [Mark(*mark) for mark in numbers], *rest)


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
        data = json.dumps({key: each[:2] for key, each in counts.items()}).encode()
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"%08x\n" % zlib.crc32(data) + data)
        Path(temporary).replace(folder / f"{name}.json")
    except OSError as error:
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()
        _log.warning("the samples of the shards will be counted again by the next run: %s", error)
