"""Reads shards compressed with gzip or zstd: decompresses, and feeds the reader of the format inside. Compresses. Pure.

Data path: transport -> chunks -> [compressed] -> reader of the format -> samples; shard -> [compressed] -> object.

A call of `feed` stops after decompressing about `STEP` bytes; `pending` is True if the chunk contains more. So a
decompression bomb takes no more memory than any other shard, and is refused by `max_sample_bytes`.

A kilobyte may expand to a megabyte (gzip) or a hundred (zstd), so data is decompressed in bounded steps: the caller
limits the bytes of a step, and the rest stays compressed. Members (gzip, RFC 1952) and frames (zstd, RFC 8878) may be
concatenated.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from typing_extensions import Buffer

from asyncloader.formats.base import Located, ShardError, ShardReader

Compression: TypeAlias = Literal["gzip", "zstd"]

SLICE = 1 << 14
"""Compressed bytes passed to a member at once: bytes that a short member does not use are copied for the next member.
"""

ZSTD_SLICE = 1 << 8
"""The slice for `zstandard`, whose output cannot be bounded: 4 bytes expand to a block of 128 KiB, so this slice
expands to 8 MiB.
"""

ZSTD_WINDOW_LOG = 27
"""Maximum memory for a zstd frame's window: 128 MiB, the limit of the zstd tool."""

ZSTD_MODULES = ("compression.zstd", "zstandard")
"""Python's own, from 3.14 on, whose `ZstdDecompressor` is a `Member`; and the package of the extra."""

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
                data = self._decoder.take(room)
            except Exception as error:  # the type depends on the package
                # These are zstd's own words, in the errors of both modules.
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


class Member(Protocol):
    """One member's decompressor, with the interface of Python's `bz2`, `lzma` and `compression.zstd`."""

    @property
    def eof(self) -> bool:
        """Whether the decompressor has reached the member's end."""
        ...

    @property
    def unused_data(self) -> bytes:
        """The bytes after the member's end."""
        ...

    @property
    def needs_input(self) -> bool:
        """Whether ``decompress(b"")`` would return nothing more."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take `data`; return at most `max_length` bytes (`zstandard`: approximately)."""
        ...


class GzipMember:
    """A `Member` on `zlib`'s decompressor, which does not keep unused input."""

    def __init__(self) -> None:
        # 31: with a gzip header and trailer, of which zlib checks the CRC-32 and the length.
        self._zlib = zlib.decompressobj(31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        """Whether the decompressor has reached the member's end."""
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        """The bytes after the member's end."""
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take `data`; return at most `max_length` bytes."""
        out = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        # If the output is full, zlib may hold more of it, even though it has taken all input.
        self.needs_input = len(out) < max_length and not self._zlib.unconsumed_tail
        return out


class ZstandardMember:
    """A `Member` on the `zstandard` package's decompressor, whose output can be bounded only by its input."""

    def __init__(self, context: Any) -> None:
        self._frame = context.decompressobj()
        self._input = b""

    @property
    def eof(self) -> bool:
        """Whether the decompressor has reached the member's end."""
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        """The bytes after the member's end."""
        unused: bytes = self._frame.unused_data
        return unused + self._input

    @property
    def needs_input(self) -> bool:
        """Whether all input was decompressed."""
        return not self._input

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take `data`; return `max_length` bytes at most, or more by the output of a slice."""
        self._input += data
        parts: list[bytes] = []
        pos = size = 0
        # In small slices: this package has no limit for its output.
        while pos < len(self._input) and size < max_length and not self._frame.eof:
            parts.append(self._frame.decompress(self._input[pos : pos + ZSTD_SLICE]))
            size += len(parts[-1])
            pos += ZSTD_SLICE
        self._input = self._input[pos:]
        return b"".join(parts)


class MemberDecoder:
    """Decompresses concatenated members.

    Args:
        new_member: makes the decompressor of the next member.
        padding: zeros after the last member are padding, as in gzip files on tapes.
    """

    def __init__(self, new_member: Callable[[], Member], *, padding: bool) -> None:
        self._new_member = new_member
        self._zeros = padding
        self._member: Member | None = None
        self._input = b""
        self._pos = 0
        self._members = 0

    @property
    def hungry(self) -> bool:
        """Whether all output of the bytes given so far was returned."""
        return self._pos >= len(self._input) and (self._member is None or self._member.needs_input)

    @property
    def complete(self) -> bool:
        """Whether the bytes given so far end where a member ends."""
        return self.hungry and self._member is None and self._members > 0

    def give(self, data: bytes) -> None:
        """Take compressed bytes."""
        self._input = self._input[self._pos :] + data if self._pos < len(self._input) else data
        self._pos = 0

    def take(self, room: int) -> bytes:
        """Decompress at most `room` bytes (at least 1); may return no bytes although not `hungry`.

        Raises:
            Exception: the bytes are damaged, or not of this compression; the type depends on the package.
        """
        if self._member is None:
            # No member begins with a zero byte: it is padding, as on tapes.
            if self._zeros and self._members and self._input[self._pos] == 0:
                self._pos += len(self._input) - self._pos - len(self._input[self._pos :].lstrip(b"\0"))
                return b""
            self._member = self._new_member()
        member = self._member
        data = b""
        if member.needs_input:
            data = self._input[self._pos : self._pos + SLICE]
            self._pos += len(data)
        out = member.decompress(data, room)
        if member.eof:
            # Back to the first byte of the next member: the last slice may have contained its beginning.
            self._pos -= len(member.unused_data)
            self._member = None
            self._members += 1
        return out


def decoder(compression: Compression) -> MemberDecoder:
    """Make a decoder for `compression`.

    Raises:
        ImportError: no package for zstd is installed.
    """
    if compression == "gzip":
        return MemberDecoder(GzipMember, padding=True)
    return MemberDecoder(zstd_member(_zstd()), padding=False)


def _zstd() -> Any:
    """Import Python's own module for zstd (from 3.14 on), or the package of the extra.

    Raises:
        ImportError: none is installed.
    """
    for name in ZSTD_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError(
        "shards with zstd need a package for it, and none is installed: pip install 'asyncloader[shards]' (any of "
        f"{' and '.join(ZSTD_MODULES)} will do)"
    )


def zstd_member(module: Any) -> Callable[[], Member]:
    """Return a function that makes members with `module`, with a bound on the memory of a frame."""
    if module.__name__ == "zstandard":
        context = module.ZstdDecompressor(max_window_size=1 << ZSTD_WINDOW_LOG)
        return lambda: ZstandardMember(context)
    options = {module.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
    return lambda: module.ZstdDecompressor(None, options)


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
