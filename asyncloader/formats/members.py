"""gzip and zstd as a sequence of members, decompressed in bounded steps. Pure.

Data path: transport -> chunks -> [decompress] -> reader -> samples.

A kilobyte may hold a megabyte (gzip) or a hundred (zstd), so whoever reads says how much there is room for, and what
was not come to stays compressed. Members (gzip, RFC 1952) and frames (zstd, RFC 8878) may follow one another.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

__all__ = ["Compression", "MemberDecoder", "decoder"]

Compression: TypeAlias = Literal["gzip", "zstd"]

SLICE = 1 << 14
"""Compressed bytes that a member is given at once: what a short member leaves of them is copied to the next one."""

ZSTD_SLICE = 1 << 8
"""The same for `zstandard`, which cannot be told a bound: a block of 4 bytes holds 128 KiB, so this gives 8 MiB."""

ZSTD_WINDOW_LOG = 27
"""Memory that a zstd frame may ask for: 128 MiB, the limit of the zstd tool."""

ZSTD_MODULES = ("compression.zstd", "backports.zstd", "pyzstd")
"""Python's own (3.14), its backport, and pyzstd: all of them have the `ZstdDecompressor` that `Member` describes."""


class Member(Protocol):
    """One member's decompressor, with the interface of Python's `bz2`, `lzma` and `compression.zstd`."""

    @property
    def eof(self) -> bool:
        """The member's end was reached."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What was given beyond the end."""
        ...

    @property
    def needs_input(self) -> bool:
        """``decompress(b"")`` would give nothing more."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take `data`; give at most `max_length` bytes (`zstandard`: about)."""
        ...


class GzipMember:
    """`zlib`'s decompressor, which leaves unused input to its user, as a `Member`."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(31)  # a gzip header and trailer; checks the CRC-32 and the length
        self.needs_input = True

    @property
    def eof(self) -> bool:
        """As `Member.eof`."""
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        """As `Member.unused_data`."""
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """As `Member.decompress`."""
        out = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        # Full output: there may be more inside, also when all input is taken.
        self.needs_input = len(out) < max_length and not self._zlib.unconsumed_tail
        return out


class ZstandardMember:
    """The `zstandard` package's decompressor as a `Member`; bounded only by the size of what it is given."""

    def __init__(self, context: Any) -> None:
        self._frame = context.decompressobj()
        self._input = b""

    @property
    def eof(self) -> bool:
        """As `Member.eof`."""
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        """As `Member.unused_data`."""
        unused: bytes = self._frame.unused_data
        return unused + self._input

    @property
    def needs_input(self) -> bool:
        """As `Member.needs_input`."""
        return not self._input

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """As `Member.decompress`, but for one slice's output more."""
        self._input += data
        parts: list[bytes] = []
        pos = size = 0
        while pos < len(self._input) and size < max_length and not self._frame.eof:
            parts.append(self._frame.decompress(self._input[pos : pos + ZSTD_SLICE]))
            size += len(parts[-1])
            pos += ZSTD_SLICE
        self._input = self._input[pos:]
        return b"".join(parts)


class MemberDecoder:
    """Decompresses members that follow one another.

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
        """All that the bytes so far hold was given."""
        return self._pos >= len(self._input) and (self._member is None or self._member.needs_input)

    @property
    def complete(self) -> bool:
        """The bytes so far end where a member ends."""
        return self.hungry and self._member is None and self._members > 0

    def give(self, data: bytes) -> None:
        """Take compressed bytes."""
        self._input = self._input[self._pos :] + data if self._pos < len(self._input) else data
        self._pos = 0

    def take(self, room: int) -> bytes:
        """Decompress `room` bytes at most (at least 1); may give none although not hungry.

        Raises:
            Exception: the bytes are damaged, or not of this compression; of a type that the package chose.
        """
        if self._member is None:
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
            self._pos -= len(member.unused_data)
            self._member = None
            self._members += 1
        return out


def decoder(compression: Compression) -> MemberDecoder:
    """A decoder for `compression`.

    Raises:
        ImportError: no package for zstd is installed.
    """
    return MemberDecoder(GzipMember, padding=True) if compression == "gzip" else zstd_decoder()


def zstd_decoder() -> MemberDecoder:
    """A decoder for zstd, by the first package that is installed."""
    for name in (*ZSTD_MODULES, "zstandard"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        return MemberDecoder(zstd_member(module), padding=False)
    raise ImportError(
        "this shard is compressed with zstd, and no package for it is installed: pip install 'asyncloader[shards]' "
        f"(any of {', '.join(ZSTD_MODULES)} and zstandard will do)"
    )


def zstd_member(module: Any) -> Callable[[], Member]:
    """What makes the members with `module`, with a bound on the memory that a frame may ask for."""
    if hasattr(module, "DecompressionParameter"):
        options = {module.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
    elif hasattr(module, "DParameter"):
        options = {module.DParameter.windowLogMax: ZSTD_WINDOW_LOG}
    else:
        context = module.ZstdDecompressor(max_window_size=1 << ZSTD_WINDOW_LOG)
        return lambda: ZstandardMember(context)
    return lambda: module.ZstdDecompressor(None, options)
