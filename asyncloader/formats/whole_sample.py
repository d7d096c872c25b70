"""Reads a sample whose bytes are all there, if it has the usual form. Pure.

Data path: the bytes of a sample, found by an index -> [whole_sample] -> sample.

A shard's reader takes chunks of any size, and everything that the format allows. A sample that is read by its number
comes whole, and a reader for each would take several times as long as these functions. They make the same checks. A
function returns the sample that the format's reader returns or, for all that is unusual or wrong, None: then the
reader decides, and has the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import Protocol, TypeAlias
from zlib import adler32

from asyncloader.formats.base import Sample, base_name
from asyncloader.formats.mds import RAW, MdsShard, mds_encoding
from asyncloader.formats.tar import BLOCK, MAX_META_BYTES
from asyncloader.formats.tfrecord import crc32c, fast_crc32c, mask_crc


class SampleSlices(Protocol):
    """Has the bytes of samples: bytes, or a file, of which parts are read without a copy of the whole sample."""

    def __getitem__(self, part: slice, /) -> bytes:
        """Return ``part.stop - part.start`` bytes. There is no step, and neither is left out."""
        ...


ReadWhole: TypeAlias = Callable[[SampleSlices, int, int, int], Sample | None]
"""Called with a source, the positions in it at which a sample's bytes begin and end, and their offset in the shard."""

# Name, size, what ends the size, checksum, type, magic, prefix.
_HEADER = Struct("100s24x11sc12x8sc100x8s80x155s12x")
_HALF = BLOCK // 2
_FILES = frozenset((b"0", b"\0"))
_AFTER_CHECKSUM = frozenset((b"\0 ", b" \0", b"\0\0", b"  "))
_AFTER_SIZE = frozenset((b"\0", b" "))
_RECORD = Struct("<QI")
_CRC = Struct("<I")
_BLANKS = " \t\r\n"  # of JSON
_decode_json = json.JSONDecoder().raw_decode


def read_whole(url: str, name: str, shard: MdsShard | None) -> ReadWhole:
    """Return the function that reads samples of a shard, decompressed.

    Args:
        url: the shard's.
        name: of its format.
        shard: the index's entry of an MDS shard.
    """
    if shard is not None:
        return mds_samples(url, shard)
    if name == "tar":
        return tar_samples(url)
    return tfrecords(url, fast_crc32c()) if name == "tfrecord" else json_lines(url)


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
            if kind not in _FILES:
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
    """Return the sum of a header's bytes, which the lower half of Adler-32 is for 256 of them."""
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


def mds_samples(url: str, shard: MdsShard) -> ReadWhole:
    """Return the function that reads samples like an `MdsReader`."""
    name = base_name(url)
    columns = [
        (column.name, column.size, None if column.encoding in RAW else mds_encoding(column.encoding).decode)
        for column in shard.columns
    ]
    sizes = Struct(f"<{sum(column.size is None for column in shard.columns)}I")
    unpack, nbytes = sizes.unpack, sizes.size
    fixed = nbytes + sum(column.size or 0 for column in shard.columns)

    def read(source: SampleSlices, at: int, end: int, start: int) -> Sample | None:
        if end - at < fixed:
            return None
        head = unpack(source[at : at + nbytes])
        if end - at != fixed + sum(head):
            return None
        fields: Sample = {}
        lengths = iter(head)
        at += nbytes
        try:
            for column, size, decode in columns:
                stop = at + (next(lengths) if size is None else size)
                fields[column] = source[at:stop] if decode is None else decode(source[at:stop])
                at = stop
        except (ValueError, ArithmeticError, RecursionError):
            return None
        fields["__key__"] = f"{name}:{start}"
        fields["__url__"] = url
        return fields

    return read


def json_lines(url: str) -> ReadWhole:
    """Return the function that reads samples like a `JsonlReader`: lines with their ends, and no blank line before."""
    name = base_name(url)

    def read(source: SampleSlices, at: int, end: int, start: int) -> Sample | None:
        line = source[at:end]
        if line.find(b"\n") != len(line) - 1:
            return None
        try:
            # As `json.loads`, but for blanks at the beginning.
            text = line.decode()
            fields, stop = _decode_json(text)
        except (ValueError, RecursionError):  # a byte order mark at the shard's start, too
            return None
        if type(fields) is not dict or (stop != len(text) - 1 and text[stop:].strip(_BLANKS)):
            return None
        fields["__key__"] = f"{name}:{start}"
        fields["__url__"] = url
        return fields

    return read


def tfrecords(url: str, checksum: Callable[[bytes], int] | None) -> ReadWhole:
    """Return the function that reads samples like a `TFRecordReader` of raw records.

    Args:
        url: of the shard.
        checksum: the CRC-32C function that verifies the data; None: not verified. That of the length always is.
    """
    name = base_name(url)
    of_length = crc32c if checksum is None else checksum

    def read(source: SampleSlices, at: int, end: int, start: int) -> Sample | None:
        if end - at < 16:
            return None
        length, stated = _RECORD.unpack(source[at : at + _RECORD.size])
        if length != end - at - 16 or stated != mask_crc(of_length(source[at : at + 8])):
            return None
        data = source[at + 12 : end - 4]
        if checksum is not None and _CRC.unpack(source[end - 4 : end])[0] != mask_crc(checksum(data)):
            return None
        return {"record": data, "__key__": f"{name}:{start}", "__url__": url}

    return read
