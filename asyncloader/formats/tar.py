"""Reads tar shards with WebDataset's naming. Pure.

Data path: transport -> chunks -> [tar] -> samples.

``dir/key.ext`` is field ``ext`` of sample ``dir/key``. Consecutive members with the same key are one sample; a
key ends at the first dot of the base name. Formats: v7, ustar, GNU (long names, large sizes) and pax. Nothing is
written to a disk, so absolute paths, ``..`` and links are harmless: names are only keys. Sources: POSIX.1-2017 `pax`
(the ustar and pax interchange formats), the GNU tar manual (the L and K headers, base-256 numbers). Samples are grouped
like those of webdataset 1.0.2, except that hidden files (``dir/.name``) are always skipped.
"""

from __future__ import annotations

from zlib import adler32

from asyncloader.formats.base import Located, Sample
from asyncloader.formats.push_parser import Parser, PushReader

BLOCK = 512
END = bytes(BLOCK)
MAX_META_BYTES = 1 << 20  # of a pax header or long name; those of real archives have some hundred
FILES = frozenset((b"0", b"\0", b"7"))
DATALESS = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, directories, FIFOs: no data follows
REFUSED = {b"S": "a GNU sparse file", b"M": "the continuation of a file from another volume"}


class TarReader(PushReader):
    """Reads a tar archive. A sample's fields are bytes, named by the lower-case extension.

    A sample is complete when the next sample begins, so it is returned one header after its last byte. `resume` is the
    offset of the first header of the next sample. `max_sample_bytes` counts a sample's members with their headers.
    Skipped: directories, links, devices, members without an extension, and WebDataset's metadata (``__name__/...``).

    `ShardError`s: a wrong header checksum, an impossible number, a sparse or multi-volume member, a field that occurs
    twice, a global pax header that would rename or resize members (a reader that starts after it could not know), and
    an archive without its end mark, a block of zeros.

    Its arguments are those of `push_parser.Reader`. A tar cannot be cut into parts without an index; with an index,
    `start` and `stop` are the offsets of first headers.
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
            # A part ends where a sample begins: its header need not be read.
            if first is None and at == self._stop:
                self._flush(at)
                return
            block = yield BLOCK
            if block == END:
                self._flush(at if first is None else first)
                return
            size = self._header(block, at)
            kind = block[156:157]
            # Extension headers belong to the member after them: a sample resumes at the first of its headers.
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
            # Like tarfile: bytes that are not UTF-8 become surrogates, and the name encodes to the same bytes again.
            name = (path if path is not None else plain_name(block)).decode("utf-8", "surrogateescape")
            size = size if pax_size is None else pax_size
            begin, first, path, pax_size = first, None, None, None
            # No data follows, whatever size the header states.
            if kind in DATALESS:
                self._pass_over(name, kind, begin)
                continue
            split = split_name(name) if kind in FILES else None
            if split is None:
                yield -(size + -size % BLOCK)
                continue
            key, field = split
            if self._sample is None or key != self._key:
                self._flush(begin)
                # By the first header of a sample, so that each sample belongs to exactly one part.
                if not self._left or (self._stop is not None and begin >= self._stop):
                    return
                self._sample, self._key, self._size = {"__key__": key, "__url__": self._url}, key, 0
            if field in self._sample:
                self._fail(f"sample {key!r} has field {field!r} twice", begin)
            # Checked before the member's bytes are requested: a header may claim any size.
            self._size += size + self._at - begin
            self._check_size(self._size, begin)
            if self._skip:
                self._sample[field] = b""
                yield -(size + -size % BLOCK)
                continue
            self._sample[field] = yield size
            if size % BLOCK:
                yield -(-size % BLOCK)

    def _pass_over(self, name: str, kind: bytes, offset: int) -> None:
        """Called with each member without data, whose first header is at `offset`. Does nothing."""

    def _flush(self, resume: int) -> None:
        if self._sample is not None:
            if self._skip:
                self._skip -= 1
            else:
                self._out.append(Located(self._sample, resume))
                self._left -= 1
            self._sample = None

    def _header(self, block: bytes, at: int) -> int:
        """Check a header block; return the size that it claims."""
        stated = number(block[148:156])
        # The lower half of Adler-32, started at 0, is the exact sum of up to 256 bytes: 10 times as fast as `sum`.
        total = (adler32(block[:256], 0) & 0xFFFF) + (adler32(block[256:], 0) & 0xFFFF)
        plain = total - sum(block[148:156]) + 8 * 32
        # Some old writers have summed signed bytes.
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
        # Some writers pad with zeros.
        while pos < len(data) and data[pos]:
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


def number(field: bytes) -> int | None:
    """Parse a number of a tar header: octal digits, or base 256 after a set top bit. None if invalid or negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


def plain_name(block: bytes) -> bytes:
    """Return the name in the header itself; ustar has a separate field for the beginning of a long name."""
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
    """Return whether a member is WebDataset's metadata: the first part of its path begins and ends with two
    underscores.
    """
    if not name.startswith("__"):
        return False
    first = name.partition("/")[0]
    return len(first) >= 4 and first.endswith("__")
