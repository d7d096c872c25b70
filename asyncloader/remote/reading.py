"""Reads one range of a shard: from its transport to its samples.

Data path: transport -> prefetch.StreamBuffer -> [reading: push parser] -> prefetch.RangeReading -> worker_stream.

The parser is a push parser without I/O (`formats.base`); this module feeds it. Compressed shards are decompressed in a
thread, because zlib and zstd release the GIL. All other parsing runs in the event loop, in chunks that are small enough
to keep the loop responsive. Parquet is read by byte ranges instead: `parquet_reading`. All samples of a shard that a
worker reads are of one version, over all ranges and errors (`Pins`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

from asyncloader.formats import (
    MAX_SAMPLE_BYTES,
    CompressedReader,
    IndexedReader,
    Located,
    LocatedSamples,
    OnBad,
    ShardError,
    ShardRange,
    ShardReader,
    open_indexed_reader,
    open_reader,
)
from asyncloader.formats.parquet import RowOptions
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.parquet_reading import SharedRows, read_parquet
from asyncloader.remote.prefetch import AnyRange, StreamBuffer
from asyncloader.remote.shard_splitting import SegmentRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import PinnedReader, RangeOutOfBounds, RangesIgnored, Transport, TransportError
from asyncloader.workers.fetch.threads import JobThreads

MakeReader: TypeAlias = Callable[[str, ShardRange], ShardReader]
"""A user's own format: makes the reader of a range of a shard, given the URL."""

READ_AHEAD = 8 << 20
"""Bytes of a shard that are fetched ahead of parsing, by default: 8 MiB, 80 ms at 100 MB/s."""

CHUNK = 1 << 20

AT_ONCE = 1 << 18
"""A range of at most this number of bytes is read whole: a stream of it would cost more than its bytes."""

SLOW_CHUNK = 1 << 17
"""Parsing JSON takes about 10 ms per MB."""

BEHIND = 1 << 16
"""Bytes behind a range of JSON lines that are requested with it: its last line may end there."""

PIECE = 1 << 15
"""Bytes of a segment of a fixed stream that are parsed at a time, at first. A worker reads many of these streams:
samples of whole chunks would leave the CPU's cache before they are needed.
"""

PIECE_SAMPLES = 16
"""After a piece with fewer samples the next piece is larger."""


MOST_PINS = 256
"""Shards whose versions a worker keeps; it reads its ranges of one shard soon after each other."""


@dataclass(slots=True)
class Pin:
    """The reader of one shard's version."""

    reader: PinnedReader
    open: int = 0  # ranges that are being read
    used: bool = False
    """Samples of this version have been returned, so no other version may be read."""


class Pins:
    """The versions of the shards of which one worker has read samples in an epoch."""

    def __init__(self) -> None:
        self._pins: OrderedDict[str, Pin] = OrderedDict()

    @contextmanager
    def hold(self, transport: Transport, path: str, url: str) -> Generator[Pin, None, None]:
        """Return the reader of a shard for the time of a ``with`` block. A version without returned samples is dropped
        at its end, so that the next attempt may read another version.
        """
        pin = self._pins.get(url)
        if pin is None or pin.reader.transport is not transport:
            pin = self._pins[url] = Pin(transport.pinned(path))
        self._pins.move_to_end(url)
        pin.open += 1
        try:
            yield pin
        finally:
            pin.open -= 1
            if not (pin.open or pin.used) and self._pins.get(url) is pin:
                del self._pins[url]
            # A version that is in use is never dropped, whatever the number.
            if len(self._pins) > MOST_PINS and (idle := next((u for u, p in self._pins.items() if not p.open), None)):
                del self._pins[idle]


async def read_shard_range(
    stores: Stores,
    shard: Shard,
    shard_range: AnyRange,
    *,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    on_bad: OnBad | None = None,
    reader: MakeReader | None = None,
    read_ahead: int = READ_AHEAD,
    columns: Sequence[str] | None = None,
    pins: Pins | None = None,
    shared: SharedRows | None = None,
) -> AsyncGenerator[Sequence[Located], None]:
    """Read one range of a shard.

    Bytes are fetched ahead by a task, which starts and ends with the iteration. An iterator that is left before its end
    must be closed: ``async with contextlib.aclosing(read_shard_range(...)) as batches``.

    Args:
        stores: finds the transport for the shard's URL.
        shard: the shard.
        shard_range: the range. To continue after a sample: ``shard_range._replace(start=resume, sync=False)``. With a
            custom reader, or Parquet, `skip` and `most` of a `SegmentRange` are ignored: the whole range is returned.
        max_sample_bytes: refuse a sample with more (decompressed) bytes.
        on_bad: called in the loop with each bad sample that can be skipped, before the samples after it are returned.
            None: the first bad sample is raised.
        reader: makes the reader of a user's own format, which has its own limits and its own `on_bad`.
        read_ahead: bytes that are fetched ahead of parsing, at least 1. A chunk of up to 1 MiB may come on top.
        columns: of Parquet, the columns to read. None: all. Other formats have no columns.
        pins: the versions of the shards of which samples have been read; this shard's is added. None: any version.
        shared: of Parquet, the row groups that are read at the same time. None: it shares none.

    Yields:
        Non-empty sequences of samples, in the shard's order, each sample with the offset at which to continue after it.

    Raises:
        ShardError: the shard violates its format or ends too early; raised after the samples before the error.
        TransportError: the bytes cannot be read; raised after the samples before the error. A `SegmentRange` that is
            short is read at once: none of its samples come first.
        ValueError: the shard cannot have this range.
        ImportError: the format needs a package that is not installed.
    """
    if read_ahead < 1:
        raise ValueError(f"read_ahead must be at least 1 byte, got {read_ahead}")
    transport, path = stores.find(shard.url)
    found: AsyncGenerator[Sequence[Located], None]
    with (Pins() if pins is None else pins).hold(transport, path, shard.url) as pin:
        bad: list[ShardError] = []
        if shard.format == PARQUET and reader is None:
            found = read_parquet(
                pin.reader,
                shard.url,
                start=shard_range.start,
                stop=shard_range.stop,
                options=RowOptions(columns, max_sample_bytes, read_ahead),
                on_bad=None if on_bad is None else bad.append,
                shared=shared,
            )
        else:
            part = ShardRange(shard_range.start, shard_range.stop, shard_range.sync)
            segment = shard_range if isinstance(shard_range, SegmentRange) else None
            bad_sample = None if on_bad is None else bad.append
            shard_reader: ShardReader | IndexedReader
            if reader is not None:
                shard_reader = reader(shard.url, part)
            elif segment is not None and segment.edges is not None:
                shard_reader = open_indexed_reader(
                    shard.url,
                    shard.format,
                    segment.edges.offsets,
                    last=segment.stop is None,
                    max_sample_bytes=max_sample_bytes,
                    on_bad=bad_sample,
                    shard=shard.mds,
                )
            else:
                shard_reader = open_reader(
                    shard.url,
                    shard.format,
                    part=part,
                    max_sample_bytes=max_sample_bytes,
                    on_bad=bad_sample,
                    shard=shard.mds,
                    skip=0 if segment is None else segment.skip,
                    most=None if segment is None else segment.most,
                )
            packed = isinstance(shard_reader, CompressedReader)
            found = _push(
                pin.reader,
                shard_reader,
                stop=None if packed or reader is not None else shard_range.stop,
                chunk_size=SLOW_CHUNK if shard.format.name == "jsonl" else CHUNK,
                most=read_ahead,
                thread=packed,
                exact=segment is not None,
                behind=BEHIND if segment is None and shard.format.name == "jsonl" else 0,
                shard=shard,
                report=partial(_report_bad, on_bad, bad),
            )
        async with aclosing(found) as batches:
            try:
                async for batch in batches:
                    _report_bad(on_bad, bad)
                    if batch:
                        # Before the samples are returned: from now on, a retry must not read another version.
                        pin.used = True
                        yield batch
                _report_bad(on_bad, bad)
                if shard_range.stop is None and pin.reader.size is not None:
                    check_size(shard, pin.reader.size)  # of formats that end before their object does, too
            except RangeOutOfBounds as error:
                # The plan has a position that the object does not have: the shard is at fault, and not the read.
                size = "fewer" if error.size is None else f"{error.size:,}"
                raise ShardError(
                    f"the shard is truncated, or was replaced: it has {size} bytes",
                    url=shard.url,
                    offset=shard_range.start,
                ) from error
            except (ShardError, TransportError):
                _report_bad(on_bad, bad)
                raise


def check_size(shard: Shard, end: int, stop: int | None = None) -> None:
    """Compare where a shard ends with the size that is stated of it. `stop`: from there on it was not read.

    Raises:
        ShardError: it has another size. Without this, lines that were cut off would be missing in silence.
    """
    if shard.stated is None or end == shard.stated or (stop is not None and stop <= end < shard.stated):
        return
    if end > shard.stated != shard.size:
        return  # the size is not a listing's, but an index's, after which lines may have been appended
    raise ShardError(
        f"the shard ends at byte {end:,}, but its listing, or the index of write_shards beside it, says that it has "
        f"{shard.stated:,} bytes: it was cut or replaced. Write it again, or delete the index",
        url=shard.url,
        offset=end,
    )


def _report_bad(on_bad: OnBad | None, bad: list[ShardError]) -> None:
    """Report the bad samples that were skipped. The reader cannot call `on_bad`, because it may run in a thread."""
    while on_bad is not None and bad:
        on_bad(bad.pop(0))


async def _push(
    pinned: PinnedReader,
    reader: ShardReader | IndexedReader,
    *,
    stop: int | None,
    chunk_size: int,
    most: int,
    thread: bool,
    exact: bool,
    behind: int,
    shard: Shard,
    report: Callable[[], None],
) -> AsyncGenerator[Sequence[Located], None]:
    """Feed `reader` to its end. Yields one sequence per call of the reader, including empty ones.

    Args:
        pinned: reads the shard.
        reader: the parser to feed.
        stop: offset after which bytes are fetched only if the reader needs them. None: to the end.
        chunk_size: upper bound of the bytes per call of the reader.
        most: bytes that are fetched ahead.
        thread: run the reader in a thread.
        exact: the last sample of the reader ends at `stop`.
        behind: bytes from `stop` on that the reader may need.
        shard: which is read; its stated size is compared where the object ends.
        report: reports the bad samples that the reader has found so far.
    """
    parsing = JobThreads(1, "asyncloader-parse")
    at_once = exact and not thread
    small = at_once and not isinstance(reader, IndexedReader)
    feeding = _Feeding(reader, PIECE if small else chunk_size, chunk_size, report if at_once else None)
    fed = chunk_size

    async def call(function: Callable[[bytes], Sequence[Located]], data: bytes) -> Sequence[Located]:
        nonlocal fed
        if thread:
            return cast("Sequence[Located]", await parsing.call(function, data))
        # Let other tasks run: while chunks are buffered, nothing else in this loop waits.
        if fed >= chunk_size:
            fed = 0
            await asyncio.sleep(0)
        fed += max(len(data), PIECE)
        return function(data)

    if reader.done:
        return
    start = reader.feed_from
    if exact and stop is not None and 0 < stop - start <= AT_ONCE:
        # Of a shard that ends earlier, the samples before its end are streamed below; from a server without
        # byte ranges, all of them.
        data = b""
        with suppress(RangeOutOfBounds, RangesIgnored):
            (data,) = await pinned.read_ranges([(start, stop - start)])
        feeding.add(data)
        while (piece := feeding.next()) is not None:
            yield feeding.found(piece, await call(reader.feed, piece))
        if reader.done:
            return
    at = start + feeding.taken
    chunks = pinned.stream(start=at, stop=None if stop is None else stop + behind, chunk_size=chunk_size)
    wanted = None if stop is None else max(stop - at, 0)
    feeding.buffer = ahead = StreamBuffer(chunks, most=most, wanted=wanted)
    try:
        while (chunk := await ahead.next()) is not None:
            feeding.add(chunk)
            while (piece := feeding.next()) is not None:
                yield feeding.found(piece, await call(reader.feed, piece))
            if reader.done:
                return
        check_size(shard, start + feeding.taken, stop if stop is None else stop + behind)
        yield await call(lambda _: reader.end(), b"")
    finally:
        parsing.close()
        await ahead.aclose()


class _Feeding:
    """Cuts chunks into the pieces that a reader is fed with; also feeds it, where samples are wanted without a wait.

    Args:
        reader: the reader.
        size: bytes of the first pieces.
        most: bytes of a piece, where the samples are large.
        report: reports the bad samples that the reader has found so far. None: the samples have no `further`.
    """

    def __init__(
        self, reader: ShardReader | IndexedReader, size: int, most: int, report: Callable[[], None] | None
    ) -> None:
        self._reader = reader
        self._size = size
        self._most = most
        self._report = report
        self.buffer: StreamBuffer | None = None
        """Has the next chunks, as far as they have arrived. None: it has none yet."""
        self.taken = 0
        """Bytes of all chunks so far."""
        self._chunk, self._at = b"", 0
        self._fault: Exception | None = None  # by which `_further` failed

    def add(self, chunk: bytes) -> None:
        """Go on with a chunk, once `next` has returned None."""
        self.taken += len(chunk)
        self._chunk, self._at = chunk, 0

    def next(self) -> bytes | None:
        """Return the bytes to feed the reader with; None: it needs the next chunk, or is done.

        Raises:
            Exception: the reader has failed in `_further`.
        """
        if self._fault is not None:
            fault, self._fault = self._fault, None
            try:
                raise fault
            finally:
                del fault  # its traceback refers to this frame
        if self._reader.pending:
            return b""
        if self._at >= len(self._chunk) or self._reader.done:
            self.add(b"")
            if not self._reader.done and self.buffer is not None:
                self.add(self.buffer.pop() or b"")
            if not self._chunk:
                return None
        piece = self._chunk[self._at : self._at + self._size]
        self._at += len(piece)
        return piece

    def found(self, piece: bytes, samples: Sequence[Located]) -> Sequence[Located]:
        """Return the samples that the reader has made of a piece. After few of them the next pieces are larger."""
        if piece and len(samples) < PIECE_SAMPLES and self._size < self._most:
            self._size = min(2 * self._size, self._most)
        if self._report is None or not samples:
            return samples
        if isinstance(samples, LocatedSamples):
            return LocatedSamples(samples.samples, samples.resumes, self._further)
        return LocatedSamples([each[0] for each in samples], [each[1] for each in samples], self._further)

    def _further(self) -> LocatedSamples | None:
        """Feed the reader until it returns samples, as `LocatedSamples.further`."""
        assert self._report is not None
        found: Sequence[Located] = ()
        try:
            try:
                while not found and self._fault is None and (piece := self.next()) is not None:
                    found = self.found(piece, self._reader.feed(piece))
            finally:
                self._report()
        except Exception as error:
            self._fault = error
        return found if isinstance(found, LocatedSamples) else None
