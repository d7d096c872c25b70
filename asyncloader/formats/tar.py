"""Reads and writes tar shards with WebDataset's naming. Pure.

Data path: transport -> chunks -> [tar] -> samples; samples -> [tar: `TarEncoder`] -> parts -> shard.

``dir/key.ext`` is field ``ext`` of sample ``dir/key``. Consecutive members with the same key are one sample; a
key ends at the first dot of the base name. Formats: v7, ustar, GNU (long names, large sizes) and pax. Nothing is
written to a disk, so absolute paths, ``..`` and links are harmless: names are only keys. Sources: POSIX.1-2017 `pax`
(the ustar and pax interchange formats), the GNU tar manual (the L and K headers, base-256 numbers). Samples are grouped
like those of webdataset 1.0.2, except that hidden files (``dir/.name``) are always skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from tarfile import PAX_FORMAT, TarInfo
from typing import Any, TypeVar
from zlib import adler32

from typing_extensions import Buffer

from asyncloader.formats.base import Located, Parser, PushReader, ReadWhole, Sample, SampleSlices
from asyncloader.formats.encoder import RESERVED, BadSample, Part, RecordEncoder, bytes_of_value, dump_json, encode_text

T = TypeVar("T")

BLOCK = 512
END = bytes(BLOCK)
MAX_META_BYTES = 1 << 20  # of a pax header or long name; those of real archives have some hundred
FILES = frozenset((b"0", b"\0", b"7"))
DATALESS = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, directories, FIFOs: no data follows
SPARSE = "a GNU sparse file, which a stream cannot hold whole; pack it as a plain file"
REFUSED = {b"S": SPARSE, b"M": "the continuation of a file from another volume; pack it as a plain file"}

LARGEST = 8**11  # of the sizes that a header has room for

_HEADER = Struct("100s24x12s12x8sc100x8s80x155s12x")  # name, size, checksum, type, magic, prefix
_HALF = BLOCK // 2
_OWNER = b"0000644\0" + 2 * b"0000000\0"
_TIME = b"00000000000\0"
_REST = (b"ustar\00000" + bytes(64) + 2 * b"0000000\0").ljust(BLOCK - 257, b"\0")
# Of the header's bytes but for name and size; the checksum's own eight count as blanks, and the type is a 0.
_SUM = sum(_OWNER) + sum(_TIME) + 8 * 32 + ord("0") + sum(_REST)


class TarReader(PushReader):
    """Reads a tar archive. A sample's fields are bytes, named by the lower-case extension.

    A sample is complete when the next sample begins, so it is returned one header after its last byte. `resume` is the
    offset of the first header of the next sample. `max_sample_bytes` counts a sample's members with their headers.
    Skipped: directories, links, devices, members without an extension, and WebDataset's metadata (``__name__/...``).

    `ShardError`s: a wrong header checksum, an impossible number, a sparse or multi-volume member, a field that occurs
    twice, a global pax header that would rename or resize members (a reader that starts after it could not know), and
    an archive without its end mark, a block of zeros.

    Its arguments are those of `base.Reader`. A tar cannot be cut into parts without an index; with an index,
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
            plain_name, size, kind = self._checked(parse_header, block, at)
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
                    records = self._checked(parse_pax, data, at)
                    if kind != b"g":
                        path = records.get(b"path", path)
                        pax_size = self._checked(_decimal, records[b"size"], at) if b"size" in records else pax_size
                    elif b"path" in records or b"size" in records:
                        self._fail("a global pax header sets 'path' or 'size' for all members", at)
                continue
            if kind in REFUSED:
                self._fail(REFUSED[kind], at)
            # Like tarfile: bytes that are not UTF-8 become surrogates, and the name encodes to the same bytes again.
            name = (plain_name if path is None else path).decode("utf-8", "surrogateescape")
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

    def _checked(self, parse: Callable[[bytes], T], data: bytes, at: int) -> T:
        try:
            return parse(data)
        except ValueError as error:
            self._fail(str(error), at)


def parse_header(block: bytes) -> tuple[bytes, int, bytes]:
    """Return the name, the size and the type of a member, from a header block.

    Raises:
        ValueError: its checksum is wrong, or its size impossible.
    """
    name, size, stated, kind, magic, prefix = _HEADER.unpack(block)
    # The lower half of Adler-32, started at 0, is the sum up to 65,520, that of 512 bytes of ASCII or of any 256 bytes:
    # 10 times as fast as `sum`.
    if block.isascii():
        total = adler32(block, 0) & 0xFFFF
    else:
        total = (adler32(block[:_HALF], 0) & 0xFFFF) + (adler32(block[_HALF:], 0) & 0xFFFF)
    wanted = _sum_of(stated)
    # Some old writers have summed signed bytes.
    if total != wanted and (wanted is None or total - 256 * sum(byte > 127 for byte in block) != wanted):
        raise ValueError("not a tar header: its checksum is wrong")
    length = number(size)
    if length is None:
        raise ValueError(f"a tar header with the impossible size {size!r}")
    name = name.partition(b"\0")[0]
    # ustar has a separate field for the beginning of a long name.
    if prefix[0] and magic[:6] == b"ustar\0":
        name = prefix.partition(b"\0")[0] + b"/" + name
    return name, length, kind


@lru_cache(maxsize=1 << 12)  # members of a shard have few different sums
def _sum_of(field: bytes) -> int | None:
    """Return the sum of all bytes of the header with this checksum, which counts its own eight bytes as spaces."""
    stated = number(field)
    return None if stated is None else stated + sum(field) - 8 * ord(" ")


def number(field: bytes) -> int | None:
    """Parse a number of a tar header: octal digits, or base 256 after a set top bit. None if invalid or negative."""
    digits = field[:-1]
    if not digits.isdigit() or field[-1] not in b"\0 ":  # unusual
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        digits = field.partition(b"\0")[0].strip(b" ")
        if not digits.isdigit():
            return None if digits else 0
    try:
        return int(digits, 8)
    except ValueError:  # an 8 or a 9
        return None


def parse_pax(data: bytes) -> dict[bytes, bytes]:
    """Parse the records of a pax header: each is its own length, a space, key, ``=``, value and a newline.

    Raises:
        ValueError: a record is broken, or of a sparse file.
    """
    records: dict[bytes, bytes] = {}
    pos = 0
    # Some writers pad with zeros.
    while pos < len(data) and data[pos]:
        digits = data[pos : pos + 8].partition(b" ")[0]
        begin, end = pos + len(digits) + 1, pos + int(digits) if digits.isdigit() else 0
        key, equals, value = data[begin : end - 1].partition(b"=")
        # A length shorter than the record's own parts would not advance, or go backwards.
        if not equals or not begin + 2 <= end <= len(data) or data[end - 1] != 10:
            raise ValueError(f"a broken record in a pax header, {pos:,} bytes into it")
        if key.startswith(b"GNU.sparse."):
            raise ValueError(SPARSE)
        records[key] = value
        pos = end
    return records


def _decimal(value: bytes) -> int:
    if not value.isdigit() or len(value) > 20:
        raise ValueError(f"a pax header with the impossible size {value[:40]!r}")
    return int(value)


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
    return name.startswith("__") and len(first := name.partition("/")[0]) >= 4 and first.endswith("__")


def tar_samples(url: str) -> ReadWhole:
    """Return the function that reads samples like a `TarReader`: those of plain members, also behind pax headers that
    change neither name nor size.
    """

    def read(source: SampleSlices, at: int, end: int, _: int) -> Sample | None:
        sample: Sample | None = None
        stem = b""  # of the sample's names, up to the field
        extended = False
        while at < end:
            begin = at + BLOCK
            if begin > end:
                return None
            try:
                path, size, kind = parse_header(source[at:begin])
                stop = begin + size
                at = stop + -size % BLOCK
                if at > end:
                    return None
                if kind == b"x" and size <= MAX_META_BYTES:
                    records = parse_pax(source[begin:stop])
                    if b"path" in records or b"size" in records:
                        return None
                    extended = True
                    continue
            except ValueError:
                return None
            if kind not in FILES:
                return None
            extended = False
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


@lru_cache(maxsize=1 << 8)  # samples have few different fields
def _field(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape").lower()


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
            if not isinstance(field, str) or not field or field != field.lower() or "/" in field or "\0" in field:
                raise BadSample(
                    f"its field {field!r} would be read under another name: fields of a tar are lower-case extensions"
                )
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
    if not isinstance(key, str):
        raise BadSample(
            f'its "__key__", from which a tar\'s member names begin, is {key!r:.80}: give each sample a text of its own'
        )
    base = key.rpartition("/")[2]
    if not base or "." in base or "\0" in key or is_meta(key):
        raise BadSample(
            f"its key {key!r:.80} would be read as another: the last part is empty or has a dot, where a field's name "
            "begins; or it has a NUL, or begins with a part such as __name__, which readers skip"
        )
    return key


def encode_value(field: str, value: Any) -> bytes:
    """Return the bytes of a member.

    Raises:
        BadSample: the value is neither bytes nor text, and its field no JSON.
    """
    if isinstance(value, str):
        return encode_text(field, value)
    if field.rpartition(".")[2] == "json" and not isinstance(value, bytes | bytearray | memoryview):
        return dump_json(field, value, ensure_ascii=False, allow_nan=False)
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
        return block(encoded, size)
    info = TarInfo(name)
    info.size = size
    return info.tobuf(PAX_FORMAT, "utf-8", "surrogateescape")


def block(name: bytes, size: int) -> bytes:
    """Return the header block of a plain file, in a tenth of the time of `TarInfo.tobuf`."""
    digits = b"%011o" % size
    total = _SUM + sum(name) + sum(digits)
    return b"".join((name.ljust(100, b"\0"), _OWNER, digits, b"\0", _TIME, b"%06o\0 0" % total, bytes(100), _REST))
