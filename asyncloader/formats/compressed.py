"""Reads shards compressed with gzip or zstd: decompresses, and feeds the reader of the format inside. Pure.

Data path: transport -> chunks -> [compressed] -> reader of the format -> samples.

A call of `feed` stops after decompressing about `STEP` bytes; `pending` says that the chunk contains more. So a
decompression bomb takes no more memory than any other shard, and is refused by `max_sample_bytes`.
"""

from __future__ import annotations

from asyncloader.formats.base import Located, ShardError, ShardReader
from asyncloader.formats.tar import MemberDecoder

__all__ = ["STEP", "CompressedReader"]

STEP = 1 << 20
"""Approximate number of bytes that a call of `feed` decompresses."""

LEAST = 1 << 10
"""A step that returns less counts as this much: so a call of `feed` makes at most 1,024 steps, even for empty members.
"""


class CompressedReader:
    """Reads a compressed shard with `inner`, the reader of the format inside. A `ShardReader`.

    The object must be fed from its first byte, wherever `inner` starts: an offset inside can be reached only by
    decompressing everything before it. Bytes before `inner`'s start are decompressed and dropped. If the compressed
    data is *damaged*, the number of samples before the error depends on the chunks; these samples are correct in any
    case.

    Args:
        url: the shard's, for errors.
        inner: the reader of the format inside.
        decoder: of the compression.
    """

    def __init__(self, url: str, inner: ShardReader, decoder: MemberDecoder) -> None:
        self._url = url
        self._inner = inner
        self._decoder = decoder
        self._skip = inner.feed_from
        self._taken = 0  # compressed bytes fed so far
        self._fault: ShardError | None = None

    @property
    def feed_from(self) -> int:
        """As `ShardReader.feed_from`: always 0."""
        return 0

    @property
    def done(self) -> bool:
        """As `ShardReader.done`."""
        return self._inner.done and self._fault is None

    @property
    def pending(self) -> bool:
        """As `ShardReader.pending`."""
        return self._fault is None and not self._inner.done and not self._decoder.hungry

    def feed(self, chunk: bytes, /) -> list[Located]:
        """As `ShardReader.feed`."""
        if self._fault is not None:
            raise self._fault
        out: list[Located] = []
        try:
            self._read(bytes(chunk), out)
        except ShardError as fault:
            self._fault = fault
            if not out:
                raise
        return out

    def end(self) -> list[Located]:
        """As `ShardReader.end`.

        Raises:
            RuntimeError: called while `pending`.
        """
        if self.pending:
            raise RuntimeError("end() was called while pending: call feed(b'') until it is False")
        if self._fault is not None:
            raise self._fault
        if self._inner.done:
            return []
        try:
            out = self._inner.feed(b"")  # an error that `inner` has not raised yet comes first
            if not self._decoder.complete:
                raise self._error("the compressed data is truncated")
            return out + self._inner.end()
        except ShardError as fault:
            self._fault = fault
            raise

    def _read(self, chunk: bytes, out: list[Located]) -> None:
        if self._inner.done:
            return
        if chunk:
            self._taken += len(chunk)
            self._decoder.give(chunk)
        room = STEP
        while room > 0 and not self._decoder.hungry and not self._inner.done:
            try:
                data = self._decoder.take(room)
            except Exception as error:  # the type depends on the package
                raise self._error(f"the compressed data is damaged: {error}") from error
            room -= max(len(data), LEAST)
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            if len(data) > dropped:
                out += self._inner.feed(data[dropped:])

    def _error(self, message: str) -> ShardError:
        return ShardError(f"{message}, seen after {self._taken:,} compressed bytes", url=self._url)
