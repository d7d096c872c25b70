"""Reads shards compressed with gzip or zstd: decompresses, and feeds the reader of the format inside. Compresses. Pure.

Data path: transport -> chunks -> [compressed] -> reader of the format -> samples; shard -> [compressed] -> object.

A call of `feed` stops after decompressing about `STEP` bytes; `pending` is True if the chunk contains more. So a
decompression bomb takes no more memory than any other shard, and is refused by `max_sample_bytes`.

A kilobyte may expand to a megabyte (gzip) or a hundred (zstd), so data is decompressed in short slices, and the rest
stays compressed. Members (gzip, RFC 1952) and frames (zstd, RFC 8878) may be concatenated.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias

from typing_extensions import Buffer

from asyncloader.errors import ShardError
from asyncloader.formats.base import Located, ShardReader

Compression: TypeAlias = Literal["gzip", "zstd"]

GZIP_SLICE, ZSTD_SLICE = 1 << 12, 1 << 8
"""Compressed bytes that are decompressed at once. They expand to 4 MiB, where a byte of gzip becomes a thousand; and
to 8 MiB, where 4 bytes of zstd become a block of 128 KiB.
"""

ZSTD_WINDOW_LOG = 27
"""Maximum memory for a zstd frame's window: 128 MiB, the limit of the zstd tool."""

ZSTD_MODULES = ("compression.zstd", "zstandard")
"""Python's own, from 3.14 on; and the package of the extra."""

ZSTD_LEVEL = 3
"""The zstd tool's own."""

STEP = 1 << 20
"""Approximate number of bytes that a call of `feed` decompresses."""

LEAST = 1 << 10
"""A step that returns fewer bytes counts as this number: so a call of `feed` makes at most 1,024 steps, even for empty
members.
"""


class CompressedReader:
    """Reads a compressed shard with `inner`, the reader of the format inside. A `ShardReader`.

    The object must be fed from its first byte, wherever `inner` starts: an offset inside can be reached only by
    decompressing all bytes before it. Bytes before `inner`'s start are decompressed and dropped. If the compressed data
    is *damaged*, the number of samples before the error depends on the chunks; these samples are always correct.

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
        """Always 0. See `ShardReader.feed_from`."""
        return 0

    @property
    def done(self) -> bool:
        """Whether the reader inside is done. See `ShardReader.done`."""
        return self._inner.done and self._fault is None

    @property
    def pending(self) -> bool:
        """Whether bytes are left to decompress. See `ShardReader.pending`."""
        return self._fault is None and not self._inner.done and not self._decoder.hungry

    def feed(self, chunk: bytes, /) -> list[Located]:
        """Decompress, and feed the reader inside. See `ShardReader.feed`."""
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
        """Finish after the last byte. See `ShardReader.end`.

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
            # Raises an error that `inner` has kept behind its samples: it comes before this reader's own error.
            out = self._inner.feed(b"")
            if not self._decoder.complete:
                raise self._error("the compressed data is truncated")
            # `inner` has not been fed, and could take this for the end of the shard.
            if self._skip:
                raise self._error(
                    f"the shard is truncated, or was replaced: it ends {self._skip:,} decompressed bytes before the "
                    "position to read from"
                )
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
        # Limited: a chunk may expand a thousandfold. The rest stays compressed until the next call.
        room = STEP
        while room > 0 and not self._decoder.hungry and not self._inner.done:
            try:
                data = self._decoder.take()
            except Exception as error:  # the type depends on the package
                # These are zstd's own words.
                if "requires too much memory" in str(error):
                    raise self._error(
                        f"a zstd frame's window is larger than {1 << ZSTD_WINDOW_LOG >> 20} MiB, the most that is "
                        f"read: compress the shard again with zstd --long={ZSTD_WINDOW_LOG}, or without --long"
                    ) from error
                raise self._error(f"the compressed data is damaged: {error}") from error
            room -= max(len(data), LEAST)
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            if len(data) > dropped:
                out += self._inner.feed(data[dropped:])

    def _error(self, message: str) -> ShardError:
        return ShardError(f"{message}, seen after {self._taken:,} compressed bytes", url=self._url)


class MemberDecoder:
    """Decompresses concatenated members (gzip) or frames (zstd).

    Raises:
        ImportError: no package for zstd is installed.
    """

    def __init__(self, compression: Compression) -> None:
        self._gzip = compression == "gzip"
        # 31: with a gzip header and trailer, of which zlib checks the CRC-32 and the length.
        self._begin = partial(zlib.decompressobj, 31) if self._gzip else _zstd_frames()
        self._slice = GZIP_SLICE if self._gzip else ZSTD_SLICE
        self._member: Any = None
        self._input = b""
        self._pos = 0
        self._members = 0

    @property
    def hungry(self) -> bool:
        """Whether all output of the bytes given so far was returned."""
        return self._pos >= len(self._input)

    @property
    def complete(self) -> bool:
        """Whether the bytes given so far end where a member ends."""
        return self.hungry and self._member is None and self._members > 0

    def give(self, data: bytes) -> None:
        """Take compressed bytes."""
        self._input, self._pos = self._input[self._pos :] + data, 0

    def take(self) -> bytes:
        """Decompress some bytes, 8 MiB at most; may return none although not `hungry`.

        Raises:
            Exception: the bytes are damaged, or not of this compression; the type depends on the package.
        """
        if self._member is None:
            # No member begins with a zero byte: it is padding, as on tapes.
            if self._gzip and self._members and self._input[self._pos] == 0:
                self._input, self._pos = self._input[self._pos :].lstrip(b"\0"), 0
                return b""
            self._member = self._begin()
        member, found = self._member, b""
        while not found and not self.hungry and not member.eof:
            data = self._input[self._pos : self._pos + self._slice]
            self._pos += len(data)
            found = member.decompress(data)
        if member.eof:
            # Back to the first byte of the next member: the last slice may have contained its beginning.
            self._pos -= len(member.unused_data)
            self._member = None
            self._members += 1
        return found


def _zstd() -> Any:
    """Import Python's own module for zstd, or the package of the extra.

    Raises:
        ImportError: none is installed.
    """
    for name in ZSTD_MODULES:
        with suppress(ImportError):
            return importlib.import_module(name)
    raise ImportError("shards with zstd need a package for it: pip install 'asyncloader[shards]'")


def _zstd_frames() -> Callable[[], Any]:
    """Return the function that makes the decompressor of a frame.

    Raises:
        ImportError: no package for zstd is installed.
    """
    module = _zstd()
    if module.__name__ == "zstandard":
        begin: Callable[[], Any] = module.ZstdDecompressor(max_window_size=1 << ZSTD_WINDOW_LOG).decompressobj
        return begin
    options = {module.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
    return partial(module.ZstdDecompressor, None, options)


def compressor(compression: Compression) -> Callable[[Sequence[Buffer]], list[Buffer]]:
    """Return the function that compresses a shard. It takes CPU time and releases the GIL: call it in a thread.

    The bytes depend on the shard and on the compressing library alone: a gzip header has no time and no name.

    Raises:
        ImportError: no package for zstd is installed.
    """
    if compression == "gzip":
        return _gzip
    module = _zstd()
    if module.__name__ != "zstandard":
        return lambda pieces: [module.compress(b"".join(pieces), level=ZSTD_LEVEL)]
    # As a whole: the frame then says its size, which some readers need. A compressor for each shard: several threads
    # compress at a time, and must not share its state.
    return lambda pieces: [module.ZstdCompressor(level=ZSTD_LEVEL).compress(b"".join(pieces))]


def _gzip(pieces: Sequence[Buffer]) -> list[Buffer]:
    """Compress with gzip, at its usual level 6."""
    member = zlib.compressobj(wbits=31)
    return [*(each for piece in pieces if (each := member.compress(piece))), member.flush()]
