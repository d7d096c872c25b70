"""MDS shards, MosaicML's format: samples of typed columns behind a table of offsets. Pure, sans I/O.

Data path: transport -> chunks -> [mds] -> samples.

    count: u4    offsets: u4 x (count + 1)    config: JSON    samples
    sample:      sizes of the columns of varying size: u4 each    the columns' bytes

All of it little-endian. Source: mosaicml/streaming, `streaming/base/format/mds/{writer,reader}.py`. The index beside
the shards (`mds_index`) says what the columns are. A sample's size follows from its own bytes, so a reader may start
at any sample without the table.
"""

from __future__ import annotations

from struct import Struct

from asyncloader.formats.base import MAX_SAMPLE_BYTES, OnBad, Sample
from asyncloader.formats.mds_index import MdsShard
from asyncloader.formats.push import Parser, PushReader

__all__ = ["MdsReader"]


class MdsReader(PushReader):
    """Reads an MDS shard. Fields are decoded by their columns' encodings; the key is the shard's name and the offset.

    A shard can be cut exactly (`MdsShard.cut`). For a compressed one put the reader into a `CompressedReader`. Samples
    that `on_bad` can have stepped over: a value that is none of its encoding.

    Args:
        url: see `push.Reader`, as for `start`, `stop`, `max_sample_bytes` and `on_bad`.
        shard: what the index says of it.
        start: see there; 0, or an offset from `MdsShard.offsets`.
        stop: see there.
        max_sample_bytes: see there. It bounds the table of offsets, too.
        on_bad: see there.
    """

    def __init__(
        self,
        url: str,
        shard: MdsShard,
        *,
        start: int = 0,
        stop: int | None = None,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        on_bad: OnBad | None = None,
    ) -> None:
        stop = shard.size if stop is None else min(stop, shard.size)
        super().__init__(url, start=start, stop=stop, max_sample_bytes=max_sample_bytes, on_bad=on_bad)
        self._shard = shard
        self._end = stop
        sizes = [column.encoding.size for column in shard.columns]
        self._fixed = sum(size for size in sizes if size is not None)
        self._sizes = Struct(f"<{sizes.count(None)}I")

    def _parse(self) -> Parser:
        if self._at == 0:
            if self._shard.header_size > self._max:
                self._fail(f"a table of offsets larger than max_sample_bytes={self._max:,}", 0)
            first = int(self._shard.offsets((yield self._shard.header_size), url=self._url)[0])
            yield -(first - self._at)  # the config, which the index has as well
        while self._at < self._end:
            at = self._at
            head = self._sizes.unpack((yield self._sizes.size))
            size = sum(head) + self._fixed
            self._check_size(size + self._sizes.size, at)
            if self._at + size > self._shard.size:
                self._fail("a sample ends after its shard does", at)
            self._read(head, (yield size), at)

    def _read(self, head: tuple[int, ...], data: bytes, at: int) -> None:
        sizes = iter(head)
        fields: Sample = {}
        pos = 0
        for name, (size, decode) in ((column.name, column.encoding) for column in self._shard.columns):
            size_here = next(sizes) if size is None else size
            try:
                fields[name] = decode(data[pos : pos + size_here])
            except (ValueError, ArithmeticError, RecursionError) as error:
                self._bad(f"column {name!r} cannot be decoded: {error}", at, self._at, error)
                return
            pos += size_here
        self._give(fields, at, self._at)
