"""Reads and writes tar shards with WebDataset's naming. Pure.

Data path: transport -> chunks -> [tar] -> samples; samples -> [tar: `TarEncoder`] -> parts -> shard.

``dir/key.ext`` is field ``ext`` of sample ``dir/key``. Consecutive members with the same key are one sample; a
key ends at the first dot of the base name. Formats: v7, ustar, GNU (long names, large sizes) and pax. Nothing is
written to a disk, so absolute paths, ``..`` and links are harmless: names are only keys. Sources: POSIX.1-2017 `pax`
(the ustar and pax interchange formats), the GNU tar manual (the L and K headers, base-256 numbers). Samples are grouped
like those of webdataset 1.0.2, except that hidden files (``dir/.name``) are always skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any
from zlib import adler32

from typing_extensions import Buffer

from asyncloader.formats.base import Located, ReadWhole, Sample, SampleSlices
from asyncloader.formats.encoder import RESERVED, BadSample, Part, RecordEncoder, bytes_of_value, dump_json
from asyncloader.formats.push_parser import Parser, PushReader

BLOCK = 512
END = bytes(BLOCK)
MAX_META_BYTES = 1 << 20  # of a pax header or long name; those of real archives have some hundred
FILES = frozenset((b"0", b"\0", b"7"))
DATALESS = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, directories, FIFOs: no data follows
# Name, size, what ends the size, checksum, type, magic, prefix.
_HEADER = Struct("100s24x11sc12x8sc100x8s80x155s12x")
_HALF = BLOCK // 2
_PLAIN_FILES = frozenset((b"0", b"\0"))
_AFTER_CHECKSUM = frozenset((b"\0 ", b" \0", b"\0\0", b"  "))
_AFTER_SIZE = frozenset((b"\0", b" "))
REFUSED = {b"S": "a GNU sparse file", b"M": "the continuation of a file from another volume"}

LARGEST = 8**11  # of the sizes that a header has room for

_OWNER = b"0000644\0" + 2 * b"0000000\0"
_TIME = b"00000000000\0"
_REST = (b"ustar\00000" + bytes(64) + 2 * b"0000000\0").ljust(BLOCK - 257, b"\0")
# Of the header's bytes but for name, size and type; the checksum's own eight count as blanks.
_SUM = sum(_OWNER) + sum(_TIME) + 8 * 32 + sum(_REST)


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
        plain = _sum(block) - sum(block[148:156]) + 8 * 32
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


def tar_samples(url: str) -> ReadWhole:
    """Return the function that reads samples like a `TarReader`: those of plain members with plain numbers, also behind
    pax headers that change neither name nor size.
    """

    def read(source: SampleSlices, at: int, end: int, _: int) -> Sample | None:
        sample: Sample | None = None
        stem = b""  # of the sample's names, up to the field
        extended = False
        while at < end:
            if end - at < BLOCK:
                return None
            name, size, after, stated, kind, magic, prefix = _HEADER.unpack(header := source[at : at + BLOCK])
            # The lower half of Adler-32 is the sum up to 65,520: that of 512 bytes of ASCII.
            found = adler32(header, 0) & 0xFFFF if header.isascii() else _sum(header)
            if found != _stated_sum(stated) or not size.isdigit() or after not in _AFTER_SIZE:
                return None
            try:
                length = int(size, 8)
            except ValueError:  # an 8 or a 9
                return None
            begin = at + BLOCK
            stop = begin + length
            at = stop + -length % BLOCK
            if at > end:
                return None
            if kind not in _PLAIN_FILES:
                if kind != b"x" or length > MAX_META_BYTES or not _changes_nothing(source[begin:stop]):
                    return None
                extended = True
                continue
            extended = False
            path = name.partition(b"\0")[0]
            if prefix[0] and magic[:6] == b"ustar\0":
                path = prefix.partition(b"\0")[0] + b"/" + path
            if sample is None:
                base = path.rfind(b"/") + 1
                dot = path.find(b".", base)
                # Further names with these underscores may be metadata without a folder.
                if dot <= base or path.startswith(b"__"):
                    return None
                stem = path[: dot + 1]
                sample = {"__key__": path[:dot].decode("utf-8", "surrogateescape"), "__url__": url}
            elif not path.startswith(stem) or b"/" in path[len(stem) :]:
                return None
            field = _field(path[len(stem) :])
            if field in sample:
                return None
            sample[field] = source[begin:stop]
        return None if extended else sample

    return read


def _sum(header: bytes) -> int:
    """Return the sum of a header's bytes. The lower half of Adler-32, started at 0, is the exact sum of up to 256
    bytes: 10 times as fast as `sum`.
    """
    return (adler32(header[:_HALF], 0) & 0xFFFF) + (adler32(header[_HALF:], 0) & 0xFFFF)


@lru_cache(maxsize=1 << 12)  # members of a shard have few different sums
def _stated_sum(field: bytes) -> int:
    """Return the sum of all bytes of the header with this checksum, which counts its own eight bytes as spaces; -1 if
    it is written in an unusual way.
    """
    digits = field[:6]
    if not digits.isdigit() or field[6:] not in _AFTER_CHECKSUM or digits.strip(b"01234567"):
        return -1
    return int(digits, 8) + sum(field) - 8 * ord(" ")


@lru_cache(maxsize=1 << 8)  # and few different fields
def _field(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape").lower()


def _changes_nothing(records: bytes) -> bool:
    """Return whether a pax header is well-formed, and says neither the name nor the size of its member."""
    at, end = 0, len(records)
    while at < end and records[at]:
        digits = records[at : at + 8].partition(b" ")[0]
        if not digits.isdigit():
            return False
        begin, stop = at + len(digits) + 1, at + int(digits)
        key, equals, _ = records[begin : stop - 1].partition(b"=")
        if not equals or not begin + 2 <= stop <= end or records[stop - 1] != 10:
            return False
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            return False
        at = stop
    return True


class TarEncoder(RecordEncoder):
    """Encodes samples as members of a tar archive.

    Field ``ext`` of sample ``dir/key`` becomes the member ``dir/key.ext``: a plain file, mode 644, of no user, at time
    0. Format: ustar (POSIX.1-2017 `pax`), with a pax header where a name or a size does not fit.

    A value is bytes; a text, written as UTF-8; or, in a field whose name ends with ``json``, what `json.dumps` takes.
    """

    keyed = True
    base_bytes = 2 * BLOCK

    def encode_sample(self, sample: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return a sample's members, like `RecordEncoder.encode_sample`."""
        key = check_key(sample.get("__key__"))
        pieces: list[bytes | memoryview] = []
        for field, value in sample.items():
            if field in RESERVED:
                continue
            check_field(field)
            data = value if type(value) is bytes else encode_value(field, value)
            pieces.append(header(f"{key}.{field}", len(data)))
            pieces.append(data)
            if len(data) % BLOCK:
                pieces.append(bytes(-len(data) % BLOCK))
        if not pieces:
            raise BadSample("it has no field, and a tar holds a sample by its fields only")
        return pieces

    def assemble(self, parts: Sequence[Part]) -> list[Buffer]:
        """Return the bytes of an archive, like `ShardEncoder.assemble`."""
        return [*super().assemble(parts), bytes(2 * BLOCK)]


def check_key(key: Any) -> str:
    """Refuse a key with which the sample would not be read again.

    Raises:
        BadSample: it is missing, or no text; or a reader would not find it in a member's name.
    """
    if key is None:
        raise BadSample(
            'it has no "__key__", from which a tar\'s member names begin: give each sample a text of its own'
        )
    if not isinstance(key, str):
        raise BadSample(f'its "__key__" is a {type(key).__name__}; make it a text')
    base = key.rpartition("/")[2]
    if not base or "." in base:
        raise BadSample(
            "the last part of its key is empty or has a dot, where a reader takes the field's name to begin"
        )
    if "\0" in key or is_meta(key):
        raise BadSample("its key has a NUL, or begins with a part such as __name__, which readers skip")
    return key


def check_field(field: str) -> None:
    """Refuse the name of a field that would be read as another.

    Raises:
        BadSample: it is no text, empty, not in lower case, or has a slash or a NUL.
    """
    if not isinstance(field, str) or not field or field != field.lower() or "/" in field or "\0" in field:
        raise BadSample(
            f"its field {field!r} would be read under another name: fields of a tar are lower-case extensions"
        )


def encode_value(field: str, value: Any) -> bytes:
    """Return the bytes of a member.

    Raises:
        BadSample: the value is neither bytes nor text, and its field no JSON.
    """
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise BadSample(f"its field {field!r} is a text that UTF-8 cannot hold: {error}") from None
    if field.rpartition(".")[2] == "json" and not isinstance(value, bytes | bytearray | memoryview):
        try:
            return dump_json(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadSample(f"its field {field!r} cannot be JSON: {error}") from None
    return bytes_of_value(field, value)


def header(name: str, size: int) -> bytes:
    """Return the header of a member with this name and size: one block, or more with a pax header.

    Raises:
        BadSample: the name has half a character.
    """
    try:
        encoded = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise BadSample(f"its key, or a field's name, is a text that UTF-8 cannot hold: {error}") from None
    if len(encoded) <= 100 and size < LARGEST:
        return block(encoded, size, b"0")
    records = record(b"path", encoded) if len(encoded) > 100 else b""
    if size >= LARGEST:
        records += record(b"size", b"%d" % size)
    padding = bytes(-len(records) % BLOCK)
    short = block(encoded[:100], min(size, LARGEST - 1), b"0")
    return block(b"././@PaxHeader", len(records), b"x") + records + padding + short


def record(key: bytes, value: bytes) -> bytes:
    """Return a record of a pax header, which begins with its own length."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def block(name: bytes, size: int, kind: bytes) -> bytes:
    """Return one header block."""
    digits = b"%011o" % size
    total = _SUM + sum(name) + sum(digits) + kind[0]
    return b"".join((name.ljust(100, b"\0"), _OWNER, digits, b"\0", _TIME, b"%06o\0 " % total, kind, bytes(100), _REST))
