"""Makes a sample of the bytes of a shard that an index says it has. Pure.

Data path: transport, or a decoded chunk -> [sample_parsing] -> shard_reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncloader.formats import JsonlReader, MdsReader, MdsShard, Sample, ShardError, ShardReader, TarReader
from asyncloader.formats.tar import END
from asyncloader.formats.tfrecord import TFRecordReader, fast_crc32c
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
        self._reader = self._maker(shard)

    def _maker(self, shard: Shard) -> Callable[[int], ShardReader]:
        url, most = self._url, self._max
        if shard.mds is not None:
            mds: MdsShard = shard.mds
            return lambda start: MdsReader(url, mds, start=start, max_sample_bytes=most)
        if shard.format.name == "tar":
            return lambda start: TarReader(url, start=start, max_sample_bytes=most)
        if shard.format.name == "tfrecord":
            checksum = fast_crc32c()
            return lambda start: TFRecordReader(url, start=start, checksum=checksum, max_sample_bytes=most)
        return lambda start: JsonlReader(url, start=start, max_sample_bytes=most)

    def parse(self, data: bytes, start: int, *, last: bool) -> Sample:
        """Return the sample in these bytes.

        Args:
            data: from the end of the sample before to the end of this sample.
            start: their offset in the shard, after decompression.
            last: the shard ends with them.

        Raises:
            ShardError: they are no sample, or more.
        """
        reader = self._reader(start)
        found = reader.feed(data)
        if not found:
            # A tar's sample ends where the next begins, or the archive; other samples end by themselves.
            found = reader.feed(self._tail) if self._tail and not last else reader.end()
        if len(found) != 1 or found[0].resume != start + len(data):
            raise ShardError(
                f"the index of its samples does not fit this shard: {len(found)} samples where one should be; remove "
                "the index, and make it again",
                url=self._url,
                offset=start,
            )
        return found[0].sample


def places(edges: Sequence[int], numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and length of the bytes of samples, by their numbers."""
    return [(int(edges[number]), int(edges[number + 1] - edges[number])) for number in numbers]
