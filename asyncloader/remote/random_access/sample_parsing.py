"""Makes a sample of the bytes of a shard that an index says it has. Pure.

Data path: transport, the cache's files, or a decoded chunk -> [sample_parsing] -> shard_reader.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncloader.formats import (
    JsonlReader,
    MdsReader,
    MdsShard,
    Sample,
    ShardError,
    ShardReader,
    TarReader,
    read_whole,
)
from asyncloader.formats.base import SampleSlices
from asyncloader.formats.tar import END
from asyncloader.formats.tfrecord import TFRecordReader
from asyncloader.remote.catalog import Shard


class SampleParser:
    """Makes samples of a shard.

    Args:
        shard: the shard.
        max_sample_bytes: refuse a sample with more (decompressed) bytes.
    """

    def __init__(self, shard: Shard, max_sample_bytes: int) -> None:
        self._url = shard.url
        self._max = max_sample_bytes
        self._tail = END if shard.format.name == "tar" else b""
        self._whole = read_whole(shard.url, shard.format.name, shard.mds)
        self._reader = self._maker(shard)

    def _maker(self, shard: Shard) -> Callable[[int], ShardReader]:
        url, most = self._url, self._max
        if shard.mds is not None:
            mds: MdsShard = shard.mds
            return lambda start: MdsReader(url, mds, start=start, max_sample_bytes=most)
        if shard.format.name == "tar":
            return lambda start: TarReader(url, start=start, max_sample_bytes=most)
        if shard.format.name == "tfrecord":
            return lambda start: TFRecordReader(url, start=start, max_sample_bytes=most)
        return lambda start: JsonlReader(url, start=start, max_sample_bytes=most)

    def parse(self, source: SampleSlices, at: int, end: int, start: int) -> Sample:
        """Return the sample in these bytes.

        Args:
            source: has them.
            at: their position in `source`: where the sample before ends.
            end: where this sample ends.
            start: their offset in the shard, after decompression.

        Raises:
            ShardError: they are no sample, or more.
        """
        length = end - at
        # The members, lines or records of a sample are not larger than its bytes, so they are within the limit, too.
        if length <= self._max and (sample := self._whole(source, at, end, start)) is not None:
            return sample
        reader = self._reader(start)
        found = reader.feed(source[at:end])
        if not found:
            # A tar's sample ends where the next begins, or the archive; other samples end by themselves.
            found = reader.feed(self._tail) if self._tail else reader.end()
        if len(found) != 1 or found[0].resume != start + length:
            raise ShardError(
                f"the index of its samples does not fit this shard: {len(found)} samples where one should be; remove "
                "the index, and make it again",
                url=self._url,
                offset=start,
            )
        return found[0].sample
