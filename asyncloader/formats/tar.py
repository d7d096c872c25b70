"""Reads tar shards with WebDataset's naming, and decompresses gzip and zstd for all formats. Pure.

Data path: transport -> chunks -> [tar: `MemberDecoder`, for compressed shards] -> [tar: `TarReader`] -> samples.

*Tar.* ``dir/key.ext`` is field ``ext`` of sample ``dir/key``. Consecutive members with the same key are one sample; a
key ends at the first dot of the base name. Formats: v7, ustar, GNU (long names, large sizes) and pax. Nothing is
written to a disk, so absolute paths, ``..`` and links are harmless: names are only keys. Sources: POSIX.1-2017 `pax`
(the ustar and pax interchange formats), the GNU tar manual (the L and K headers, base-256 numbers). Samples are grouped
as by webdataset 1.0.2, except that hidden files (``dir/.name``) are always skipped.

*Compression.* A kilobyte may expand to a megabyte (gzip) or a hundred (zstd), so data is decompressed in bounded steps:
the caller says how many bytes it can take, and the rest stays compressed. Members (gzip, RFC 1952) and frames (zstd,
RFC 8878) may be concatenated.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias
from zlib import adler32

from asyncloader.formats.base import Located, Sample
from asyncloader.formats.push_parser import Parser, PushReader

__all__ = [
    "Compression",
    "MemberDecoder",
    "TarReader",
    "decoder",
    "split_name",
]

Compression: TypeAlias = Literal["gzip", "zstd"]

SLICE = 1 << 14
"""Compressed bytes passed to a member at once: those that a short member does not use are copied for the next one."""

ZSTD_SLICE = 1 << 8
"""The same for `zstandard`, whose output cannot be bounded: a block of 4 bytes expands to 128 KiB, so this gives 8 MiB.
"""

ZSTD_WINDOW_LOG = 27
"""Maximum memory for a zstd frame's window: 128 MiB, the limit of the zstd tool."""

ZSTD_MODULES = ("compression.zstd", "backports.zstd", "pyzstd")
"""Python's own (3.14), its backport, and pyzstd: all of them have the `ZstdDecompressor` described by `Member`."""


class Member(Protocol):
    """One member's decompressor, with the interface of Python's `bz2`, `lzma` and `compression.zstd`."""

    @property
    def eof(self) -> bool:
        """Whether the member's end was reached."""
        ...

    @property
    def unused_data(self) -> bytes:
        """The bytes that were passed beyond the end."""
        ...

    @property
    def needs_input(self) -> bool:
        """Whether ``decompress(b"")`` would return nothing more."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take `data`; return at most `max_length` bytes (`zstandard`: approximately)."""
        ...


class GzipMember:
    """Wraps `zlib`'s decompressor, which leaves unused input to its user, as a `Member`."""

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
        # If the output is full, there may be more inside, even though all input was taken.
        self.needs_input = len(out) < max_length and not self._zlib.unconsumed_tail
        return out


class ZstandardMember:
    """Wraps the `zstandard` package's decompressor as a `Member`; its output is bounded only via its input."""

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
        """As `Member.decompress`, but may return the output of one slice more."""
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
        """Whether everything in the bytes given so far was returned."""
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
        """Decompress at most `room` bytes (at least 1); may return none although not hungry.

        Raises:
            Exception: the bytes are damaged, or not of this compression; the type depends on the package.
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
    """Make a decoder for `compression`.

    Raises:
        ImportError: no package for zstd is installed.
    """
    return MemberDecoder(GzipMember, padding=True) if compression == "gzip" else zstd_decoder()


def zstd_decoder() -> MemberDecoder:
    """Make a decoder for zstd, with the first package that is installed."""
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
    """Return a function that makes members with `module`, with a bound on the memory of a frame."""
    if hasattr(module, "DecompressionParameter"):
        options = {module.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
    elif hasattr(module, "DParameter"):
        options = {module.DParameter.windowLogMax: ZSTD_WINDOW_LOG}
    else:
        context = module.ZstdDecompressor(max_window_size=1 << ZSTD_WINDOW_LOG)
        return lambda: ZstandardMember(context)
    return lambda: module.ZstdDecompressor(None, options)


BLOCK = 512
END = bytes(BLOCK)
MAX_META_BYTES = 1 << 20  # of a pax header or long name; real ones have some hundred
FILES = frozenset((b"0", b"\0", b"7"))
DATALESS = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, directories, FIFOs: no data follows
REFUSED = {b"S": "a GNU sparse file", b"M": "the continuation of a file from another volume"}


class TarReader(PushReader):
    """Reads a tar archive. A sample's fields are bytes, named by the lower-case extension.

    A sample is complete when the next one begins, so it is returned one header after its last byte. `resume` is the
    offset of the first header of the next sample. `max_sample_bytes` counts a sample's members with their headers.
    Skipped: directories, links, devices, members without an extension, and WebDataset's metadata (``__name__/...``).

    `ShardError`s: a wrong header checksum, an impossible number, a sparse or multi-volume member, a name that is not
    UTF-8, a field that occurs twice, a global pax header that would rename or resize members (a reader that starts
    after it could not know), and an archive without its end mark, a block of zeros.

    Arguments: see `push_parser.Reader`. A tar cannot be cut into parts without an index; with one, `start` and `stop`
    are the offsets of first headers.
    """

    _sample: Sample | None = None
    _key: str = ""
    _size: int = 0

    def _parse(self) -> Parser:
        first: int | None = None  # offset of the first header of a member: its pax or long-name header, or its own
        path: bytes | None = None
        pax_size: int | None = None
        while True:
            at = self._at
            block = yield BLOCK
            if block == END:
                self._flush(at if first is None else first)
                return
            size = self._header(block, at)
            kind = block[156:157]
            first = at if first is None else first
            if kind in (b"x", b"X", b"g", b"L", b"K"):
                if size > MAX_META_BYTES:
                    self._fail(f"a tar extension header of {size:,} bytes; {MAX_META_BYTES:,} are allowed", at)
                data = yield size
                yield -(-size % BLOCK)
                if kind == b"L":
                    path = data.partition(b"\0")[0]
                elif kind != b"K":
                    records = self._pax(data, at)
                    if kind == b"g":
                        self._check_global(records, at)
                    else:
                        path = records.get(b"path", path)
                        pax_size = self._decimal(records[b"size"], at) if b"size" in records else pax_size
                continue
            if kind in REFUSED:
                self._fail(f"{REFUSED[kind]}, which a stream cannot hold whole; pack it as a plain file", at)
            name = self._text(path if path is not None else plain_name(block), at)
            size = size if pax_size is None else pax_size
            begin, first, path, pax_size = first, None, None, None
            if kind in DATALESS:
                continue
            split = split_name(name) if kind in FILES else None
            if split is None:
                yield -(size + -size % BLOCK)
                continue
            key, field = split
            if self._sample is None or key != self._key:
                self._flush(begin)
                if self._stop is not None and begin >= self._stop:
                    return
                self._sample, self._key, self._size = {"__key__": key, "__url__": self._url}, key, 0
            if field in self._sample:
                self._fail(f"sample {key!r} has field {field!r} twice", begin)
            self._size += size + self._at - begin
            self._check_size(self._size, begin)
            self._sample[field] = yield size
            if size % BLOCK:
                yield -(-size % BLOCK)

    def _flush(self, resume: int) -> None:
        if self._sample is not None:
            self._out.append(Located(self._sample, resume))
            self._sample = None

    def _header(self, block: bytes, at: int) -> int:
        """Check a header block; return the size that it claims."""
        stated = number(block[148:156])
        # The lower half of Adler-32 started at 0 is the exact sum of up to 256 bytes: 10 times as fast as `sum`.
        total = (adler32(block[:256], 0) & 0xFFFF) + (adler32(block[256:], 0) & 0xFFFF)
        plain = total - sum(block[148:156]) + 8 * 32
        if stated != plain and stated != plain - 256 * sum(b > 127 for b in block[:148] + block[156:]):
            self._fail("not a tar header: its checksum is wrong", at)
        size = number(block[124:136])
        if size is None:
            self._fail(f"a tar header with the impossible size {block[124:136]!r}", at)
        return size

    def _pax(self, data: bytes, at: int) -> dict[bytes, bytes]:
        """Parse the records of a pax header: each is its own length, a space, key, ``=``, value and a newline."""
        records: dict[bytes, bytes] = {}
        pos = 0
        while pos < len(data) and data[pos]:  # some writers pad with zeros
            digits = data[pos : pos + 8].partition(b" ")[0]
            length = int(digits) if digits.isdigit() else 0
            key, equals, value = data[pos + len(digits) + 1 : pos + length - 1].partition(b"=")
            # A length shorter than the record's own parts would not advance, or go backwards.
            fits = len(digits) + 3 <= length <= len(data) - pos
            if not fits or not equals or data[pos + length - 1] != 10:
                self._fail(f"a broken record in a pax header, {pos:,} bytes into it", at)
            if key.startswith(b"GNU.sparse."):
                self._fail(f"{REFUSED[b'S']}, which a stream cannot hold whole; pack it as a plain file", at)
            records[key] = value
            pos += length
        return records

    def _check_global(self, records: dict[bytes, bytes], at: int) -> None:
        for key in (b"path", b"size"):
            if key in records:
                self._fail(f"a global pax header sets {key.decode()!r} for all members", at)

    def _decimal(self, value: bytes, at: int) -> int:
        if not value.isdigit() or len(value) > 20:
            self._fail(f"a pax header with the impossible size {value[:40]!r}", at)
        return int(value)

    def _text(self, name: bytes, at: int) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError:
            self._fail(f"a member's name is not UTF-8: {name[:200]!r}", at)


def number(field: bytes) -> int | None:
    """Parse a number of a tar header: octal digits, or base 256 after a set top bit. None if invalid or negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


def plain_name(block: bytes) -> bytes:
    """Return the name in the header itself; in ustar the beginning of a long name is in a field of its own."""
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def split_name(name: str) -> tuple[str, str] | None:
    """Return a member's key and field (lower case); None if it belongs to no sample.

    ``"a/b.c/d.left.JPG"`` is field ``"left.jpg"`` of ``"a/b.c/d"``.
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= base or is_meta(name):
        return None
    return name[:dot], name[dot + 1 :].lower()


def is_meta(name: str) -> bool:
    """Return whether it is one of WebDataset's own members: the first part of the path begins and ends with two
    underscores.
    """
    if not name.startswith("__"):
        return False
    first = name.partition("/")[0]
    return len(first) >= 4 and first.endswith("__")
