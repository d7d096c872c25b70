"""Counts the samples of shards, and notes where reading can begin inside them.

Data path: discovery, shard_sizes -> [sample_counts: cache_dir] -> stream_order.

MDS and Parquet have their numbers in an index or a footer. Shards of other formats are read once, whole; meanwhile the
offsets of some samples are noted, so that reading can begin there later. Both are kept in the cache directory:

    cache_dir/asyncloader-counts-1/NAME.counts      NAME: a hash of the dataset's URLs

A record is found by a hash of the shard's URL, size and ETag, and of the way in which it is read: a shard that was
replaced has none. The file is written anew, under another name, and renamed. A file with a wrong checksum is ignored.
Any number of processes may use it; the last to write it wins.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.errors import is_about_sample
from asyncloader.formats import ShardError
from asyncloader.remote.catalog import Shard
from asyncloader.remote.prefetch import Open
from asyncloader.remote.shard_sizes import for_each
from asyncloader.remote.shard_splitting import CatalogRange

MARKS = 32
"""Most noted offsets in a shard: a reader that begins between two of them passes over up to a 16th of the shard."""

_MARK_BYTES = 1 << 15  # distance of the first offsets; doubled when there are too many

SHARDS = 8
"""Shards that are read at the same time."""

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
        marks: where reading can begin, ascending: the numbers of samples, and their offsets. None: at the beginning.
        indexed: an index of its samples may lie beside it, because its number was not counted, but written down.
    """

    samples: int
    marks: npt.NDArray[np.int64] | None = None
    indexed: bool = False

    def before(self, number: int) -> Mark:
        """Return the last mark at or before a sample."""
        if self.marks is None or not (at := int(np.searchsorted(self.marks[0], number, side="right"))):
            return Mark(0, 0)
        return Mark(*self.marks[:, at - 1].tolist())

    def after(self, number: int) -> Mark | None:
        """Return the first mark at or after a sample; None: the shard's end."""
        if self.marks is None or (at := int(np.searchsorted(self.marks[0], number))) == self.marks.shape[1]:
            return None
        return Mark(*self.marks[:, at].tolist())


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
    return Counted(samples, np.array(marks, np.int64).T.copy() if marks else None)


FOLDER = "asyncloader-counts-1"

MAX_FILE_BYTES = 1 << 30

_MAGIC = b"ALcount1"
_HEAD = struct.Struct("<8s16sQ")  # magic, hash of the rest, number of shards
_KEY = 16

_log = logging.getLogger("asyncloader")


def hash_of(*values: object) -> bytes:
    """Return 16 bytes that stand for these plain values."""
    return blake2b(repr(values).encode(errors="surrogatepass"), digest_size=_KEY).digest()


def pack_counts(counts: Mapping[bytes, Counted]) -> bytes:
    """Return the file of these shards, by their hashes."""
    samples = np.array([each.samples for each in counts.values()], "<i8")
    marks = [np.empty((2, 0), np.int64) if each.marks is None else each.marks for each in counts.values()]
    sizes = np.array([each.shape[1] for each in marks], "<i8")
    numbers = np.concatenate([each.ravel() for each in marks]) if marks else np.empty(0)
    body = b"".join([*counts, samples.tobytes(), sizes.tobytes(), numbers.astype("<i8").tobytes()])
    return _HEAD.pack(_MAGIC, blake2b(body, digest_size=_KEY).digest(), len(counts)) + body


def parse_counts(data: bytes) -> dict[bytes, Counted]:
    """Return the shards of a file; none if it is damaged."""
    if len(data) < _HEAD.size:
        return {}
    magic, digest, shards = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or digest != blake2b(body, digest_size=_KEY).digest() or shards * (_KEY + 16) > len(body):
        return {}
    samples = np.frombuffer(body, "<i8", shards, shards * _KEY)
    sizes = np.frombuffer(body, "<i8", shards, shards * (_KEY + 8))
    numbers = np.frombuffer(body, "<i8", offset=shards * (_KEY + 16))
    if (samples < 0).any() or (sizes < 0).any() or (sizes > MARKS).any() or 2 * sizes.sum() != len(numbers):
        return {}
    ends = np.cumsum(2 * sizes).tolist()
    found: dict[bytes, Counted] = {}
    for at, (count, size) in enumerate(zip(samples.tolist(), sizes.tolist(), strict=True)):
        marks = numbers[ends[at] - 2 * size : ends[at]].reshape(2, size).astype(np.int64) if size else None
        found[body[at * _KEY : (at + 1) * _KEY]] = Counted(count, marks)
    return found


def read_counts(cache_dir: str, name: str) -> dict[bytes, Counted]:
    """Return the shards that are kept under a name; none if the file cannot be read. Blocks."""
    path = Path(cache_dir, FOLDER, f"{name}.counts")
    with suppress(OSError):
        if path.stat().st_size <= MAX_FILE_BYTES:
            return parse_counts(path.read_bytes())
    return {}


def write_counts(cache_dir: str, name: str, counts: Mapping[bytes, Counted]) -> None:
    """Keep shards under a name, in place of earlier ones. An error of the disk is logged. Blocks."""
    folder, temporary = Path(cache_dir, FOLDER), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(".partial", f".{name}.", folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pack_counts(counts))
        Path(temporary).replace(folder / f"{name}.counts")
    except OSError as error:
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()
        _log.warning("the samples of the shards will be counted again by the next run: %s", error)
