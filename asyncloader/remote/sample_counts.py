"""Counts the samples of shards, and notes where reading can begin inside them.

Data path: discovery, shard_sizes -> [sample_counts] -> stream_order.

MDS and Parquet have their numbers in an index or a footer. Shards of other formats are read once, whole; meanwhile the
offsets of some samples are noted, so that reading can begin there later.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.errors import is_about_sample
from asyncloader.formats import ShardError
from asyncloader.remote.catalog import Shard
from asyncloader.remote.prefetch import Open
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.transports.base import gather_all

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
    waiting = iter(enumerate(shards))

    async def work() -> None:
        nonlocal done
        for number, shard in waiting:
            found(number, await _count(shard, open))
            done += 1

    def report() -> None:
        _log.warning(
            "the samples of %d shards, which have no index, are counted before the first batch, by reading each once: "
            "%d counted after %.0f s",
            *(len(shards), done, _LOG_AFTER_S),
        )

    timer = asyncio.get_running_loop().call_later(_LOG_AFTER_S, report)
    try:
        await gather_all(work() for _ in range(min(SHARDS, len(shards))))
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
